"""The Hub's HTTP API for files: pre-upload, commits, trees and downloads."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from hub.api import page
from hub.discussions import add_discussion
from hub.records import Blob, Commit
from hub.routing import API, REV, SITE, Answer, Call, Refusal, route

if TYPE_CHECKING:
    from hub.server import HubServer


@route("POST", API + f"/preupload{REV}", "contribute")
def preupload(hub: HubServer, call: Call) -> Answer:
    check_may_commit(call)
    commit, files = call.repo.at(call["rev"]), []
    rules = call.json().get("gitIgnore")
    if rules is None and ".gitignore" in commit.files:
        rules = commit.files[".gitignore"].path.read_text()
    for asked in call.json()["files"]:
        sample, there = base64.b64decode(asked["sample"]), commit.files.get(asked["path"])
        lfs = hub.goes_to_lfs(commit, asked["path"], asked["size"], sample)
        known = {"shouldIgnore": is_ignored(asked["path"], rules or ""), **({"oid": there.etag} if there else {})}
        files.append({"path": asked["path"], "uploadMode": "lfs" if lfs else "regular", **known})
    return Answer({"files": files})


def check_may_commit(call: Call) -> None:
    """Raise: Refusal without write access, which only a new pull request, or one's own, does not need."""
    pulls = {f"refs/pr/{pull.num}": pull.author for pull in call.repo.discussions.values()}
    own = "create_pr" in call.query or pulls.get(call["rev"]) == call.user.name
    if not own and not call.user.may_write(call.repo.name):
        raise Refusal(403, "You don't have the rights to write to this repository")


@route("POST", API + f"/commit{REV}", "contribute")
def commit(hub: HubServer, call: Call) -> Answer:
    check_may_commit(call)
    repo, lines = call.repo, [json.loads(line) for line in call.body.splitlines()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    ref, base = repo.ref(call["rev"], ("refs/heads/", "")), repo.at(call["rev"])
    if ref is None:
        raise Refusal(400, f"{call['rev']} is not a branch")
    if header.get("parentCommit", base.oid) != base.oid:
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    changes = {path: blob for line in lines for path, blob in line_changes(hub, base, line["key"], line["value"])}
    answer = {}
    if "create_pr" in call.query:
        pull = add_discussion(call, header["summary"], header.get("description", ""), True)
        ref = f"refs/pr/{pull.num}"
        answer = {"pullRequestUrl": f"{hub.url}/{repo.key}/discussions/{pull.num}"}
    words = header["summary"], header.get("description", ""), call.user.name
    commit = hub.land(repo, ref, changes, *words, parent=base.oid)
    return Answer({"commitUrl": f"{hub.url}/{repo.key}/commit/{commit.oid}", "commitOid": commit.oid, **answer})


def line_changes(hub: HubServer, base: Commit, key: str, value: dict) -> list[tuple[str, Blob | None]]:
    """What one line of a commit does to which paths."""
    if key == "header":
        return []
    path = value["path"]
    if key == "file":
        return [(path, hub.keep(base64.b64decode(value["content"])))]
    if key == "lfsFile":
        return [(path, hub.lfs_blob(value["oid"]))]
    inside = path.rstrip("/") + "/" if key == "deletedFolder" else None
    gone = [name for name in base.files if name == path or (inside and name.startswith(inside))]
    if not gone:
        raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
    return [(name, None) for name in gone]


@route("GET", SITE + f"/resolve{REV}/(?P<path>.+)", "read")
def resolve(hub: HubServer, call: Call) -> Answer:
    commit = call.repo.at(call["rev"])
    named = {"X-Repo-Commit": commit.oid}
    blob = commit.files.get(call["path"])
    if blob is None:
        raise Refusal(404, "Entry not found", "EntryNotFound", named)
    if blob.sha256:
        named |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        return Answer(b"", 302, {**named, "Location": f"{hub.elsewhere}/cdn/{blob.sha256}"})
    return send_file(call, blob.path, {**named, "ETag": f'"{blob.oid}"'})


@route("GET", r"/cdn/(?P<oid>\w+)")
def cdn(hub: HubServer, call: Call) -> Answer:
    return send_file(call, hub.lfs_blob(call["oid"]).path, {"ETag": f'"{call["oid"]}"'})


def send_file(call: Call, path: Path, headers: dict[str, str]) -> Answer:
    size, wanted = path.stat().st_size, re.fullmatch(r"bytes=(\d+)-", call.headers.get("Range", ""))
    if not wanted:
        return Answer(path, 200, {**headers, "Accept-Ranges": "bytes"})
    start = int(wanted[1])
    if start >= size:
        raise Refusal(416, "Requested range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return Answer(path, 206, {**headers, "Content-Range": f"bytes {start}-{size - 1}/{size}"}, start)


@route("GET", API + f"/tree{REV}(?:/(?P<path>.+))?", "read")
def tree(hub: HubServer, call: Call) -> Answer:
    inside = call["path"].strip("/") + "/" if call["path"] else ""
    entries: dict[str, dict] = {}
    for path, blob in call.repo.at(call["rev"]).files.items():
        if path.startswith(inside):
            above = list(Path(path.removeprefix(inside)).parents)[-2::-1]
            for folder in (f"{inside}{parent.as_posix()}" for parent in above):
                entries.setdefault(folder, describe_folder(folder))
            entries[path] = describe(path, blob)
    if inside and not entries:
        raise Refusal(404, f"{call['path']} does not exist", "EntryNotFound")
    deep = call.query.get("recursive", "").lower() in ("true", "1")
    return page(hub, call, [e for path, e in entries.items() if deep or "/" not in path.removeprefix(inside)])


@route("POST", API + f"/paths-info{REV}", "read")
def paths_info(hub: HubServer, call: Call) -> Answer:
    files, found = call.repo.at(call["rev"]).files, []
    for path in parse_qs(call.body.decode()).get("paths", []):
        if path in files:
            found.append(describe(path, files[path]))
        elif any(name.startswith(path.rstrip("/") + "/") for name in files):
            found.append(describe_folder(path))
    return Answer(found)


def is_ignored(path: str, rules: str) -> bool:
    """Whether the lines of a `.gitignore` exclude a file; the last line that matches decides."""
    ignored, file = False, PurePosixPath(path)
    for line in rules.splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        folders = list(file.parents)[:-1]
        parts = pattern.strip("/").split("/")
        for there in folders if pattern.endswith("/") else [file, *folders]:
            found = there.parts if "/" in pattern.rstrip("/") else (there.name,)
            if len(found) == len(parts) and all(map(fnmatch.fnmatchcase, found, parts)):
                ignored = not line.startswith("!")
    return ignored


def describe(path: str, blob: Blob) -> dict:
    """A file as trees list it."""
    entry = {"type": "file", "path": path, "size": blob.size, "oid": blob.oid}
    return {**entry, "lfs": blob.lfs} if blob.lfs else entry


def describe_folder(path: str) -> dict:
    """A folder as trees list it; its id is made up."""
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
