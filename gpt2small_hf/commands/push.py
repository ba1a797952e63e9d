"""`push`: a model → a repository on the Hub, by `publishing/push.py`. Its flags are in `publishing/arguments.py`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, redirect_stdout

from gpt2small_hf.publishing.arguments import check_paths, parse_arguments, token_in_use


def main(words: list[str]) -> None:
    """Run `push`."""
    args = parse_arguments(words)
    check_paths(args)
    if not args.dry_run:
        token_in_use()
    from gpt2small_hf.publishing.push import publish

    with ExitStack() as stack:
        if args.json:  # stdout is for the record alone
            stack.enter_context(redirect_stdout(sys.stderr))
        record = publish(args)
    if args.json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
