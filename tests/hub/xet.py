"""Uploads over Xet: the routes, and the formats of chunks, xorbs and shards, from the public specification."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hub.routing import API, REV, Answer, Call, Refusal, route

if TYPE_CHECKING:
    from hub.server import HubServer


def unpack_lz4_block(block: bytes, out: bytearray) -> None:
    """Append what a block of LZ4 stands for; it may refer to what `out` holds already."""
    at = 0

    def length(nibble: int) -> int:
        nonlocal at
        more = 255 if nibble == 15 else 0
        while more == 255:
            more = block[at]
            at += 1
            nibble += more
        return nibble

    while at < len(block):
        token = block[at]
        at += 1
        n = token >> 4
        if n == 15:
            n = length(n)
        out += block[at : at + n]
        at += n
        if at >= len(block):  # the last sequence has no match
            return
        back = block[at] | block[at + 1] << 8
        at += 2
        n = token & 15
        n = (length(n) if n == 15 else n) + 4
        start = len(out) - back
        out += out[start : start + n] if n <= back else (out[start:] * (n // back + 1))[:n]


def unpack_lz4(frame: bytes) -> bytes:
    """The content of an LZ4 frame; its checksums are not checked."""
    flags = frame[4]
    at = 7 + 8 * bool(flags & 8) + 4 * bool(flags & 1)  # magic, flags, sizes, [content size], [dictionary], checksum
    out = bytearray()
    while size := int.from_bytes(frame[at : at + 4], "little"):
        block = frame[at + 4 : at + 4 + (size & 0x7FFFFFFF)]
        if size >> 31:
            out += block
        else:
            unpack_lz4_block(block, out)
        at += 4 + len(block) + 4 * bool(flags & 16)
    return bytes(out)


def unpack_chunk(scheme: int, packed: bytes) -> bytes:
    """A chunk of a xorb: 0 as it is, 1 LZ4, 2 LZ4 of all first bytes of four, then all second ones, and so on."""
    plain = packed if scheme == 0 else unpack_lz4(packed)
    if scheme != 2:
        return plain
    out, at = bytearray(len(plain)), 0
    for place in range(4):
        n = (len(plain) + 3 - place) // 4
        out[place::4] = plain[at : at + n]
        at += n
    return bytes(out)


def chunks_of_xorb(path: Path, first: int, end: int) -> Iterator[bytes]:
    """Chunks `first` to `end` (not included) of a stored xorb, unpacked."""
    with path.open("rb") as file:
        for index in range(end):
            head = file.read(8)
            size = int.from_bytes(head[1:4], "little")
            if index < first:
                file.seek(size, 1)
            else:
                yield unpack_chunk(head[4], file.read(size))


def files_of_shard(shard: bytes) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """For each file a shard describes, its SHA-256 and where its chunks are: (xorb, first, end)."""
    at = 48
    while shard[at : at + 32] != b"\xff" * 32:
        flags, n = struct.unpack_from("<II", shard, at + 32)
        rows = [shard[at + 48 * row : at + 48 * (row + 1)] for row in range(1, n + 1)]
        at += 48 * (1 + n + n * (flags >> 31))
        if not flags & 1 << 30:
            raise Refusal(400, "a file without its SHA-256")
        yield as_hash(shard[at : at + 32]), [(as_hash(row[:32]), *struct.unpack_from("<II", row, 40)) for row in rows]
        at += 48


def as_hash(raw: bytes) -> str:
    """Xet writes a hash as four little-endian 64-bit numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))


@route("GET", API + f"/xet-write-token{REV}", "contribute")
def xet_token(hub: HubServer, call: Call) -> Answer:
    token = next(token for token, user in hub.users.items() if user is call.user)
    given = {"casUrl": hub.elsewhere, "accessToken": f"xet-{token}", "exp": int(time.time()) + 3600}
    names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
    return Answer(given, headers=dict(zip(names, map(str, given.values()), strict=True)))


@route("GET", "/v1/chunks/.*", "cas")
@route("POST", "/v1/xorb-grants/.*", "cas")
@route("POST", "/v2/shards", "cas")
def xet_without(hub: HubServer, call: Call) -> Answer:
    return Answer({"error": "not here"}, 404)  # hf_xet then takes the first version's route


@route("POST", r"/v1/xorbs/\w+/(?P<xorb>\w+)", "cas", streams=True)
def xet_xorb(hub: HubServer, call: Call) -> Answer:
    place = hub.folder / f"{call['xorb']}.xorb"
    new = not place.exists()
    hub.receive(call.pieces).replace(place)
    return Answer({"was_inserted": new})


@route("POST", "/v1/shards", "cas", streams=True)
def xet_shard(hub: HubServer, call: Call) -> Answer:
    for sha256, places in files_of_shard(b"".join(call.pieces)):
        stored = [(hub.folder / f"{xorb}.xorb", first, end) for xorb, first, end in places]
        if missing := [path.stem for path, _, _ in stored if not path.exists()]:
            raise Refusal(400, f"the shard names xorbs that are not here: {missing}")
        if not hub.object_path(sha256).exists():
            hub.receive((chunk for place in stored for chunk in chunks_of_xorb(*place)), sha256)
    return Answer({"result": 1})
