"""A small Hub on loopback → the unmodified huggingface_hub and transformers talk to it, and tests look inside.

Run the client in a process of its own: huggingface_hub reads `HF_ENDPOINT` once, at import.

    with HubServer() as hub:
        subprocess.run([...], env={"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": an_empty_folder, ...})
        assert "config.json" in hub.files("you/tiny") and not hub.unknown_routes and not hub.leaks

Faults: `hub.inject(call, kind)` makes a call of CALLS ("whoami", "commit", …) go wrong in a way of FAULTS, once or more
often. `fail`, `drop`, `drop_answer`, `hang` and `pause` do the same for any address.

    hub.inject("commit", "lost")  # the commit lands, and the connection is closed before the answer
    hub.inject("info", "429", times=2, headers={"Retry-After": "1"})
    hub.inject("whoami", "silent", times=-1)  # accepts each request and never answers

Contents go up over LFS (single PUT or multipart) or Xet (the uploaded chunks are unpacked, and must give the SHA-256
that the shard names), and come down over plain HTTP, LFS files by a redirect to another host, as from the Hub's CDN.
Written from the client's source and observed requests, never compared with the real Hub. Its limits:

- A card is only checked for a header that is opened and not closed, and its metadata is shown nowhere.
- `.gitignore`: without `**`, and only the one at the root.
- LFS or regular is decided by `.gitattributes`, a NUL byte in the first 512, or more than 10 MB.
- No rate limits, scans, quotas, gating, Xet downloads, moved or deleted repositories, merged pull requests, pages of
  discussions, or copies between repositories. Xet's hashes of xorbs and chunks (BLAKE3) are not checked.
- LZ4 is unpacked in plain Python, some 25 to 60 MB/s of weights. `HF_XET_XORB_COMPRESSION_POLICY=none` in a client's
  environment spares it.
- hf_xet remembers in HF_HOME, by address and port, what a server has: clients of different servers must not share one.
"""

from hub.faults import CALLS, LOGIN_PAGE, Pause
from hub.records import OTHER_TOKEN, READ_TOKEN, TOKEN, User, now
from hub.routing import Request
from hub.server import HubServer
from hub.storage import GITATTRIBUTES

__all__ = [
    "CALLS",
    "GITATTRIBUTES",
    "LOGIN_PAGE",
    "OTHER_TOKEN",
    "READ_TOKEN",
    "TOKEN",
    "HubServer",
    "Pause",
    "Request",
    "User",
    "now",
]
