"""The Hub's HTTP API for discussions and pull requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hub.records import Discussion, Repo, now
from hub.routing import API, Answer, Call, Refusal, route

if TYPE_CHECKING:
    from hub.server import HubServer


def add_discussion(call: Call, title: str, description: str, is_pull_request: bool, status: str = "open") -> Discussion:
    num, user = len(call.repo.discussions) + 1, call.user
    discussion = Discussion(num, title, description, user.name, is_pull_request, now(), status)
    call.repo.discussions[num] = discussion
    return discussion


@route("POST", API + "/discussions", "contribute")
def new_discussion(hub: HubServer, call: Call) -> Answer:
    asked = call.json()
    pull = bool(asked.get("pullRequest"))
    made = add_discussion(call, asked["title"], asked["description"], pull, "draft" if pull else "open")
    if pull:
        call.repo.refs[f"refs/pr/{made.num}"] = call.repo.at("main").oid
    return Answer({"num": made.num, "url": f"{hub.url}/{call.repo.key}/discussions/{made.num}"})


@route("GET", API + "/discussions", "read")
def list_discussions(hub: HubServer, call: Call) -> Answer:
    kinds = {"pull_request": (True,), "discussion": (False,)}.get(call.query.get("type", "all"), (True, False))
    asked_for = [
        discussion
        for discussion in call.repo.discussions.values()
        if discussion.is_pull_request in kinds and call.query.get("author") in (None, discussion.author)
    ]
    found = [describe_discussion(call.repo, discussion) for discussion in asked_for]
    return Answer({"count": len(found), "start": 0, "discussions": found})


@route("GET", API + r"/discussions/(?P<num>\d+)", "read")
def get_discussion(hub: HubServer, call: Call) -> Answer:
    return Answer(describe_discussion(call.repo, find_discussion(call)))


@route("POST", API + r"/discussions/(?P<num>\d+)/status", "write")
def discussion_status(hub: HubServer, call: Call) -> Answer:
    discussion = find_discussion(call)
    discussion.status = call.json()["status"]
    event = {"id": "0", "type": "status-change", "createdAt": now(), "author": {"name": call.user.name}}
    return Answer({"newStatus": {**event, "data": {"status": discussion.status}}})


def find_discussion(call: Call) -> Discussion:
    if int(call["num"]) not in call.repo.discussions:
        raise Refusal(404, "no such discussion", "EntryNotFound")
    return call.repo.discussions[int(call["num"])]


def describe_discussion(repo: Repo, about: Discussion) -> dict:
    more = {"repo": {"name": repo.name, "type": repo.kind}, "author": {"name": about.author}, "events": []}
    if about.is_pull_request:
        more |= {"changes": {"base": "refs/heads/main"}, "filesWithConflicts": []}
    known = {"num": about.num, "title": about.title, "status": about.status, "createdAt": about.date}
    return {**known, "isPullRequest": about.is_pull_request, **more}
