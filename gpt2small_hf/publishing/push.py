"""Publish a model: in one commit that was checked, or not at all.

The steps are modules of this package: arguments → source (which model) → push_plan (what goes where; then stage, facts,
card, privacy, secret_scan, verify) → this module (commit, verify, tag, visibility).
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpt2small_hf.errors import UsageError, print_stderr
from gpt2small_hf.formatting import counted, one_line
from gpt2small_hf.publishing.arguments import known_token
from gpt2small_hf.publishing.client import VerifyError
from gpt2small_hf.publishing.commit import (
    check_card,
    check_ignored,
    check_replace,
    check_same_weights,
    check_tag,
    commit_folder,
    find_changes,
    find_other_model,
)
from gpt2small_hf.publishing.facts import example_prompts
from gpt2small_hf.publishing.hub import Hub, RepositoryState, is_visible
from gpt2small_hf.publishing.lineage_facts import linked_repositories
from gpt2small_hf.publishing.privacy import chat_questions, scrub
from gpt2small_hf.publishing.publication import PublishedCommit, published_json, read_published
from gpt2small_hf.publishing.push_plan import (
    NO_LICENSE,
    PushPlan,
    check_isolated,
    commit_message,
    describe_check,
    files_to_send,
    load_isolated,
    plan_push,
    plan_record,
    print_plans,
    print_step,
    stage_for_push,
)
from gpt2small_hf.publishing.result_facts import MAX_SAMPLES, held_out_answers, loss_rise
from gpt2small_hf.publishing.secret_scan import allow_secrets, allowed_secrets, check_flag_value, has_secret
from gpt2small_hf.publishing.source import PushSource, find_source
from gpt2small_hf.publishing.stage import find_base
from gpt2small_hf.publishing.verify import CheckError
from gpt2small_hf.resources import example_command
from gpt2small_hf.runs.files import exclusive_writer, read_json, write_json
from gpt2small_hf.runs.provenance import made_by


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
    hidden = "(not printed: it contains what looks like a secret)"
    shown = ", ".join(hidden if has_secret(one, token) else f'"{one_line(one, 60)}"' for one in questions)
    if published:
        print_step("included", f"prompts from the run's chats, with the model's answers: {shown}")
    else:
        print_step("left out", f"prompts from the run's chats: {shown} (--publish_chat_questions publishes them)")


def check_repository(hub: Hub, args: Namespace, plan: PushPlan, before: list[PublishedCommit]) -> RepositoryState:
    """Read the repository's state and check what a push would change. Raises: UsageError, AuthError, UploadError."""
    remote = hub.repository_state(
        plan.repo_id,
        plan.revision,
        pull_request_title=commit_message(args, plan) if args.create_pr else None,
        needs_write_access=not args.create_pr or args.private or args.public,
    )
    if remote.pull_request:
        print_step("adds to", f"{remote.pull_request}, your open pull request of this title")
    published = [record.files for record in before if record.repo_id == plan.repo_id]
    remote.other_model = find_other_model(hub, remote, published)
    replaces = args.replace and remote.other_model is not None
    if not args.create_pr:
        check_replace(hub, remote, replace=args.replace)
    check_tag(hub, remote, plan.tag, plan.folder)
    replaces_card = args.replace_card or args.create_pr or replaces
    check_card(hub, remote, plan.folder, plan.publication.license, replace=replaces_card)
    changes = find_changes(hub, remote, plan.folder, plan.files, files_to_send(args, plan))
    if remote.exists:
        check_ignored(hub, remote, plan.folder, changes.sent, create_pr=args.create_pr)
    target = f"{plan.repo_id}, {'a pull request' if args.create_pr else plan.revision}"
    if replaces and remote.is_overwritten and not args.create_pr:
        print_step("replaces", f"{target}: {remote.other_model}; its state stays as {remote.backup_tag}")
    for line in changes.describe():
        print_step("changes", f"{target}: {line}")
    if args.code_only:
        check_same_weights(hub, remote, plan.folder)
    return remote


def push_folder(hub: Hub, args: Namespace, plan: PushPlan, remote: RepositoryState) -> PublishedCommit:
    """Push a staged folder, load it from the Hub and tag it. Returns: its record. Raises: as `Hub`, and VerifyError."""
    hub.create_missing(remote)
    if args.private and remote.private is False:  # before anything new is in it
        hub.set_visibility(plan.repo_id, public=False)
        print_step("hidden", plan.repo_id)
    if remote.other_model and remote.is_overwritten and not args.create_pr:
        if remote.tags.get(remote.backup_tag) != remote.head:
            hub.create_tag(remote, remote.backup_tag, remote.head)
        print_step("tagged", f"{remote.backup_tag}, the former state of {plan.repo_id}")
    print_stderr(f"uploading new files of {plan.size} to {plan.repo_id} …")
    commit, summary = commit_folder(
        hub,
        remote,
        plan.folder,
        plan.files,
        commit_message(args, plan),
        names=files_to_send(args, plan),
        create_pr=args.create_pr,
    )
    pull_request = remote.pull_request
    print_step("sent", f"{plan.repo_id}, {pull_request or plan.revision}, commit {commit[:12]}: {summary}")
    known = {"url": remote.url(), "commit": commit, "pull_request": pull_request, "replaced": remote.replaced}
    record = PublishedCommit(**plan_record(plan), **known)
    path = plan.source.run_folder.published  # what is there now, whatever comes next
    write_json(path, published_json([record, *read_published(path)]))
    record = replace(record, verified=verify_published(hub, args, plan, commit))
    if plan.tag:
        if existing := remote.tags.get(plan.tag):  # of the same model: `check_tag`
            print_step("tagged", f"{plan.tag} already exists at commit {existing[:12]}")
        else:
            hub.create_tag(remote, plan.tag, commit, commit_message(args, plan))
            print_step("tagged", plan.tag)
    return record


def verify_published(hub: Hub, args: Namespace, plan: PushPlan, commit: str) -> dict[str, Any]:
    """Compare a commit's checksums with the staged folder and load it from the Hub. Returns: what was compared.

    Raises: VerifyError.
    """
    n_files = hub.verify_checksums(plan.folder, plan.repo_id, commit)
    if args.no_verify:
        print_step("verified", f"checksums of {n_files} files")
        return {"checksums": n_files}
    print_stderr(f"downloading {plan.repo_id} from the Hub, to load it in an isolated process …")
    try:
        with TemporaryDirectory(prefix="downloaded-", ignore_cleanup_errors=True) as cache:
            folder = hub.download(plan.repo_id, commit, Path(cache))  # the process that loads it has no token
            if plan.is_adapter:
                base = find_base(plan.source, plan.publication)
                hub.download(base.repo, base.commit, Path(cache))
            # Of an adapter the files: AutoTokenizer cannot tell offline that it has no config.json.
            where, revision = (folder, None) if plan.is_adapter else (plan.repo_id, commit)
            found = load_isolated(plan, where, Path(cache), revision)
    except CheckError as error:
        raise VerifyError(
            f"{plan.repo_id} at {commit[:12]} does not load in an isolated process: {error} It was not tagged or made "
            "public."
        ) from None
    print_step("verified", f"checksums of {n_files} files; from the Hub it {describe_check(found, plan)}")
    return {"checksums": n_files, "logit_difference": found.logit_difference, "with": found.versions}


def finish_push(
    hub: Hub,
    args: Namespace,
    plans: list[PushPlan],
    records: list[PublishedCommit],
    before: list[PublishedCommit],
) -> dict[str, Any]:
    """Make the repositories public and record what was published. Returns: the record."""
    repositories = dict.fromkeys(plan.repo_id for plan in plans)
    for repo_id in repositories:
        if args.public:
            hub.set_visibility(repo_id, public=True)
            print_step("public", repo_id)
    first = plans[0]
    records = [replace(records[0], made_by=scrub(made_by().to_json(), repositories)), *records[1:]]
    path = first.source.run_folder.published
    write_json(path, published_json([*records, *before]))
    pull_request = records[0].pull_request
    commits = {record.url: record.commit[:12] for record in reversed(records)}
    where = ", ".join(f"{url} at commit {commit}" for url, commit in reversed(commits.items()))
    print(f"\n{'proposed to' if pull_request else 'published'} {where}")
    if args.license is None:
        print(NO_LICENSE)
    print(f"wrote {path}")
    if pull_request:
        print(f"next: review and merge {pull_request}")
    elif not first.is_adapter:
        context = read_json(first.folder / "config.json")["max_position_embeddings"]
        question = [example_prompts(first.folder, context).prompt] if first.source.run else []
        print(f"next: {example_command('use_from_hub.py', first.repo_id, *question)}")
    return published_json(records)
