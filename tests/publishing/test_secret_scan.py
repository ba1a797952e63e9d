"""No secret is published: of none of these forms, in none of these places; and nothing else is taken for one."""

import base64
import json
import random
import re
import shutil
import string
import struct
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
from conftest import REPOSITORY
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import escaped
from gpt2small_hf.publishing.push import print_chat_questions
from gpt2small_hf.publishing.secret_scan import (
    MIN_TOKEN_LENGTH,
    SEPARATOR,
    allow_secrets,
    allowed_secrets,
    check_flag_value,
    check_secrets,
    fingerprint,
    is_secret,
    secrets_in,
)
from gpt2small_hf.publishing.secret_values import is_random
from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.publishing.stage import stage
from gpt2small_hf.runs.files import write_json, write_jsonl

# ---- the forms: made here, so that no file has one -----------------------------------------------------------------

RANDOM = random.Random()
HEX, LOWER = "0123456789abcdef", string.ascii_lowercase
UPPER, BASE64 = string.ascii_uppercase + string.digits, string.ascii_letters + string.digits + "+/"
WORD = string.ascii_letters + string.digits
SEEDS = (20, 2027)
"""Of the values in the forms. The rules were written with the first; the second was drawn once they were final."""


def signs(n: int, letters: str = WORD) -> str:
    """Random characters, as they come: some values have no digit, or no capital."""
    return "".join(RANDOM.choices(letters, k=n))


def words(n: int, between: str = "") -> str:
    """A passphrase of words."""
    return between.join(RANDOM.sample(["correct", "horse", "battery", "staple", "winter", "orange", "planet"], k=n))


def uuid() -> str:
    return "-".join(signs(n, HEX) for n in (8, 4, 4, 4, 12))


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def jwt() -> str:
    return f"{encoded({'alg': 'HS256', 'typ': 'JWT'})}.{encoded({'sub': '1234567', 'name': 'ada'})}.{signs(43)}"


def pem(kind: str = "", block: str = "") -> str:
    lines = "\n".join(signs(64, BASE64) for _ in range(4))
    return f"-----BEGIN {kind}PRIVATE KEY{block}-----\n{lines}\n-----END {kind}PRIVATE KEY{block}-----"


def forms(seed: int) -> dict[str, str]:
    """A secret of each form."""
    RANDOM.seed(seed)
    login = base64.b64encode(f"ada:{signs(18)}".encode()).decode()
    return {
        "Hugging Face": "hf_" + signs(34),
        "Hugging Face OAuth": "hf_oauth_" + jwt(),
        "Hugging Face JWT": "hf_jwt_" + jwt(),
        "Hugging Face organisation": "api_org_" + signs(34),
        "AWS access key": "AKIA" + signs(16, UPPER),
        "AWS temporary access key": "ASIA" + signs(16, UPPER),
        "AWS secret key": f"AWS_SECRET_ACCESS_KEY={signs(40, BASE64)}",
        "AWS secret key in a profile": f"aws_secret_access_key = {signs(40, BASE64)}",
        "AWS session token": f"AWS_SESSION_TOKEN=IQoJb3JpZ2luX2Vj{signs(200, BASE64)}==",
        "AWS signed address": f"https://b.s3.amazonaws.com/k?X-Amz-Date=20260101&X-Amz-Signature={signs(64, HEX)}",
        "Google signed address": f"https://storage.googleapis.com/b/k?X-Goog-Signature={signs(512, HEX)}",
        "CloudFront signed address": f"https://d1.cloudfront.net/k?Expires=1&Signature={signs(300)}&Key-Pair-Id=K2",
        "Azure account key": f"AccountName=ada;AccountKey={signs(86, BASE64)}==;EndpointSuffix=core.windows.net",
        "Azure shared access signature": f"https://ada.blob.core.windows.net/c/k?sv=2024-01-01&sp=r&sig={signs(43)}%3D",
        "Azure client secret": f"{signs(3)}8Q~{signs(34)}",
        "OpenAI": "sk-" + signs(48),
        "OpenAI project": f"sk-proj-{signs(74)}_{signs(40)}",
        "OpenAI service account": f"sk-svcacct-{signs(74)}-{signs(40)}",
        "Anthropic": f"sk-ant-api03-{signs(40)}-{signs(40)}_AA",
        "Anthropic OAuth": f"sk-ant-oat01-{signs(90)}",
        "OpenRouter": "sk-or-v1-" + signs(64, HEX),
        "DeepSeek": "sk-" + signs(32, HEX),
        "Langfuse": "sk-lf-" + uuid(),
        "Google API": "AIza" + signs(35),
        "Google OAuth access": "ya29." + signs(120),
        "Google OAuth client": "GOCSPX-" + signs(28),
        "Google OAuth refresh": "1//0" + signs(90),
        "Google service account": json.dumps({"type": "service_account", "private_key": pem()}),
        **{f"GitHub {kind}": f"gh{kind}_{signs(36)}" for kind in "pousr"},
        "GitHub fine-grained": f"github_pat_{signs(22)}_{signs(59)}",
        "GitLab": "glpat-" + signs(20),
        "GitLab runner": "glrt-" + signs(20),
        "Slack bot": f"xoxb-123456789012-1234567890123-{signs(24)}",
        "Slack user": f"xoxp-123456789012-123456789012-123456789012-{signs(32, HEX)}",
        "Slack app": f"xapp-1-A{signs(10, UPPER)}-1234567890123-{signs(64, HEX)}",
        "Slack webhook": f"https://hooks.slack.com/services/T{signs(10, UPPER)}/B{signs(10, UPPER)}/{signs(24)}",
        "Discord webhook": f"https://discord.com/api/webhooks/123456789012345678/{signs(68)}",
        "Discord bot": f"M{signs(23)}.{signs(6)}.{signs(38)}",
        "PuTTY key": "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPrivate-Lines: 1\n" + signs(64, BASE64),
        "private key": pem(),
        "private key, RSA": pem("RSA "),
        "private key, OpenSSH": pem("OPENSSH "),
        "private key, encrypted": pem("ENCRYPTED "),
        "private key, PGP": pem("PGP ", " BLOCK"),
        "private key in JSON": json.dumps({"key": pem()}),
        "age": "AGE-SECRET-KEY-1" + signs(58, UPPER),
        "Weights & Biases": f"WANDB_API_KEY={signs(40, HEX)}",
        "Weights & Biases login": f"wandb login {signs(40, HEX)}",
        "Weights & Biases, new": "wandb_v1_" + signs(77),
        "netrc": f"machine api.wandb.ai\n  login user\n  password {signs(40, HEX)}",
        "netrc in a line": f"machine example.com login ada password {signs(14)}",
        "npm": "npm_" + signs(36),
        "npmrc": f"//registry.npmjs.org/:_authToken={uuid()}",
        "PyPI": "pypi-AgEIcHlwaS5vcmc" + signs(120),
        "Stripe": "sk_live_" + signs(24),
        "Stripe restricted": "rk_live_" + signs(24),
        "Stripe webhook": "whsec_" + signs(32),
        "JSON Web Token": jwt(),
        "Groq": "gsk_" + signs(52),
        "Replicate": "r8_" + signs(37),
        "SendGrid": f"SG.{signs(22)}.{signs(43)}",
        "Databricks": "dapi" + signs(32, HEX),
        "Telegram": f"1234567890:AA{signs(33)}",
        "Docker": "dckr_pat_" + signs(27),
        "Docker login": json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": login}}}),
        "DigitalOcean": "dop_v1_" + signs(64, HEX),
        "Kaggle": json.dumps({"username": "ada", "key": signs(32, HEX)}),
        "Kaggle variable": f"KAGGLE_KEY={signs(32, HEX)}",
        "Kaggle, new": "KGAT_" + signs(32, HEX),
        "xAI": "xai-" + signs(80),
        "Comet": f"COMET_API_KEY={signs(25)}",
        "LangSmith": f"lsv2_pt_{signs(32, HEX)}_{signs(10, HEX)}",
        "Modal": "as-" + signs(22),
        "Vault": "hvs." + signs(95),
        "password": f"password={signs(12)}",
        "password of letters": f"password={signs(12, string.ascii_letters)}",
        "password of lower-case letters": f"password: {signs(16, LOWER)}",
        "password of words": f"password={words(3)}",
        "password of words with dashes": f"password={words(4, '-')}",
        "password of a word and a number": f"password={words(1)}{signs(3, string.digits)}",
        "password in quotes": f'password: "{words(1)}{signs(3, string.digits)}"',
        "password in a sentence": f"the password: {signs(12)} is",
        "password with a special character": "DB_PASSWORD: correct!horse",
        "password flag": f"--password {signs(14)}",
        "password in JSON": json.dumps({"password": signs(14)}),
        "bearer": f"Authorization: Bearer {signs(40)}",
        "basic": f"Authorization: Basic {login}",
        "API key": f'api_key = "{signs(32)}"',
        "client secret": f"CLIENT_SECRET={signs(32)}",
        "client secret in lower case": f"client_secret={signs(24, LOWER)}",
        "secret key in capitals": f"SECRET_KEY={signs(20, string.ascii_uppercase)}",
        "token in lower case": f"auth_token: {signs(20, LOWER + string.digits)}",
        "address with a password": f"postgres://ada:{signs(12)}@db.example.org:5432/x",
        **{
            f"address of {scheme}": f"{scheme}://{user}:{password}@{host}"
            for scheme, user, password, host in (
                ("postgresql", "user", "password", "host/db"),
                ("postgres", "ada", words(2), "db.example.org/x"),
                ("mysql+pymysql", "root", signs(10, LOWER), "10.0.0.7:3306/x"),
                ("mongodb+srv", "ada", signs(16), "cluster0.mongodb.net/?retryWrites=true"),
                ("redis", "", signs(20), "cache.example.org:6379/0"),
                ("amqp", "guest", "guest", "queue:5672/%2f"),
                ("https", "ada", words(2), "example.org/x"),
                ("ftp", "ada", f"{words(1)}$1", "files.example.org"),
            )
        },
        "address with a password and @": f"https://ada:p@{signs(6)}@example.org/x",
        "Mailgun": "key-" + signs(32, HEX),
        "Mailchimp": signs(32, HEX) + "-us12",
        "Twilio": "SK" + signs(32, HEX),
        "Linear": "lin_api_" + signs(40),
        "Neptune": "NEPTUNE_API_TOKEN=" + encoded({"api_address": "https://app.neptune.ai", "api_key": uuid()}),
        "MLflow": f"MLFLOW_TRACKING_PASSWORD={signs(16)}",
        "NVIDIA": "nvapi-" + signs(64),
        "Pinecone": f"pcsk_{signs(6)}_{signs(63)}",
        "Terraform": f"{signs(14)}.atlasv1.{signs(67)}",  # this and the next are of Kingfisher's rules alone
        "Shopify": "shpat_" + signs(32, HEX),
        "Postman": f"PMAK-{signs(24, HEX)}-{signs(34, HEX)}",
    }


FORMS = forms(SEEDS[0])

# ---- the places -----------------------------------------------------------------------------------------------------


def text(path: Path, secret: str) -> None:
    path.write_text(f"# one\n\nkey `{secret}` of a test\n")


def in_template(path: Path, secret: str) -> None:
    path.write_text(f"{{# {secret} #}}\n{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}")


def in_table(path: Path, secret: str) -> None:
    """As the card shows settings: Markdown escapes what it would take for markup."""
    path.write_text(f"| setting | value |\n| :--- | :--- |\n| key | {escaped(secret)} |\n")


def in_json(*names: str | int, line: str = "{}") -> Callable[[Path, str], None]:
    """As a value that has these names above it, among others."""

    def put(path: Path, secret: str) -> None:
        value: object = line.format(secret)
        for name in reversed(names):
            value = [0] * name + [value] if isinstance(name, int) else {"seed": 1, name: value, "steps": [20, 40]}
        write_json(path, value)

    return put


def in_name(path: Path, secret: str) -> None:
    write_json(path, {"inputs": {secret: "sha"}})


def in_escapes(path: Path, secret: str) -> None:
    path.write_text(f'{{"note": "{"".join(map(unicode_escape, secret))}"}}')


def unicode_escape(sign: str) -> str:
    return f"\\u{ord(sign):04x}"


def in_lines(path: Path, secret: str) -> None:
    write_jsonl(path, [{"step": 0, "sampled": "one"}, {"step": 20, "sampled": f"and so {secret}"}])


def in_header(path: Path, secret: str) -> None:
    header = json.dumps({"__metadata__": {"note": secret}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\xbf" * 64)


def in_chunk(kind: str, *, compressed: bool = False) -> Callable[[Path, str], None]:
    def put(path: Path, secret: str) -> None:
        info, words = PngInfo(), f"made with {secret}"
        if kind == "iTXt":
            info.add_itxt("Comment", words, "en", "note", zip=compressed)
        else:
            info.add_text("Comment", words, zip=compressed)
        Image.new("L", (1, 1)).save(path, "PNG", pnginfo=info)

    return put


PLACES = {
    "setting": ("resolved.json", in_json("run", "note")),
    "command": ("resolved.json", in_json("made_by", "command", line="python train.py --note {} --seed 1")),
    "prompt": ("resolved.json", in_json("run", "prompts", 1, line="The key is {}, and")),
    "name of an input": ("evaluation/heldout.json", in_name),
    "sample": ("evaluation/completions.json", in_json("completions", 2, "sampled", line=" is\n{}\n")),
    "escaped": ("evaluation/completions.json", in_escapes),
    "card": ("README.md", text),
    "table of the card": ("README.md", in_table),
    "chat template": ("chat_template.jinja", in_template),
    "tokenizer": ("tokenizer.json", in_json("added_tokens", 1, "content")),
    "settings of the tokenizer": ("tokenizer_config.json", in_json("note")),
    "configuration": ("config.json", in_json("note")),
    "code": ("gpt.py", text),
    "license": ("LICENSE", text),
    "weights": ("model.safetensors", in_header),
    "text of a picture": ("charts/loss.png", in_chunk("tEXt")),
    "compressed text": ("charts/loss.png", in_chunk("tEXt", compressed=True)),
    "international text": ("charts/loss.png", in_chunk("iTXt")),
    "compressed international text": ("charts/loss.png", in_chunk("iTXt", compressed=True)),
    "samples on the way": ("samples.jsonl", in_lines),
}


@pytest.mark.parametrize("place", PLACES)
def test_each_form_of_secret_is_found_in_each_place(place, tmp_path):
    name, put = PLACES[place]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    put(path, "nothing of the kind")
    assert secrets_in(path) == []
    missed = []
    for form, secret in FORMS.items():
        put(path, secret)
        if not secrets_in(path):
            missed.append(form)
    assert missed == []


def test_forms_with_values_that_the_rules_were_not_written_with_are_found(tmp_path):
    """Each form once, each in the next place."""
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "charts").mkdir()
    missed = []
    for (form, secret), place in zip(forms(SEEDS[1]).items(), cycle(PLACES), strict=False):
        name, put = PLACES[place]
        put(tmp_path / name, secret)
        if not secrets_in(tmp_path / name):
            missed.append((form, place))
    assert missed == []


@pytest.mark.parametrize("form", ["Hugging Face", "AWS secret key", "Slack webhook", "private key", "Terraform"])
def test_refusal_names_file_kind_and_place_and_not_the_secret(form, tmp_path):
    for name, put in PLACES.values():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        put(path, FORMS[form])
        with pytest.raises(UsageError) as refused:
            check_secrets(tmp_path)
        said = str(refused.value)
        assert refused.value.status == 2
        assert re.match(
            rf"found what looks like an? [^()]+(\([\w-]+\))? ?in {re.escape(name)} \([^()]+\)[.;,].* Remove it",
            said,
        )
        assert "revoke it" in said
        assert not any(FORMS[form][at : at + 8] in said for at in range(12, len(FORMS[form]) - 8)), said
        path.unlink()


@pytest.mark.parametrize("place", PLACES)
def test_token_in_use_is_found_in_each_place_whatever_it_looks_like(place, tmp_path):
    name, put = PLACES[place]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    token = "my.own+token (of a test)"
    put(path, token)
    with pytest.raises(UsageError) as refused:
        check_secrets(tmp_path, token)
    assert str(refused.value).startswith(f"found what looks like the Hugging Face token in use in {name} (")
    assert token not in str(refused.value)
    for none in (None, "", "a" * (MIN_TOKEN_LENGTH - 1)):  # a shorter one may be part of any text
        check_secrets(tmp_path, none)


def test_place_of_a_secret_is_its_line_byte_or_name(tmp_path):
    secret = FORMS["Hugging Face"]
    masked = unicode_escape(secret[0]) + secret[1:]
    for name, content, where in (
        ("a.py", f"import os\n\nkey = {secret!r}\n", "line 3"),
        ("a.json", f'{{"run": {{"prompts": ["a", "{masked}"]}}}}', "run.prompts[1]"),
        ("README.md", f"# A\n\n{escaped(secret)}", "line 3"),
        ("samples.jsonl", f'{{"step": 0}}\n{{"step": 1, "greedy": "{masked}"}}', "line 2.greedy"),
        ("a.safetensors", f"{'-' * 1500}\0{secret}\0", "byte 1,501"),
    ):
        path = tmp_path / name
        path.write_text(content)
        assert secrets_in(path) == [("a Hugging Face token", where)]


@pytest.mark.parametrize("block", [2**16, 2**20])
def test_secret_among_numbers_is_found_wherever_it_is(block, tmp_path):
    """At a place where reading in blocks of this size would cut it in two."""
    for form in ("Hugging Face", "GitHub p", "OpenAI", "Google API", "AWS access key", "private key"):
        secret = b"\0" + FORMS[form].encode() + b"\0"
        before = block - len(secret) // 2
        (tmp_path / "model.safetensors").write_bytes(b"\xbf" * before + secret + b"\xbf" * block)
        assert secrets_in(tmp_path / "model.safetensors"), form


def test_files_that_the_card_quotes_are_scanned_where_they_are(tmp_path):
    (tmp_path / "staged").mkdir()
    samples = tmp_path / "samples.jsonl"
    check_secrets(tmp_path / "staged", quoted=[samples])  # there are none
    in_lines(samples, FORMS["Hugging Face"])
    with pytest.raises(UsageError, match=r"a Hugging Face token in \S+/samples\.jsonl \(line 2\.\w+\)"):
        check_secrets(tmp_path / "staged", quoted=[samples])


@pytest.mark.parametrize(
    "form",
    [
        *("netrc in a line", "bearer", "basic", "AWS secret key in a profile", "Weights & Biases login"),
        *("Docker login", "Kaggle", "password in quotes", "API key"),
    ],
)
def test_name_and_value_in_two_strings_are_not_a_secret(form):
    name, _, value = FORMS[form].rpartition(" ")
    assert is_secret(f"{name}\n  {value}")
    assert not is_secret(f"{name}{SEPARATOR}{value}")


def test_kinds_in_a_refusal_have_the_order_of_their_places(tmp_path):
    """Also those of a card, whatever PYTHONHASHSEED is: six kinds have 720 orders."""
    listed = ["Stripe", "Slack bot", "Google API", "AWS access key", "GitHub p", "Hugging Face"]
    (tmp_path / "README.md").write_text("\n".join(FORMS[form] for form in listed))
    with pytest.raises(UsageError) as refused:
        check_secrets(tmp_path)
    assert re.findall(r"line (\d)", str(refused.value)) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(("letters", "share"), [(WORD, 0.9987), (LOWER + string.digits, 0.99)])
def test_share_of_random_values_that_are_recognised_is_as_stated(letters, share):
    draw = random.Random(1)
    values = ["".join(draw.choices(letters, k=12)) for _ in range(10_000)]
    assert sum(map(is_random, values)) / len(values) == pytest.approx(share, abs=0.003)


def test_title_with_a_secret_is_refused():
    check_flag_value("--message", "Publish tiny step 2,500 (held-out loss 3.141)")
    for secret in FORMS.values():
        with pytest.raises(UsageError, match="--message contains what looks like"):
            check_flag_value("--message", f"Publish {secret} step 10")


def test_refusal_names_up_to_five_places_by_the_files_they_come_from(tmp_path):
    token = FORMS["Hugging Face"]
    (tmp_path / "staged").mkdir()
    told = {"run": {"prompts": [f"{token} a", "no secret", token]}, "key": FORMS["AWS access key"]}
    (tmp_path / "staged" / "resolved.json").write_text(json.dumps(told))
    (tmp_path / "staged" / "README.md").write_text(f"# A\n\n{token}\n{FORMS['Google API']}\n")
    write_jsonl(tmp_path / "samples.jsonl", [{"prompt": token}] * 4)
    with pytest.raises(UsageError) as refused:
        check_secrets(tmp_path / "staged", None, [tmp_path / "samples.jsonl"], lambda name: f"runs/a/{name}")
    said = str(refused.value)
    assert (
        "a Hugging Face token in runs/a/resolved.json (run.prompts[0]), runs/a/resolved.json (run.prompts[2])" in said
    )
    assert len(re.findall(r"\((run|key|line)\b", said)) == 5, said
    assert "README.md (line 3)" not in said  # it is of the prompts
    assert re.search(r"; and \d more\. Remove it there", said)
    assert not any(secret in said for secret in FORMS.values())


@pytest.mark.parametrize("secret", [FORMS["Hugging Face"], FORMS["Slack webhook"], "my.own+token"])
def test_question_with_a_secret_is_not_printed(secret, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "my.own+token")
    print_chat_questions(["Who are you?", f"Is {secret} mine?"], published=False)
    out = capsys.readouterr().out
    assert '"Who are you?", (not printed: it contains what looks like a secret)' in out
    assert secret not in out


# ---- what is none ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged_run(tiny_run, tmp_path_factory) -> Path:
    """A staged run with a card. Not to be changed."""
    folder = tmp_path_factory.mktemp("staged") / "staged"
    stage(find_source(tiny_run.root), folder)
    (folder / "README.md").write_text("# A model\n\nAnd nothing else.\n")
    return folder


def test_real_runs_have_no_secret(staged_run, chat_run, tmp_path):
    check_secrets(staged_run)
    stage(find_source(chat_run.root), tmp_path / "chat")
    check_secrets(tmp_path / "chat")
    check_secrets(chat_run.root)


@pytest.mark.parametrize("name", ["gpt2small_hf", "examples", "docs"])
def test_nothing_of_this_package_is_taken_for_a_secret(name, tmp_path):
    files = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=files)
    check_secrets(tmp_path / name)


def test_hashes_names_and_words_are_not_taken_for_secrets(tmp_path):
    digest = "8330e99013f6690287b81e7170a26d921dcf85988dd62f1d82b81a3771973361"
    (tmp_path / "empty").touch()
    (tmp_path / "README.md").write_text(
        f"""hf_model hf_hub_download hf_transfer_is_on_and_other_words_joined_by_underscores {digest} sha256:{digest}
        task-{digest} disk-{digest[:40]} mask-{digest[:8]}-{digest[8:12]} sk-learn gpt2small_hf-{digest}
        https://example.com/risk-assessment-of-large-language-models-in-2024-and-how-to-measure-it
        ask-what_the_language_model_has_learned_of_Python3_and_its_many_modules desk-lamp task-2024-01-02-GPT2-small
        AKIA and ASIA and AKIATHATISAWORD -----BEGIN PUBLIC KEY----- -----BEGIN CERTIFICATE----- PRIVATE KEY
        ghp_ github_pat_ glpat- AIza xoxb- api_org_ hf_ sk- sk-proj- hf_oauth_token_of_the_current_user
        token = tokenizer.encode("a1") eos_token: "<|endoftext|>1" bos_token="token1" max_new_tokens=128
        password=getpass1() password: str = field(1) password = None "password": "your password 1" pwd=$HOME1
        https://user:password@host/x http://localhost:8000 secret_key=os.environ["KEY1"] api_key="<KEY 1>"
        machine learning, login and password 12:34:56 wandb 0.25 commit {digest[:40]} Bearer of the ring 2
        """
    )
    check_secrets(tmp_path)


NAMED = """
    The password: hunter22 is weak.| login.password=form1.password| access_token: string2| api-key: v1beta1
    The secret: room101 is here| --primary_key column1| ?token=page1234567890123456| auth_token=get_token_from_cache
    password=your_token_here| token=changeme| api_key=<token>| api_key=${VAR}| SECRET_KEY=os.environ["SECRET_KEY"]
    password=None| password: null| password=xxxxxxxxxxxxxxxxxxxx| password=password| password: str = None
    secret_key = tokenizer_configuration| client_secret=settings.CLIENT_SECRET| API_KEY=insert-api-key-here
    https://user:password@host/x| postgres://user:${PASSWORD}@host/db| postgres://{user}:{password}@host/db
    The password: something that you know.| password: forgotten, reset it| [credentials]: https://host.org/a#setup-1
    secret: V1Secret | None| The secret is that there is none.| What is secret is always suspected
"""


@pytest.mark.parametrize("text", [text.strip() for line in NAMED.strip().splitlines() for text in line.split("| ")])
def test_placeholder_word_or_identifier_is_not_taken_for_a_secret(text):
    assert not is_secret(text)


@pytest.mark.parametrize(
    "text",
    [
        *("The password: kQ82mzXp41vT is strong.", "password=hunter22 is weak.", "password: hunter22", "pwd=12345678"),
        *("password: Summer2024 user: bob", "password: Summer2024, db_host = db1", "**Password:** Summer2024 user=bob"),
    ],
)
def test_random_value_in_a_sentence_and_assigned_word_are_found(text):
    assert is_secret(text)


def test_allowed_value_is_ignored_in_all_files_and_another_is_not(tmp_path):
    write_json(tmp_path / "a.json", {"note": "password=hunter22"})
    (tmp_path / "README.md").write_text("It says password: hunter22\n")
    with pytest.raises(UsageError, match=re.escape(f"[--allow_secret {fingerprint('hunter22')} ")) as refused:
        check_secrets(tmp_path)
    assert "hunter22" not in str(refused.value)
    with allow_secrets([fingerprint("hunter22"), "0" * 12]):
        check_secrets(tmp_path)
        check_flag_value("--message", "password=hunter22")
        assert not is_secret("password=hunter22")
        assert allowed_secrets() == [fingerprint("hunter22")]
        write_json(tmp_path / "b.json", {"note": "password=hunter23"})
        with pytest.raises(UsageError, match=fingerprint("hunter23")):
            check_secrets(tmp_path)
    assert allowed_secrets() == []
    assert is_secret("password=hunter22")


MAY_BE_ALLOWED = {
    *(form for form in FORMS if re.match(r"password|address|netrc|AWS secret|.* signed|.* shared access", form)),
    *("Docker login", "Kaggle variable", "MLflow", "bearer", "basic", "API key", "client secret"),
    *("client secret in lower case", "secret key in capitals", "token in lower case"),
    "Postman",  # Kingfisher's confidence in it is medium, and in the next high
} - {"address of mongodb+srv"}
"""Recognised by what stands around the value, not by its own form."""


@pytest.mark.parametrize("form", sorted(MAY_BE_ALLOWED))
def test_value_recognised_by_its_surroundings_can_be_allowed(form, tmp_path):
    text(tmp_path / "README.md", FORMS[form])
    allowed: set[str] = set()
    for _ in range(3):  # two rules may take different parts for the value
        with allow_secrets(allowed):
            found = secrets_in(tmp_path / "README.md")
        allowed |= {*re.findall(r"--allow_secret ([0-9a-f]{12}) ", str(found))}
    assert allowed
    assert found == []


@pytest.mark.parametrize("form", [form for form in FORMS if form not in MAY_BE_ALLOWED])
def test_token_with_a_form_of_its_own_and_the_one_in_use_cannot_be_allowed(form, tmp_path):
    secret = FORMS[form]
    every_part = {fingerprint(secret[i:j]) for i in range(3) for j in range(len(secret) + 1)}
    for text, token in ((f"API_KEY={secret}\n", None), (f"API_KEY={secret}\n", secret)):
        (tmp_path / "README.md").write_text(text)
        with allow_secrets(every_part), pytest.raises(UsageError) as refused:
            check_secrets(tmp_path, token)
        assert "--allow_secret" not in str(refused.value)


def test_damaged_files_are_scanned_as_bytes(tmp_path):
    for name, content in (
        ("a.json", b'{"a": '),
        ("deep.json", b"[" * 100_000),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\x09zTXta\0\0broken"),
        ("a.safetensors", b"\xff" * 9),
        ("README.md", b"\xff\xfe"),
    ):
        (tmp_path / name).write_bytes(content)
        assert secrets_in(tmp_path / name) == []
        (tmp_path / name).write_bytes(content + b"\n" + FORMS["Hugging Face"].encode() + b"\n")
        assert secrets_in(tmp_path / name), name
