"""What a push must not overwrite or omit: another model, an edited card, a license, a tag, files ignored by git."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.utils import get_session, hf_raise_for_status

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.arguments import ADDRESS
from gpt2small_hf.publishing.card import is_marked, is_unedited, only_metadata
from gpt2small_hf.publishing.hub import Hub
from gpt2small_hf.publishing.hub_errors import command_errors
from gpt2small_hf.publishing.license import License
from gpt2small_hf.publishing.repository import MAIN, RepositoryState, is_same
from gpt2small_hf.publishing.stage import Files, is_loaded, is_model_file, is_weights

OUR_TYPES = {"gpt2small", "gpt2", "gpjtgpt2"}
"""Model types that this command publishes, or published under another name."""


def find_other_model(hub: Hub, remote: RepositoryState, published: list[Files]) -> str | None:
    """Describe a model on a branch that was not pushed by this command. None for a pushed model, or if there is none.

    A pushed model is recognized by the mark in its card, edited or not, or by weights that are in one of `published`.
    """
    parts = sorted(name for name in remote.files if is_model_file(name))
    if not parts:
        return None
    if "adapter_config.json" in parts:  # transformers would load it on top of a model
        is_ours_alone = "config.json" not in parts and is_made_by_push(hub, remote, published)
        return None if is_ours_alone else "an adapter"
    if "config.json" in parts:
        kind = hub.json(remote, "config.json").get("model_type")
        if str(kind) in OUR_TYPES and is_made_by_push(hub, remote, published):
            return None
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
            raise UsageError(
                f"{remote.repo_id} has another LICENSE. Name that license with --license, or add "
                "--replace_card to overwrite it."
            )
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
                f"README.md of {remote.repo_id} states the {key} {metadata[key]}. Add {flag} to "
                "keep it, or --replace_card to overwrite it."
            )


def _terms(license: str) -> list[str]:
    """List the words of a license, without addresses and what follows its terms, such as Apache's appendix."""
    return re.sub(r"https?://\S+", "", license).lower().split("end of terms and conditions")[0].split()


def check_tag(hub: Hub, remote: RepositoryState, tag: str | None, staged: Path) -> None:
    """Raise: UsageError if a tag has the name of a branch, or marks another model already.

    `revision=` is ambiguous where a branch and a tag have the same name.
    """
    if tag in remote.branches:
        raise UsageError(f"tag {tag}: {remote.repo_id} has a branch of this name. Choose another: --tag NAME")
    if remote.revision in remote.tags:
        raise UsageError(
            f"branch {remote.revision}: {remote.repo_id} has a tag of this name. Delete the tag on the Hub, or use "
            "another repository."
        )
    commit = remote.tags.get(tag or "")
    if commit is None:
        return
    with command_errors(f"reading tag {tag} of {remote.repo_id}"):
        there = hub.files(remote.repo_id, commit)
    ours = [path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()]
    loaded = [name for name in ours if is_loaded(name)]
    if not all(is_same(there.get(name), staged / name) for name in loaded):
        raise UsageError(f"tag {tag} of {remote.repo_id} marks another model. Choose another: --tag NAME")


def check_same_weights(hub: Hub, remote: RepositoryState, staged: Path) -> None:
    """Raise: UsageError if the Hub does not have a staged folder's weights, settings and tokenizer."""
    if not remote.exists:
        raise UsageError(
            f"{remote.repo_id} is not on the Hub yet, and --code_only updates a published model. Leave it out."
        )
    kept = [path for path in sorted(staged.iterdir()) if is_loaded(path.name) and path.suffix != ".py"]
    for path in kept:
        if not is_same(remote.files.get(path.name), path):
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
    if not names:
        return
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
    if not ignored:
        return
    named = ignored[0] + (f" and {len(ignored) - 1} more files" if len(ignored) > 1 else "")
    paths = [path for path in remote.files if PurePosixPath(path).name == ".gitignore"]
    where, line = "a .gitignore rule", ""
    if rule := ignoring_rule({path: hub.read(remote, path) for path in paths}, ignored[0]):
        where, line = rule[0], f" (line {rule[1]}: `{rule[2]}`)"
    raise UsageError(
        f"{where} of {remote.repo_id} excludes {named}{line}, so the commit would be incomplete. Remove the rule "
        "on the Hub, or use another repository."
    )


def ignoring_rule(rules: dict[str, bytes], name: str) -> tuple[str, str, str] | None:
    """Find the rule by which git ignores a file: path of the `.gitignore`, line and pattern.

    `rules` has each `.gitignore` of the repository, by its path. None without git, or if git does not ignore the file.
    """
    with tempfile.TemporaryDirectory(prefix="gitignore-") as place:
        for path, content in rules.items():
            Path(place, path).parent.mkdir(parents=True, exist_ok=True)
            Path(place, path).write_bytes(content)
        settings = {variable: value for variable, value in os.environ.items() if not variable.startswith("GIT_")}
        git = ["git", "-C", place, "-c", f"core.excludesFile={os.devnull}"]
        try:
            for words in ("init", "--quiet"), ("check-ignore", "--verbose", "--no-index", "-z", "--stdin"):
                done = subprocess.run(
                    [*git, *words], input=name.encode(), capture_output=True, check=True, env=settings
                )
        except (OSError, subprocess.CalledProcessError):
            return None
    path, line, pattern, _ = done.stdout.decode(errors="replace").split("\0", 3)
    return None if pattern.startswith("!") else (path, line, pattern)
