"""The command line of `push.py`: its flags, and what does not go together. No model is looked at, no torch imported."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.errors import CommandError, UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.invocation import command

# The Hub's identifiers, without those of other people's models.
LICENSES = """
apache-2.0 mit bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear isc zlib ncsa unlicense cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0
c-uda gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 agpl-3.0 gfdl mpl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 osl-3.0 afl-3.0
artistic-2.0 bsl-1.0 ecl-2.0 etalab-2.0 ms-pl odbl odc-by ofl-1.1 pddl postgresql lppl-1.3c lgpl-lr wtfpl openmdw-1.0
openrail openrail++ bigscience-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m creativeml-openrail-m unknown
other
""".split()  # noqa: SIM905

LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})?|multilingual|code")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""Of a branch or tag."""
NO_NAME = re.compile(r".*\.\..*|.*(\.|\.lock)|HEAD|[0-9a-f]{40}")
"""Of these, what git does not take as a name (`git check-ref-format`), or takes for a commit."""
COLLECTION = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*-[0-9a-f]+")
FINGERPRINT = re.compile("[0-9a-f]{12}")
"""Of a value that looks like a secret: see `secret_scan.fingerprint`."""
ADDRESS = re.compile(r"https?://[^\s()<>{}`\\]+")
MODEL_PAGE = re.compile(
    r"^https?://(?:huggingface\.co|hf\.co)/((?!(?:papers|datasets|spaces|collections|docs|blog)/)[^/?#]+/[^/?#]+)/?$"
)
"""Address of a model on the Hub."""


MOST_NAMED = 5
"""Folders listed in a message."""


class AuthError(CommandError):
    """The Hub does not know the token, or does not let it do this."""

    status = 3


def parse_arguments(words: list[str]) -> Namespace:
    """The command line. Raises: UsageError for what does not go together, or is no license, tag or repository."""
    parser = FlagParser(
        prog=command("push"),
        description="Publish a model on the Hugging Face Hub: what is staged is checked as a stranger would use it, "
        "goes there in one commit, and is loaded from there again. Nothing is sent before all checks here are passed. "
        "A new repository is private. The token comes from HF_TOKEN or `hf auth login`.",
    )
    add = parser.add_argument
    add("RUN", type=Path, help="A run folder (its kept model), one of its checkpoints, a model folder of ours, or the "
        "reference series' model.json with model.safetensors and train.json, which is converted first.")  # fmt: skip
    add("REPO", nargs="?", help="USER/REPO, made if it is not there. Not needed with --dry_run.")
    visible = parser.add_mutually_exclusive_group()
    visible.add_argument("--private", action="store_true", help="Hide the repository. New ones are hidden anyway.")
    visible.add_argument("--public", action="store_true", help="Show it to everybody, once all is verified.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--revision", help="The branch to push to, made if it is not there. Unset: main.")
    where.add_argument("--all_checkpoints", action="store_true", help="Each checkpoint too, as a branch step-N.")
    where.add_argument("--create_pr", action="store_true", help="Open a pull request, or add to your "
        "open one of the same title (--message). Needs no write access to REPO.")  # fmt: skip
    add("--tag", help="Tag for the card's code to name. Unset: the step and a hash of all that is loaded.")
    add("--message", help="First line of the commit.")
    add("--baseline", type=Path, help="A run to tell the differences from, in settings and loss.")
    add("--also_native", action="store_true", help="The same weights as transformers' own GPT-2, which needs no remote "
        "code, in a second repository: REPO-native.")  # fmt: skip
    add("--code_only", action="store_true", help="Of a published model: this checkout's code and a new card. Weights, "
        "settings and tokenizer must be the run's own, and stay.")  # fmt: skip
    add("--license", help="License of the weights, as the Hub spells it: apache-2.0, mit, cc-by-4.0, …, other. Unset: "
        "none is named.")  # fmt: skip
    add("--license_name", help="Identifier of a license that the Hub does not list (with --license other).")
    add("--license_link", help="Address of its text (with --license other).")
    add("--license_file", type=Path, help="Text of the license, published as LICENSE. Unset: written for apache-2.0, "
        "and for mit if the copyright holder is known; others are linked if SPDX has a page of them.")  # fmt: skip
    add("--developers", nargs="+", help="Who trained the model: people, groups, each in quotes. Unset: the account of "
        "REPO for a run, that of --origin for weights without a run.")  # fmt: skip
    add("--contact", help="Where to ask about the model: an address, an account, a page.")
    add("--origin", help="Where weights without a run come from: a Hub id or https://… The card credits and links it. "
        "Unset: the Hub repository that they were downloaded from, if that is known.")  # fmt: skip
    add("--language", nargs="+", help="Codes of the languages it writes: en, de, …")
    add("--collection", help="Slug of a collection to add it to, the end of its address: user/title-ID.")
    add("--tokenizer", help="Of weights that have none beside them: a folder or Hub id.")
    add("--allow_worse_than_base", action="store_true", help="Publish a model whose held-out loss is above that before "
        "training.")  # fmt: skip
    add("--allow_modified_code", action="store_true", help="Publish model code that is neither this package's nor the "
        "code recorded in training. The card states it.")  # fmt: skip
    add("--allow_secret", nargs="+", action="extend", help="Fingerprints of values that look like secrets "
        "and are not. A refusal prints them; tokens with a provider's own form (hf_…, sk-…) have none.")  # fmt: skip
    add("--publish_chat_questions", action="store_true", help="Publish questions of the run's chats, with the "
        "model's answers: prompts that were taken from them because none were given, and the first held-out questions. "
        "Unset: they are left out.")  # fmt: skip
    add("--replace", action="store_true", help="Replace a model that was not published by this command: the branch's "
        "state is tagged before-COMMIT, then one commit removes that model's files (weights, settings, tokenizer, "
        "code, license) and its card, and lists those that it keeps. Unset: it is refused.")  # fmt: skip
    add("--replace_card", action="store_true", help="Write over a README.md that was edited on the Hub.")
    add("--dry_run", action="store_true", help="Do everything up to the network, which is not touched.")
    add(
        "--output_dir",
        type=Path,
        help="Where to stage. Unset: staged/ in the run folder; of what is no run, runs/NAME/staged.",
    )
    add("--no_verify", action="store_true", help="Do not load it from the Hub again; compare checksums alone.")
    add("--json", action="store_true", help="Print what published.json says, and all else on stderr.")
    (args,) = parser.fill(words)
    args.words = words
    if args.REPO is None and not args.dry_run:
        raise UsageError("where to? Name the repository, USER/REPO, or look at what would be published with --dry_run.")
    if args.REPO is not None:
        check_repo_id(args.REPO)
    for name in ("tag", "revision"):
        value = getattr(args, name)
        if value is not None and not NAME.fullmatch(value):
            raise UsageError(f"--{name} {value}: use letters, digits, dots, dashes and underscores.")
        if value is not None and NO_NAME.fullmatch(value):
            raise UsageError(
                f"--{name} {value} is not a name that git accepts: no .. in it, no dot or .lock at its end, not HEAD, "
                "not 40 hexadecimal digits."
            )
    if args.tag is not None and args.tag in ("main", args.revision):
        raise UsageError(f"--tag {args.tag} is the name of a branch. Name another.")
    if args.tag and args.create_pr:
        raise UsageError("--tag marks what is published, and a pull request is not yet: tag it when it is merged.")
    if args.code_only and (args.all_checkpoints or args.also_native):
        raise UsageError("--code_only updates one published model: leave --all_checkpoints and --also_native out.")
    if args.code_only and args.replace:
        raise UsageError("--code_only keeps all weights, and --replace removes those of another model. Use one.")
    if args.collection is not None and not COLLECTION.fullmatch(args.collection):
        raise UsageError(
            f"--collection {args.collection} is not the slug of a collection. Give the end of its address: "
            "user/title-0123456789abcdef01234567."
        )
    for code in args.language or []:
        if not LANGUAGE.fullmatch(code):
            raise UsageError(f"--language {code} is not a language code. Write en for English, de for German, …")
    if args.license is not None and args.license not in LICENSES:
        near = difflib.get_close_matches(args.license.lower(), LICENSES, 1)
        hint = f"Did you mean {near[0]}?" if near else "Some it has: apache-2.0, mit, cc-by-4.0, cc-by-sa-4.0."
        raise UsageError(f"--license {args.license} is not a license of the Hub. {hint}")
    for value in args.allow_secret or []:
        if not FINGERPRINT.fullmatch(value):
            raise UsageError(
                f"--allow_secret has a value of {len(value)} characters that is not a fingerprint. Give the 12 "
                "hexadecimal digits, in lower case, that the refusal prints."
            )
    check_license(args)
    check_credit(args)
    return args


def check_credit(args: Namespace) -> None:
    """Raise: UsageError for people, a contact or an origin that a card or a citation cannot name."""
    for name, values in (
        ("developers", args.developers or []),
        ("contact", [args.contact] * (args.contact is not None)),
    ):
        for value in values:
            if not value.strip() or not value.isprintable() or set("`{}\\") & set(value):
                raise UsageError(f"--{name} {value!r}: use one line of text without backquotes, braces or backslashes.")
            check_address(name, value)
    if args.origin is not None:
        check_address("origin", args.origin)
        args.origin = MODEL_PAGE.sub(r"\1", args.origin).rstrip("/")
        if not ADDRESS.fullmatch(args.origin) and not is_repo_id(args.origin):
            raise UsageError(f"--origin {args.origin} is neither a Hub id (USER/REPO) nor an address (https://…).")


def check_address(flag: str, value: str) -> None:
    """Raise: UsageError for text with an address that has a login or a query, which the card would publish."""
    if re.search(r"\w+://([^/?#\s]*@|[^#\s]*\?)", value):
        raise UsageError(f"--{flag}: the card is public, so leave user, password and query (?…) out of the address.")


def is_repo_id(value: str) -> bool:
    """Return whether a value is `user/name` as the Hub allows it."""
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return "/" in value


def check_license(args: Namespace) -> None:
    """Raise: UsageError for a license whose name, link or text is missing, invalid, or not asked for."""
    name, link, file = args.license_name, args.license_link, args.license_file
    if args.license == "other":
        if name is None or (link is None and file is None):
            raise UsageError("--license other needs --license_name, and --license_link or --license_file.")
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
            raise UsageError(f"--license_name {name}: use lower-case letters, digits, dots, dashes and underscores.")
        if link is not None:
            check_address("license_link", link)
            if not ADDRESS.fullmatch(link):
                raise UsageError(
                    f"--license_link {link} is not an address. Write https://…, or name a file with its text: "
                    f"--license_file {link}."
                )
    elif name is not None or link is not None:
        raise UsageError("--license_name and --license_link describe --license other. Add it, or leave them out.")
    if file is not None:
        if args.license is None:
            raise UsageError("--license_file has the text of a license that is not named. Add --license.")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"--license_file {file} cannot be read ({reason}). Name a text file.") from None
        if not text.strip():
            raise UsageError(f"--license_file {file} is empty. Name the text of the license.")


def check_repo_id(repo_id: str) -> None:
    """Raise: UsageError unless it is `user/name` as the Hub allows it."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"{repo_id} is not a repository name: {' '.join(str(error).split())}") from None
    if "/" not in repo_id:
        raise UsageError(f"{repo_id} lacks the account it belongs to. Write USER/{repo_id}.")


def check_source(name: Path) -> None:
    """Raise: UsageError if a path is not a folder, or is one that contains runs, checkpoints or prepared text."""
    path = name.expanduser()
    if not path.exists():
        raise UsageError(f"{name} does not exist. Name a run folder, such as runs/tiny, or one of its checkpoints.")
    if path.is_file():
        raise UsageError(f"{name} is a file. Name the folder it lies in: a model is more than its weights.")
    if any((path / marker).exists() for marker in ("config.json", "model.json", "resolved.json")):
        return
    if (path / "meta.json").is_file():
        raise UsageError(f"{name} is a prepared data set, not a model. Name the run that was trained on it.")
    for what, marker in (("run", "resolved.json"), ("checkpoint", "trainer_state.json"), ("data set", "meta.json")):
        if inside := sorted(name / found.parent.name for found in path.glob(f"*/{marker}")):
            few = ", ".join(map(str, inside[:MOST_NAMED])) + (" …" if len(inside) > MOST_NAMED else "")
            advice = "Name a run." if what == "data set" else "Name one of them."
            raise UsageError(f"{name} is not a model; it contains {counted(len(inside), what)}: {few}. {advice}")


def token_in_use() -> str:
    """Return the token to push with. The network is not touched.

    Raises: UsageError where the Hub is switched off, AuthError for a missing or unreadable token.
    """
    if constants.HF_HUB_OFFLINE:
        raise UsageError("HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or add --dry_run.")
    token = stored_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise AuthError("the token in use has characters that tokens do not have. Check HF_TOKEN: hf_ and letters.")
    if token is None:
        raise AuthError("no token for the Hub. Log in once with `hf auth login`, or set HF_TOKEN.")
    return token


def stored_token() -> str | None:
    """Return the token of the environment or of `hf auth login`, if any. Raises: AuthError for an unreadable one."""
    try:
        return get_token()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthError(f"the token for the Hub cannot be read ({error}). Log in again: hf auth login") from None


def known_token() -> str | None:
    """Return the token of the environment or of `hf auth login`, if it can be read: a dry run needs none."""
    with suppress(AuthError):
        return stored_token()
    return None
