"""Uploads over LFS: single PUT, or several parts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hub.records import pieces_of
from hub.routing import SITE, Answer, Call, Refusal, route

if TYPE_CHECKING:
    from hub.server import HubServer


@route("POST", SITE + r"\.git/info/lfs/objects/batch", "contribute")
def lfs_batch(hub: HubServer, call: Call) -> Answer:
    return Answer({"transfer": "basic", "objects": [lfs_object(hub, call, o) for o in call.json()["objects"]]})


def lfs_object(hub: HubServer, call: Call, wanted: dict) -> dict:
    oid, size = wanted["oid"], wanted["size"]
    if hub.object_path(oid).exists():
        return {"oid": oid, "size": size}
    upload: dict = {"href": f"{hub.elsewhere}/lfs/whole/{oid}"}
    if size > hub.part_bytes:
        parts = range(1, -(-size // hub.part_bytes) + 1)
        urls = {f"{part:05d}": f"{hub.elsewhere}/lfs/part/{oid}/{part}" for part in parts}
        upload = {"href": f"{hub.url}/lfs/complete/{oid}", "header": {"chunk_size": str(hub.part_bytes), **urls}}
    verify = {"href": f"{hub.url}/{call.repo.key}.git/info/lfs/objects/verify"}
    return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}


@route("PUT", r"/lfs/whole/(?P<oid>\w+)", streams=True)
def lfs_put(hub: HubServer, call: Call) -> Answer:
    hub.receive(call.pieces, call["oid"])
    return Answer()


@route("PUT", r"/lfs/part/(?P<oid>\w+)/(?P<part>\d+)", streams=True)
def lfs_part(hub: HubServer, call: Call) -> Answer:
    part = hub.receive(call.pieces)
    return Answer(headers={"ETag": f'"{part.name}"'})


@route("POST", r"/lfs/complete/(?P<oid>\w+)", streams=True)
def lfs_complete(hub: HubServer, call: Call) -> Answer:
    parts = sorted(json.loads(b"".join(call.pieces))["parts"], key=lambda part: part["partNumber"])
    paths = [hub.object_path(part["etag"].strip('"')) for part in parts]
    hub.receive((piece for path in paths for piece in pieces_of(path)), call["oid"])
    return Answer({})


@route("POST", SITE + r"\.git/info/lfs/objects/verify", "contribute")
def lfs_verify(hub: HubServer, call: Call) -> Answer:
    asked = call.json()
    if hub.lfs_blob(asked["oid"]).size != asked["size"]:
        raise Refusal(400, "the file has another size")
    return Answer({})
