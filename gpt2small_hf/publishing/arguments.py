"""Flags of `push`, and their checks that need no torch."""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from gpt2small_hf.config.parser import FlagParser
from gpt2small_hf.errors import CommandError, UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.invocation import command
from gpt2small_hf.runs.files import check_writable
from gpt2small_hf.runs.layout import RunFolder

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
NAME = re.compile(r"(?!.*\.\.|HEAD$|[0-9a-f]{40}$)[A-Za-z0-9_][A-Za-z0-9._-]*(?<!\.)(?<!\.lock)")
"""A branch or tag that git accepts (`git check-ref-format`), and does not take for a commit."""
FINGERPRINT = re.compile("[0-9a-f]{12}")
"""A result of `secret_scan.fingerprint`."""
ADDRESS = re.compile(r"https?://[^\s()<>{}`\\]+")
MODEL_PAGE = re.compile(
    r"^https?://(?:huggingface\.co|hf\.co)/((?!(?:papers|datasets|spaces|collections|docs|blog)/)[^/?#]+/[^/?#]+)/?$"
)
"""Address of a model on the Hub."""
MAX_NAMED = 5
"""Maximum number of folders listed in a message."""

_REPEATED = {"--allow_secret": FINGERPRINT, "--language": LANGUAGE}
"""Flags of a list → the form of its values. They may follow one flag."""
FLAGS = {
    "Destination": {
        "private": "Make the repository private. New ones are private in any case.",
        "public": "Make the repository public after the push is verified.",
        "revision": "Branch to push to, created if it does not exist. Default: main.",
        "all_checkpoints": "Also publish each checkpoint, as a branch step-N.",
        "create_pr": "Open a pull request, or add to your open one of the same --message. Needs no write access.",
        "tag": "Tag of the commit, used by the card's code. Default: the step and a hash of the loaded files.",
        "message": "First line of the commit message.",
    },
    "Model": {
        "also_native": "Also publish the weights as transformers' GPT-2, without remote code, in REPO-native.",
        "code_only": "Update code and card of a published model. Weights, settings and tokenizer must be equal.",
        "tokenizer": "Tokenizer for weights that come without one: a folder or Hub id.",
        "allow_worse_than_base": "Publish a model whose held-out loss is above that of its base.",
        "allow_modified_code": "Publish model code that is not this package's or the run's. The card states it.",
    },
    "Card": {
        "license": "License of the weights: apache-2.0, mit, cc-by-4.0, …, other. Default: none.",
        "license_name": "Name of a license that the Hub does not list (with --license other).",
        "license_link": "Address of its text (with --license other).",
        "license_file": "License text, published as LICENSE. Default: written for apache-2.0 and mit, else linked.",
        "language": "Codes of the model's languages: en, de, …",
        "baseline": "Run to compare with: the card lists differences in settings and loss.",
        "developers": "Authors of the model, each in quotes. Default: the account of REPO, or of --origin.",
        "contact": "Where to ask about the model: an address, an account, a page.",
        "origin": "Source of weights without a run: a Hub id or https://… Default: where they were downloaded.",
        "publish_chat_questions": "Include questions from the run's chats with the model's answers: prompts taken from "
        "the chats, and the first held-out questions.",
    },
    "Safety": {
        "allow_secret": "Fingerprints of values that only look like secrets. The error prints them; tokens with a "
        "provider's prefix (hf_…, sk-…) have none.",
        "replace": "Replace a model that this command did not publish. Its state is tagged before-COMMIT; its weights, "
        "settings, tokenizer, code, license and card are removed.",
        "replace_card": "Overwrite a README.md that was edited on the Hub.",
        "no_verify": "Compare checksums after the push, without loading the model from the Hub.",
    },
    "Output": {
        "dry_run": "Stage and check everything without using the network.",
        "output_dir": "Folder to stage in. Default: staged/ in the run folder; without a run, runs/NAME/staged.",
        "json": "Print the content of published.json on stdout, and everything else on stderr.",
    },
}
"""Section of the help → flag → help."""
SWITCHES = (
    *("private", "public", "all_checkpoints", "create_pr", "also_native", "code_only", "allow_worse_than_base"),
    *("allow_modified_code", "publish_chat_questions", "replace", "replace_card", "no_verify", "dry_run", "json"),
)
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"action": "store_true"} for name in SWITCHES},
    **{name: {"type": Path} for name in ("license_file", "baseline", "output_dir")},
    **{name: {"action": "append"} for name in ("language", "allow_secret")},
    "developers": {"nargs": "+"},
}
"""Flag → how it is parsed, if its value is not one string."""
CONFLICTS = {
    ("private", "public"): "choose one",
    ("revision", "all_checkpoints"): "checkpoints have branches of their own",
    ("revision", "create_pr"): "a pull request proposes a change of main",
    ("all_checkpoints", "create_pr"): "a pull request proposes one model",
    ("tag", "create_pr"): "tag the commit after the pull request is merged",
    ("code_only", "all_checkpoints"): "it updates one published model",
    ("code_only", "also_native"): "it updates one published model",
    ("code_only", "replace"): "it keeps the published weights",
}
"""Pairs of flags that cannot be combined → the reason."""


class AuthError(CommandError):
    """The Hub does not know the token, or does not let it do this."""

    status = 3


def parse_arguments(words: list[str]) -> Namespace:
    """Parse the command line. Raises: UsageError for an invalid value, and for flags that cannot be combined."""
    parser = FlagParser(
        prog=command("push"),
        description="Publish a model on the Hugging Face Hub. It is staged, checked and loaded in an isolated process, "
        "sent in one commit, and loaded again from the Hub. Nothing is sent before all local checks pass. New "
        "repositories are private. The token comes from HF_TOKEN or `hf auth login`.",
    )
    what = "A run folder (its kept model), one of its checkpoints, a model folder, or one of the reference series."
    parser.add_argument("RUN", type=Path, help=what)
    parser.add_argument("REPO", nargs="?", help="USER/REPO, created if it does not exist. Optional with --dry_run.")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, help in flags.items():
            group.add_argument(f"--{name}", help=help, **KINDS.get(name, {}))
    (args,) = parser.fill(repeat_flags(words))
    args.words = words
    for (first, second), reason in CONFLICTS.items():
        if getattr(args, first) and getattr(args, second):
            raise UsageError(f"--{first} cannot be combined with --{second}: {reason}.")
    check_names(args)
    check_license(args)
    check_credit(args)
    return args


def repeat_flags(words: list[str]) -> list[str]:
    """Write the flag again before each further value of a list, so that it does not take RUN and REPO for values."""
    result, flag = [], ""
    for word in words:
        if word in _REPEATED:
            flag = word
        elif flag and result[-1] != flag:
            flag = flag if _REPEATED[flag].fullmatch(word) else ""
            result += [flag] if flag else []
        result.append(word)
    return result


def check_names(args: Namespace) -> None:
    """Raise: UsageError for an invalid repository, tag, branch, language or fingerprint."""
    if args.REPO is not None:
        check_repo_id(args.REPO)
    for name in ("tag", "revision"):
        value = getattr(args, name)
        if value is not None and not NAME.fullmatch(value):
            raise UsageError(
                f"--{name} {value}: use letters, digits, dots, dashes and underscores, without .., a final dot or "
                ".lock; not HEAD or 40 hexadecimal digits."
            )
    if args.tag is not None and args.tag in ("main", args.revision):
        raise UsageError(f"--tag {args.tag} is the name of a branch. Use another.")
    for code in args.language or []:
        if not LANGUAGE.fullmatch(code):
            raise UsageError(f"--language {code} is not a language code. Write en for English, de for German, …")
    for value in args.allow_secret or []:
        if not FINGERPRINT.fullmatch(value):
            raise UsageError(
                f"--allow_secret has a value of {len(value)} characters that is not a fingerprint. Give the 12 "
                "lower-case hexadecimal digits that the error prints."
            )


def check_credit(args: Namespace) -> None:
    """Raise: UsageError for authors, a contact or an origin that a card or a citation cannot name."""
    contact = [] if args.contact is None else [args.contact]
    for name, values in (("developers", args.developers or []), ("contact", contact)):
        for value in values:
            if not value.strip() or not value.isprintable() or set("`{}\\") & set(value):
                raise UsageError(f"--{name} {value!r}: use one line of text without backquotes, braces or backslashes.")
            check_address(name, value)
    if args.origin is not None:
        check_address("origin", args.origin)
        args.origin = MODEL_PAGE.sub(r"\1", args.origin).rstrip("/")
        try:
            if not ADDRESS.fullmatch(args.origin):
                check_repo_id(args.origin)
        except UsageError:
            message = f"--origin {args.origin} is neither a Hub id (USER/REPO) nor an address (https://…)."
            raise UsageError(message) from None


def check_address(flag: str, value: str) -> None:
    """Raise: UsageError for text with an address that has a login or a query, which the card would publish."""
    if re.search(r"\w+://([^/?#\s]*@|[^#\s]*\?)", value):
        raise UsageError(f"--{flag}: the card is public, so leave user, password and query (?…) out of the address.")


def check_license(args: Namespace) -> None:
    """Raise: UsageError for an unknown license, and a name, link or text that is missing, invalid, or not asked for."""
    name, link, file = args.license_name, args.license_link, args.license_file
    if args.license is None and file is not None:
        raise UsageError("--license_file needs --license: name the license of that text, such as --license mit.")
    if args.license is not None and args.license not in LICENSES:
        near = difflib.get_close_matches(args.license.lower(), LICENSES, 1)
        hint = f"Did you mean {near[0]}?" if near else "Some it has: apache-2.0, mit, cc-by-4.0, cc-by-sa-4.0."
        raise UsageError(f"--license {args.license} is not a license of the Hub. {hint}")
    if args.license != "other" and (name, link) != (None, None):
        raise UsageError("--license_name and --license_link describe --license other. Add it, or leave them out.")
    if args.license == "other" and (name is None or (link is None and file is None)):
        raise UsageError("--license other needs --license_name, and --license_link or --license_file.")
    if name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise UsageError(f"--license_name {name}: use lower-case letters, digits, dots, dashes and underscores.")
    if link is not None:
        check_address("license_link", link)
        if not ADDRESS.fullmatch(link):
            raise UsageError(f"--license_link {link} is not an address. Write https://…, or use --license_file {link}.")
    if file is not None:
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


def check_paths(args: Namespace) -> None:
    """Raise: UsageError for a missing model, repository or baseline, and a folder that cannot be written."""
    check_source(args.RUN)
    if args.REPO is None and not args.dry_run:
        raise UsageError("no repository is named. Add USER/REPO, or --dry_run to see what would be published.")
    if args.baseline is not None and not RunFolder(args.baseline).resolved.is_file():
        raise UsageError(f"--baseline {args.baseline} is not a run folder. Name one, such as runs/tiny.")
    if args.output_dir is not None:
        check_writable("--output_dir", args.output_dir)


def check_source(name: Path) -> None:
    """Raise: UsageError if a path is not a folder, or is one that contains runs, checkpoints or prepared text."""
    path = name.expanduser()
    if not path.exists():
        raise UsageError(f"{name} does not exist. Name a run folder, such as runs/tiny, or one of its checkpoints.")
    if path.is_file():
        raise UsageError(f"{name} is a file. Name its folder: a model is more than its weights.")
    if any((path / marker).exists() for marker in ("config.json", "model.json", "resolved.json")):
        return
    if any((path / marker).is_file() for marker in ("ckpt.pt", "adapter_config.json")):
        return
    if (path / "meta.json").is_file():
        raise UsageError(f"{name} is a prepared data set, not a model. Name the run that was trained on it.")
    for what, marker in (("run", "resolved.json"), ("checkpoint", "trainer_state.json"), ("data set", "meta.json")):
        if inside := sorted(name / found.parent.name for found in path.glob(f"*/{marker}")):
            few = ", ".join(map(str, inside[:MAX_NAMED])) + (" …" if len(inside) > MAX_NAMED else "")
            advice = "Name a run." if what == "data set" else "Name one of them."
            raise UsageError(f"{name} is not a model; it contains {counted(len(inside), what)}: {few}. {advice}")
    raise UsageError(
        f"{name} is not a model: expected a run, or config.json or model.json next to *.safetensors, or nanoGPT's "
        "ckpt.pt. Name a run folder, such as runs/tiny."
    )


def token_in_use() -> str:
    """Return the token to push with. Raises: UsageError if HF_HUB_OFFLINE is set, AuthError for a missing token."""
    if constants.HF_HUB_OFFLINE:
        raise UsageError("HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or add --dry_run.")
    token = stored_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise AuthError("the token in use contains invalid characters. Check HF_TOKEN: hf_ and letters.")
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
