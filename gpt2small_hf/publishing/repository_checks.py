"""What a push must not overwrite or omit: another model, an edited card, a license, a tag, files ignored by git."""

from __future__ import annotations

import base64
import re
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.utils import get_session, hf_raise_for_status

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import ADDRESS
from gpt2small_hf.publishing.card import is_marked, is_unedited, only_metadata
from gpt2small_hf.publishing.client import command_errors
from gpt2small_hf.publishing.hub import MAIN, Hub, RepositoryState, is_same
from gpt2small_hf.publishing.license import License
from gpt2small_hf.publishing.stage import Files, is_loaded, is_model_file, is_weights, list_files

OUR_TYPES = {"gpt2small", "gpt2", "gpjtgpt2"}
"""Model types that this command publishes, or published under another name."""


def find_other_model(hub: Hub, remote: RepositoryState, published: list[Files]) -> str | None:
    """Describe a model on a branch that was not pushed by this command. None for a pushed model, or if there is none.

    A pushed model is recognized by the mark in its card, edited or not, or by weights that are in one of `published`.
    """
    parts = sorted(name for name in remote.files if is_model_file(name))
    if not parts:
        return None
    has_config = "config.json" in parts
    kind = hub.json(remote, "config.json").get("model_type") if has_config else None
    has_adapter = "adapter_config.json" in parts  # which transformers would load on top of a model
    may_be_ours = not has_config if has_adapter else str(kind) in OUR_TYPES
    if may_be_ours and is_made_by_push(hub, remote, published):
        return None
    if has_adapter:
        return "an adapter"
    if has_config:
        return f"a model of type {kind}" if kind else "a config.json that names no model type"
    weights = [name for name in parts if is_weights(name)]
    return f"weights ({weights[0]})" if weights else f"files of a model ({parts[0]})"


def is_made_by_push(hub: Hub, remote: RepositoryState, published: list[Files]) -> bool:
    """Return whether the model on a branch was pushed by this command."""
    if is_marked(hub.card(remote)):
        return True
    weights = {name: file.lfs.sha256 for name, file in remote.files.items() if is_weights(name) and file.lfs}
    known = [{name: file["sha256"] for name, file in files.items() if is_weights(name)} for files in published]
    return bool(weights) and weights in known


def check_replace(hub: Hub, remote: RepositoryState, *, replace: bool) -> None:
    """Raise: UsageError if a commit would replace a model that was not pushed by this command, without --replace."""
    if remote.other_model and remote.is_overwritten and not replace:
        raise UsageError(
            f"{remote.repo_id} has {remote.other_model} that was not published by this command. Use another "
            f"repository, or --create_pr; --replace replaces it and keeps its state as tag {remote.backup_tag}."
        )


def check_card(hub: Hub, remote: RepositoryState, staged: Path, license: License | None, *, replace: bool) -> None:
    """Raise: UsageError if a README.md or LICENSE written by hand on the Hub would be overwritten."""
    if replace:
        return
    there, ours = remote.files.get("LICENSE"), staged / "LICENSE"
    if there and ours.is_file() and not is_same(there, ours):
        text = hub.read(remote, "LICENSE").decode(errors="replace")
        if _terms(text) != _terms(ours.read_text(encoding="utf-8")):
            raise UsageError(f"{remote.repo_id} has another LICENSE. Name it with --license, or add --replace_card.")
    there, text = remote.files.get("README.md"), hub.card(remote)
    if there is None or is_same(there, staged / "README.md") or is_unedited(text):
        return
    metadata = only_metadata(text)  # a repository created on the website has nothing else
    if metadata is None:
        raise UsageError(
            f"README.md of {remote.repo_id} was edited on the Hub, or not pushed by this command. Copy its text "
            "into model_card.j2 and add --replace_card to overwrite it, or --create_pr to propose the new card."
        )
    stated = {"license": license.id if license else None}
    if license is not None and license.id == "other":
        stated |= {"license_name": license.name, "license_link": license.metadata_link}
    for key, value in stated.items():
        if metadata.get(key) not in (None, value):
            flag = f"--{key} {metadata[key]}"
            if key == "license_link" and not ADDRESS.fullmatch(str(metadata[key])):
                flag = "--license_file FILE (the license text, in place of --license_link)"
            raise UsageError(
                f"README.md of {remote.repo_id} states the {key} {metadata[key]}. Add {flag} to keep it, or "
                "--replace_card to overwrite it."
            )


def _terms(license: str) -> list[str]:
    """List the words of a license, without addresses and what follows its terms, such as Apache's appendix."""
    return re.sub(r"https?://\S+", "", license).lower().split("end of terms and conditions")[0].split()


def check_tag(hub: Hub, remote: RepositoryState, tag: str | None, staged: Path) -> None:
    """Raise: UsageError if a tag marks another model, or has the name of a branch: `revision=` would be ambiguous."""
    if tag in remote.branches:
        raise UsageError(f"tag {tag}: {remote.repo_id} has a branch of this name. Choose another: --tag NAME")
    if remote.revision in remote.tags:
        raise UsageError(
            f"branch {remote.revision}: {remote.repo_id} has a tag of this name. Delete that tag on the Hub."
        )
    if tag not in remote.tags:
        return
    with command_errors(f"reading tag {tag} of {remote.repo_id}"):
        there = hub.files(remote.repo_id, remote.tags[tag])
    if not all(is_same(there.get(name), staged / name) for name in list_files(staged) if is_loaded(name)):
        raise UsageError(f"tag {tag} of {remote.repo_id} marks another model. Choose another: --tag NAME")


def check_same_weights(hub: Hub, remote: RepositoryState, staged: Path) -> None:
    """Raise: UsageError if the Hub does not have a staged folder's weights, settings and tokenizer."""
    if not remote.exists:
        raise UsageError(f"--code_only updates a published model, and {remote.repo_id} does not exist. Leave it out.")
    for path in sorted(staged.iterdir()):
        if is_loaded(path.name) and path.suffix != ".py" and not is_same(remote.files.get(path.name), path):
            raise UsageError(
                f"{path.name} of {remote.repo_id} differs from this run's, and --code_only does not update it. "
                "Name the run that was published there, or leave --code_only out."
            )


def check_ignored(
    hub: Hub, remote: RepositoryState, staged: Path, names: list[str], *, create_pr: bool = False
) -> None:
    """Raise: UsageError if a `.gitignore` in the repository excludes a file to be sent.

    The client omits such a file from the commit without an error, which publishes the others alone.
    """
    files = []
    for name in names:
        with (staged / name).open("rb") as file:
            sample = base64.b64encode(file.read(512)).decode("ascii")
        files.append({"path": name, "size": (staged / name).stat().st_size, "sample": sample})
    revision = quote(remote.revision if remote.branch_exists else MAIN, safe="")
    with hub.writing(f"asking which files {remote.repo_id} accepts", remote.repo_id, create_pr=create_pr):
        response = get_session().post(
            f"{constants.ENDPOINT}/api/models/{remote.repo_id}/preupload/{revision}",
            json={"files": files},
            headers=hub.headers,
            params={"create_pr": "1"} if create_pr and remote.pull_request is None else None,
        )
        hf_raise_for_status(response)
        ignored = sorted(file["path"] for file in response.json()["files"] if file.get("shouldIgnore"))
    if ignored:
        named = ignored[0] + (f" and {len(ignored) - 1} more files" if len(ignored) > 1 else "")
        rules = sorted(path for path in remote.files if PurePosixPath(path).name == ".gitignore")
        raise UsageError(
            f"{' or '.join(rules) or 'a .gitignore'} of {remote.repo_id} excludes {named}, so the commit would be "
            "incomplete. Remove the rule on the Hub, or use another repository."
        )
