"""The Hub's HTTP API: accounts, repositories, branches, tags and history."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from hub.records import Repo, now
from hub.routing import API, REV, Answer, Call, Refusal, route

if TYPE_CHECKING:
    from hub.server import HubServer


@route("GET", "/api/agent-harnesses")
@route("GET", API + "/auth-check", "read")
@route("GET", API + "/auth-check/write", "write")
@route("POST", "/v1/telemetry", "cas")
def accept(hub: HubServer, call: Call) -> Answer:
    return Answer({})


@route("GET", "/api/whoami-v2", "user")
def whoami(hub: HubServer, call: Call) -> Answer:
    user = call.user
    token = {"displayName": "test", "role": user.role, "createdAt": now()}
    if user.role == "fineGrained":
        scoped = [{"entity": {"name": name}, "permissions": ["repo.write"]} for name in user.scopes]
        token["fineGrained"] = {"scoped": scoped, "global": []}
    orgs = [{"type": "org", "name": name, "roleInOrg": "write"} for name in user.orgs]
    auth = {"type": "access_token", "accessToken": token}
    return Answer({"type": "user", "name": user.name, "fullname": user.name, "orgs": orgs, "auth": auth})


@route("POST", "/api/validate-yaml", "read")
def validate(hub: HubServer, call: Call) -> Answer:
    content = call.json()["content"].replace("\r\n", "\n")
    if content.startswith("---\n") and "\n---" not in content[3:]:
        return Answer({"errors": [{"message": "the metadata has no end"}], "warnings": []}, 400)
    return Answer({"errors": [], "warnings": []})


@route("POST", "/api/repos/create", "user")
def create(hub: HubServer, call: Call) -> Answer:
    asked, user = call.json(), call.user
    name = f"{asked.get('organization') or user.name}/{asked['name']}"
    repo = Repo(name, asked.get("type") or "model", asked.get("visibility") == "private")
    if not user.may_write(name):
        raise Refusal(403, f"You don't have the rights to create a {repo.kind} under this namespace")
    found = {"url": f"{hub.url}/{repo.key}", "name": name}
    if repo.key in hub.repos:
        return Answer({**found, "error": f"You already created this {repo.kind} repo"}, 409)
    hub.create(name, repo.kind, repo.private)
    return Answer(found)


@route("PUT", API + "/settings", "write")
def settings(hub: HubServer, call: Call) -> Answer:
    call.repo.private = call.json().get("visibility", "private" if call.repo.private else "public") == "private"
    return Answer({"private": call.repo.private})


@route("GET", API + f"(?:/revision{REV})?", "read")
def info(hub: HubServer, call: Call) -> Answer:
    repo, commit = call.repo, call.repo.at(call["rev"] or "main")
    siblings: list[dict] = [{"rfilename": path} for path in commit.files]
    if "blobs" in call.query:
        for sibling, blob in zip(siblings, commit.files.values(), strict=True):
            sibling.update(size=blob.size, blobId=blob.oid, lfs=blob.lfs)
    dates = {"createdAt": next(iter(repo.commits.values())).date, "lastModified": commit.date}
    about = {
        "id": repo.name,
        "author": repo.name.split("/")[0],
        "sha": commit.oid,
        "private": repo.private,
        **dates,
    }
    return Answer({**about, "gated": False, "disabled": False, "tags": [], "siblings": siblings, "downloads": 0})


@route("GET", API + "/refs", "read")
def refs(hub: HubServer, call: Call) -> Answer:
    answer: dict[str, list] = {"converts": []}
    for name, prefix in (("branches", "refs/heads/"), ("tags", "refs/tags/"), ("pullRequests", "refs/pr/")):
        below = call.repo.refs_below(prefix).items()
        answer[name] = [{"name": ref, "ref": prefix + ref, "targetCommit": oid} for ref, oid in below]
    return Answer(answer)


@route("GET", API + f"/commits{REV}", "read")
def history(hub: HubServer, call: Call) -> Answer:
    commit, entries = call.repo.at(call["rev"]), []
    while True:
        words = {"title": commit.title, "message": commit.description}
        entries.append({"id": commit.oid, "authors": [{"user": commit.author}], "date": commit.date, **words})
        if commit.parent is None:
            return page(hub, call, entries)
        commit = call.repo.commits[commit.parent]


@route("POST", API + f"/branch{REV}", "write")
def branch(hub: HubServer, call: Call) -> Answer:
    return new_ref(call.repo, f"refs/heads/{call['rev']}", call.json().get("startingPoint") or "main")


@route("POST", API + f"/tag{REV}", "write")
def tag(hub: HubServer, call: Call) -> Answer:
    return new_ref(call.repo, f"refs/tags/{call.json()['tag']}", call["rev"])


def new_ref(repo: Repo, ref: str, revision: str) -> Answer:
    if ref in repo.refs:
        raise Refusal(409, f"Reference already exists: {ref}")
    repo.refs[ref] = repo.at(revision).oid
    return Answer({})


@route("DELETE", API + f"/(?P<what>branch|tag){REV}", "write")
def delete_ref(hub: HubServer, call: Call) -> Answer:
    ref = f"refs/{'heads' if call['what'] == 'branch' else 'tags'}/{call['rev']}"
    if ref == "refs/heads/main":
        raise Refusal(403, "The main branch cannot be deleted")
    if call.repo.refs.pop(ref, None) is None:
        raise Refusal(404, f"No such reference: {ref}", "RevisionNotFound")
    return Answer({})


def page(hub: HubServer, call: Call, entries: list[dict]) -> Answer:
    """Some of the entries, and the address of the next page."""
    start = int(call.query.get("cursor", 0))
    end = start + hub.page_size
    if end >= len(entries):
        return Answer(entries[start:])
    query = "&".join(f"{name}={quote(value)}" for name, value in {**call.query, "cursor": str(end)}.items())
    return Answer(entries[start:end], headers={"Link": f'<{hub.url}{call.path}?{query}>; rel="next"'})
