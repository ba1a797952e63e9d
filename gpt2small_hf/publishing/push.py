"""Publish a model: in one commit that was checked, or not at all.

The steps are modules of this package: arguments → source (which model) → push_plan (what goes where) → push_stage
(stage, facts, card, privacy, secret_scan, verify) → push_send (repository_checks, commit, verify, tag, visibility).
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from typing import Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import counted
from gpt2small_hf.publishing.arguments import known_token
from gpt2small_hf.publishing.hub import Hub, is_visible
from gpt2small_hf.publishing.lineage_facts import linked_repositories
from gpt2small_hf.publishing.privacy import chat_questions
from gpt2small_hf.publishing.published import PublishedCommit, read_published
from gpt2small_hf.publishing.push_plan import PushPlan, plan_push, print_plans, print_step
from gpt2small_hf.publishing.push_send import check_repository, finish_push, push_folder
from gpt2small_hf.publishing.push_stage import check_isolated, stage_for_push
from gpt2small_hf.publishing.result_facts import MAX_SAMPLES, held_out_answers, loss_rise
from gpt2small_hf.publishing.secret_scan import allow_secrets, allowed_secrets, check_flag_value, has_secret
from gpt2small_hf.publishing.source import PushSource, find_source
from gpt2small_hf.report.tables import one_line
from gpt2small_hf.runs.files import exclusive_writer


def publish(args: Namespace) -> dict[str, Any]:
    """Publish a model, or with --dry_run stage and check it. Returns: the record of what was published, or would be.

    Raises: UsageError before the network is used; AuthError, UploadError and VerifyError of the Hub.
    """
    with allow_secrets(args.allow_secret or []):
        token = known_token()
        for flag in ("message", "contact", "developers"):
            value = getattr(args, flag) or ""
            check_flag_value(f"--{flag}", value if isinstance(value, str) else "\n".join(value), token)
        source = find_source(args.RUN, args.tokenizer)
        check_source_and_flags(args, source)
        before = read_published(source.run_folder.published)
        plans = plan_push(args, source, before)
        if not args.dry_run:
            private = private_links(args, plans[0])
            for plan in plans:
                plan.publication = replace(plan.publication, private=private)
        elif named := [name for _, name in linked_repositories(source, plans[0].publication)]:
            print_step(
                "not asked", f"whether {', '.join(named)} are public: a push leaves out the account of private ones"
            )
        with exclusive_writer(plans[0].folder):
            return publish_plans(args, plans, before)


def check_source_and_flags(args: Namespace, source: PushSource) -> None:
    """Print what is published and what is left out. Raises: UsageError for flags that do not fit the source."""
    if source.is_checkpoint and source.run is not None and source.model.resolve() != args.RUN.expanduser().resolve():
        print_step("found", f"{args.RUN} is not finished: its newest checkpoint, {source.model}")
    else:
        print_step("found", f"{source.label} in {source.model}")
    if not args.allow_worse_than_base and (rise := loss_rise(source)):
        raise UsageError(f"{source.label}: {rise.message} Publish it as it is with --allow_worse_than_base.")
    if args.origin is not None and source.run is not None:
        raise UsageError(f"--origin {args.origin}: {args.RUN} was trained here. Leave it out.")
    if not args.dry_run and source.run_folder.root.exists() and not os.access(source.run_folder.root, os.W_OK):
        raise UsageError(f"{source.run_folder.published} cannot be written: {source.run_folder.root} is read-only.")
    if source.run is None and not (args.origin or args.developers or source.origin):
        print_step("credit", "the card names no author of these weights: --origin USER/REPO_OR_URL, --developers NAME")
    if questions := chat_questions(source.run):
        print_chat_questions(questions, published=args.publish_chat_questions)
    if answers := held_out_answers(source):
        what = f"{counted(len(answers), 'answer')} to held-out questions of the run's chats"
        if args.publish_chat_questions:
            print_step("included", f"the first {MAX_SAMPLES} of {what}")
        else:
            print_step("left out", f"{what} (--publish_chat_questions shows the first {MAX_SAMPLES})")


def publish_plans(args: Namespace, plans: list[PushPlan], before: list[PublishedCommit]) -> dict[str, Any]:
    """Stage, check and send. Returns and raises: as `publish`."""
    for plan in plans:
        stage_for_push(args, plan)
    if unused := sorted({*(args.allow_secret or [])} - {*allowed_secrets()}):
        print_step("unused", f"--allow_secret {' '.join(unused)}: no file contains such a value")
    check_isolated(plans)
    print()
    if args.dry_run:
        return print_plans(args, plans)

    hub = Hub()
    remotes = [check_repository(hub, args, plan, before) for plan in plans]
    if args.collection:
        hub.check_collection(args.collection)
    # The model itself comes last: its card names the others.
    records = [push_folder(hub, args, plan, remote) for plan, remote in reversed([*zip(plans, remotes, strict=True)])]
    return finish_push(hub, args, plans, records[::-1], before)


def private_links(args: Namespace, plan: PushPlan) -> frozenset[str]:
    """Return the repositories that the card would name and that are not public: base model, data sets, native twin.

    Raises: UsageError for an --origin that the token in use cannot see either.
    """
    twin = plan.publication.twin if args.public and not args.also_native else None
    links = linked_repositories(plan.source, replace(plan.publication, twin=twin))
    found = [name for kind, name in links if not is_visible(name, kind, token=False)]
    if args.origin in found and not is_visible(args.origin):
        raise UsageError(f"--origin {args.origin}: the Hub has no such model, or the token may not see it.")
    for name in found:
        print_step("private", f"{name}: not linked, and its account is not published")
    return frozenset(found)


def print_chat_questions(questions: list[str], *, published: bool) -> None:
    """Print which questions of the run's chats are published, or left out."""
    token = known_token()
    shown = [
        '"' + one_line(one, 60) + '"'
        if not has_secret(one, token)
        else "(not printed: it contains what looks like a secret)"
        for one in questions
    ]
    if published:
        print_step("included", f"prompts from the run's chats, with the model's answers: {', '.join(shown)}")
    else:
        print_step(
            "left out", f"prompts from the run's chats: {', '.join(shown)} (--publish_chat_questions publishes them)"
        )
