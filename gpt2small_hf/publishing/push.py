"""Publish a model: what was checked, in one commit or not at all.

arguments → source (which model) → stage (with checks) → facts, card → privacy (no secrets) → verify (in an isolated
process) → hub (one commit) → verify from there → tag → public. Each is a file beside this one.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gpt2small_hf.invocation import command
from gpt2small_hf.resources import example_command

if TYPE_CHECKING:
    from argparse import Namespace

    from gpt2small_hf.publishing.hub import Hub
    from gpt2small_hf.publishing.publication import Publication
    from gpt2small_hf.publishing.repository import Remote
    from gpt2small_hf.publishing.source import PushSource
    from gpt2small_hf.publishing.stage import Files
    from gpt2small_hf.publishing.verify import Checked


@dataclass
class Plan:
    """One folder to push: a repository and branch."""

    source: PushSource
    folder: Path
    publication: Publication
    revision: str = "main"
    tag: str | None = None
    files: Files = field(default_factory=dict)
    checked: dict[str, Any] = field(default_factory=dict)
    """What the isolated process found in the staged folder."""

    @property
    def repo_id(self) -> str:
        """Where it goes."""
        return self.publication.repo_id

    @property
    def is_adapter(self) -> bool:
        """Whether it is a LoRA adapter without its base."""
        return self.source.adapter is not None

    @property
    def size(self) -> str:
        """Of all files, for people."""
        from gpt2small_hf.formatting import byte_size

        return byte_size(sum(file["size"] for file in self.files.values()))


def publish(args: Namespace) -> dict[str, Any]:
    """Do the whole of it. Returns: what was published, or would be.

    Raises: UsageError for what can be fixed here, before the network; hub.AuthError, UploadError and VerifyError.
    """
    from gpt2small_hf.publishing.secret_scan import allow_secrets

    with allow_secrets(args.allow_secret or []):
        return check_and_publish(args)


def check_and_publish(args: Namespace) -> dict[str, Any]:
    """Find the model, check what it would be published with, and publish it. Returns and raises: as `publish`."""
    from gpt2small_hf.errors import UsageError
    from gpt2small_hf.formatting import counted
    from gpt2small_hf.publishing.lineage_facts import linked_repositories
    from gpt2small_hf.publishing.privacy import chat_questions
    from gpt2small_hf.publishing.result_facts import MAX_SAMPLES, held_out_answers, loss_rise
    from gpt2small_hf.publishing.secret_scan import check_flag_value
    from gpt2small_hf.publishing.source import find_source
    from gpt2small_hf.runs.files import exclusive_writer

    token = known_token()
    for flag, words in (
        ("message", [args.message]),
        ("contact", [args.contact]),
        ("developers", args.developers or []),
    ):
        check_flag_value(f"--{flag}", "\n".join(filter(None, words)), token)
    source = find_source(args.RUN, args.tokenizer)
    if source.is_checkpoint and source.run is not None and source.model.resolve() != args.RUN.expanduser().resolve():
        say("found", f"{args.RUN} is not finished: its newest checkpoint, {source.model}")
    else:
        say("found", f"{source.label} in {source.model}")
    if not args.allow_worse_than_base and (rise := loss_rise(source)):
        raise UsageError(f"{source.label}: {rise.message} Publish it as it is with --allow_worse_than_base.")
    if args.origin is not None and source.run is not None:
        raise UsageError(f"--origin {args.origin}: {args.RUN} was trained here. Leave it out.")
    if source.run is None and not (args.origin or args.developers or source.origin):
        say("credit", "the card names nobody as author of these weights: --origin USER/REPO_OR_URL, --developers NAME")
    if questions := chat_questions(source.run):
        say_questions(questions, published=args.publish_chat_questions)
    if answers := held_out_answers(source):
        words = f"{counted(len(answers), 'answer')} to held-out questions of the run's chats"
        if args.publish_chat_questions:
            say("included", f"the first {MAX_SAMPLES} of {words}")
        else:
            say("left out", f"{words} (--publish_chat_questions shows the first {MAX_SAMPLES})")
    before = read_published(source.place.published)
    if not args.dry_run and source.place.root.exists() and not os.access(source.place.root, os.W_OK):
        raise UsageError(
            f"{source.place.published} could not be written: {source.place.root} is read-only. Make it writable."
        )
    plans = plan(args, source, before)
    if not args.dry_run:  # which asks the Hub nothing
        private = private_links(args, plans[0])
        for one in plans:
            one.publication = replace(one.publication, private=private)
    elif named := [name for _, name in linked_repositories(source, plans[0].publication)]:
        say(
            "not asked",
            f"whether {', '.join(named)} can be seen by everybody: a push names private ones by their last part",
        )
    with exclusive_writer(plans[0].folder):
        return publish_plans(args, plans, before)


def publish_plans(args: Namespace, plans: list[Plan], before: dict[str, Any]) -> dict[str, Any]:
    """Stage, check and send. Returns and raises: as `publish`."""
    from gpt2small_hf.publishing.hub import Hub

    for one in plans:
        prepare(args, one)
    check_alone(plans)
    print()
    if args.dry_run:
        return print_plans(args, plans)

    hub = Hub()
    remotes = [look(hub, args, one, before) for one in plans]
    if args.collection:
        hub.check_collection(args.collection)
    # The model itself comes last: its card names the others.
    records = [send(hub, args, one, remote) for one, remote in reversed([*zip(plans, remotes, strict=True)])]
    return finish(hub, args, plans, records[::-1], before)


def read_published(path: Path) -> dict[str, Any]:
    """Where a run was published, if it was. Raises: UsageError for a broken record."""
    from gpt2small_hf.errors import UsageError
    from gpt2small_hf.runs.files import read_json

    try:
        found = read_json(path) if path.is_file() else {}
    except UsageError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is broken. Delete it: it only remembers where this run was published.")
    return found


def plan(args: Namespace, source: PushSource, before: dict[str, Any]) -> list[Plan]:
    """What goes where: the model, then its checkpoints, then its native twin. Raises: UsageError."""
    from gpt2small_hf.errors import UsageError
    from gpt2small_hf.publishing.license import License
    from gpt2small_hf.publishing.publication import Publication
    from gpt2small_hf.publishing.source import checkpoints
    from gpt2small_hf.publishing.stage import check_stage_folder
    from gpt2small_hf.runs.layout import RunFolder
    from gpt2small_hf.runs.reader import Run

    staged = args.output_dir or (beside(source.place.staged, "adapter") if source.adapter else source.place.staged)
    if source.adapter and (args.all_checkpoints or args.also_native or args.code_only):
        raise UsageError("an adapter has no checkpoints, native form or code of its own. Publish the run for these.")
    if not staged.name or staged.resolve().is_relative_to(source.model.resolve()):
        raise UsageError(f"--output_dir {staged}: name a folder of its own, outside the model's.")
    repo_id = args.REPO or f"YOUR-NAME/{re.sub(r'[^A-Za-z0-9]+', '-', source.name).strip('-') or 'model'}"
    again = of_repo(before, repo_id)
    native = f"{repo_id}-native"
    baseline = None if args.baseline is None else Run(RunFolder(args.baseline))
    if baseline is not None and baseline.folder.root.resolve() == source.place.root.resolve():
        raise UsageError(f"--baseline {args.baseline} is the run that is published. Name the one to compare it with.")
    publication = Publication(
        repo_id,
        license=args.license and License(args.license, args.license_name, args.license_link, args.license_file),
        languages=args.language or [],
        baseline=baseline,
        twin=native if args.also_native else again.get("twin"),
        branches=again.get("branches", []),
        questions=args.publish_chat_questions,
        developers=args.developers or [],
        contact=args.contact,
        origin=args.origin or source.origin,
    )
    plans = [Plan(source, staged, publication, args.revision or "main", args.tag)]
    if args.all_checkpoints:
        if source.run is None or source.is_checkpoint:
            raise UsageError(f"--all_checkpoints publishes those of a finished run, and {args.RUN} is none.")
        on_the_way = checkpoints(source.place)
        if not on_the_way:
            raise UsageError(f"{source.place.checkpoints} has no whole checkpoint. Leave --all_checkpoints out.")
        branches = [branch_of(one) for one in on_the_way]
        kept = {branch["revision"]: branch for branch in [*publication.branches, *branches]}
        plans[0].publication = replace(publication, branches=sorted(kept.values(), key=lambda b: b["step"]))
        plans += [
            Plan(
                one, beside(staged, name), replace(publication, pin=name, pin_moves=True, branches=[], twin=None), name
            )
            for one in on_the_way
            if (name := f"step-{one.step}")
        ]
    if args.also_native:
        twin = replace(publication, repo_id=native, native=True, twin=repo_id, branches=[])
        plans.append(Plan(source, beside(staged, "native"), twin, args.revision or "main", args.tag))
    if args.tag in [one.revision for one in plans]:
        raise UsageError(f"--tag {args.tag} is the name of a branch that --all_checkpoints makes. Use another.")
    for one in plans:  # all of them, before any is written
        check_stage_folder(one.folder)
    return plans


def private_links(args: Namespace, one: Plan) -> frozenset[str]:
    """Return the repositories that would be named and not everybody may see: base model, data sets, native twin.

    The twin matters only for a public model: it is made private with a private one.

    Raises: UsageError for an --origin that the token in use cannot see either.
    """
    from gpt2small_hf.errors import UsageError
    from gpt2small_hf.publishing.hub import is_public, is_visible
    from gpt2small_hf.publishing.lineage_facts import linked_repositories

    twin = one.publication.twin if args.public and not args.also_native else None
    links = linked_repositories(one.source, replace(one.publication, twin=twin))
    found = [name for kind, name in links if not is_public(name, kind)]
    if args.origin in found and not is_visible(args.origin):
        raise UsageError(
            f"--origin {args.origin}: the Hub has no such model, or the token may not see it. Check the name, or give "
            "the address of another place: https://…"
        )
    for name in found:
        say("private", f"{name}: not linked, and its account is not published")
    return frozenset(found)


def flat(published: dict[str, Any]) -> list[dict[str, Any]]:
    """All records of `published.json`."""
    return [published, *published.get("others", [])] if published else []


def of_repo(published: dict[str, Any], repo_id: str, revision: str = "main") -> dict[str, Any]:
    """What `published.json` says of one repository and branch."""
    for record in flat(published):
        if (record.get("repo_id"), record.get("revision")) == (repo_id, revision) and not record.get("pull_request"):
            return record
    return {}


def branch_of(source: PushSource) -> dict[str, Any]:
    """A checkpoint as the card of the finished model lists it."""
    from gpt2small_hf.publishing.result_facts import loss_at_step
    from gpt2small_hf.publishing.training_facts import training_totals

    then = loss_at_step(source)
    loss = then.loss if then else None
    return {
        "revision": f"step-{source.step}",
        "step": source.step,
        "tokens": training_totals(source).tokens,
        "loss": loss,
    }


def beside(staged: Path, name: str) -> Path:
    """Where another folder is staged."""
    return staged.with_name(f"{staged.name}-{name}")


def prepare(args: Namespace, one: Plan) -> None:
    """Stage a folder, write its card, and see that nothing in it is unfinished or secret. Raises: UsageError."""
    from gpt2small_hf.publishing import card, stage
    from gpt2small_hf.publishing.adapter import find_base, stage_adapter
    from gpt2small_hf.publishing.license import write_license
    from gpt2small_hf.publishing.lineage_facts import copyright_holders
    from gpt2small_hf.publishing.secret_scan import check_secrets
    from gpt2small_hf.runs.files import atomic_write

    native, known = one.publication.native, stage.read_record(one.folder)
    with atomic_write(one.folder) as folder:
        if native:
            stage.stage_native(args.output_dir or one.source.place.staged, folder)
        else:
            put = partial(stage_adapter, base=find_base(one.source, one.publication)) if one.is_adapter else stage.stage
            put(
                one.source,
                folder,
                new_code=args.code_only,
                allow_modified_code=args.allow_modified_code,
                questions=args.publish_chat_questions,
                private=one.publication.private,
            )
        native |= one.is_adapter  # neither has code
        write_license(folder, one.publication.license, native=native, **copyright_holders(one.source, one.publication))
        if one.revision == "main" or not args.all_checkpoints:
            loaded = card.content_hash(stage.list_files(folder))
            step = "model" if one.source.step is None else f"step-{one.source.step}"
            one.tag = None if args.create_pr else one.tag or f"{step}-{loaded}"
            one.publication = replace(one.publication, pin=one.tag)
        text = card.render(one.source, folder, one.publication)
        (folder / "README.md").write_text(text, encoding="utf-8")
        stage.make_readable(folder)
        one.files = stage.list_files(folder)
        card.check_finished(text, set(one.files))
        answers = [one.source.place.answers] if args.publish_chat_questions else []
        origin = partial(stage.staged_from, one.source, license_file=args.license_file)
        check_secrets(folder, known_token(), [one.source.place.samples, *answers], origin)
        same = {"with": known.get("with"), "checked": known.get("checked")} if known.get("files") == one.files else {}
        stage.write_record(one.folder, one.files, known, **same)  # before the folder: a kill leaves no unknown files
    page = stage.page_path(one.folder)
    with atomic_write(page) as temporary:
        temporary.write_text(card.page(text, one.folder.name), encoding="utf-8")
    say("staged", f"{one.folder}: {len(one.files)} files, {one.size}; no secrets, card finished")
    then = known.get("files", {})
    if changed := [name for name in one.files if then and then.get(name) != one.files[name]]:
        say("changed", f"since it was last staged: {', '.join(changed)}")
    say("card", f"{page} shows it in a browser")


def check_alone(plans: list[Plan]) -> None:
    """Load each staged folder in an isolated process, unless these very bytes were already. Raises: UsageError."""
    from gpt2small_hf.errors import UsageError
    from gpt2small_hf.publishing.adapter import fill_cache, find_base
    from gpt2small_hf.publishing.stage import read_record, write_record
    from gpt2small_hf.publishing.verify import CheckError
    from gpt2small_hf.runs.provenance import versions

    for one in plans:
        known = read_record(one.folder)
        with_what = {name: version for name, version in versions().items() if name in ("torch", "transformers")}
        if known.get("files") == one.files and known.get("with") == with_what and known.get("checked"):
            one.checked = known["checked"]
            say("alone", f"{one.folder}: these bytes were loaded by a stranger before")
            continue
        waiting(f"a process with torch and transformers alone loads {one.folder} …")
        try:
            with TemporaryDirectory(prefix="base-", ignore_cleanup_errors=True) as cache:
                if one.is_adapter:
                    fill_cache(Path(cache), find_base(one.source, one.publication))
                found = load_isolated(one, one.folder.resolve(), Path(cache))
        except CheckError as error:
            raise UsageError(f"{one.folder} does not work for a stranger: {error}") from None
        one.checked = asdict(found)
        write_record(one.folder, one.files, known, **{"with": with_what, "checked": one.checked})
        say("alone", f"{one.folder} {told(found, one)}")


def load_isolated(one: Plan, where: str | Path, cache: Path, revision: str | None = None) -> Checked:
    """Load a staged folder, or what was downloaded of it, in an isolated process. Raises: verify.CheckError."""
    from gpt2small_hf.publishing.verify import check

    return check(
        where,
        revision=revision,
        reference=one.source.model,
        card=(one.folder / "README.md").read_text(encoding="utf-8"),
        repo_id=one.repo_id,
        tag=one.publication.pin,
        native=one.publication.native,
        adapter=one.is_adapter,
        cache=cache,
    )


def told(found: Checked, one: Plan) -> str:
    """What the isolated process found, as text."""
    same = "bit for bit" if found.logit_difference == 0 else f"to {found.logit_difference:.1e}"
    ran = f"{found.n_codes} code blocks ran"
    what = "torch, transformers and peft" if one.is_adapter else "torch and transformers"
    return f"works with {what} alone: logits equal {same}, {ran} ({found.seconds:.0f} s)"


def print_plans(args: Namespace, plans: list[Plan]) -> dict[str, Any]:
    """Print what would happen. Returns: the same as a record."""
    from gpt2small_hf.report.tables import console_table

    for one in plans:
        rows = [[name, f"{file['size']:,}", file["sha256"][:12]] for name, file in one.files.items()]
        print(f"{one.repo_id}, {one.revision}")
        print(console_table(["file", "bytes", "SHA-256"], [*rows, [f"{len(rows)} files", one.size, ""]]), end="\n\n")
        to = "a pull request" if args.create_pr else one.revision
        print(f"would make {one.repo_id}, private, if it is not there")
        print(f"would commit what differs to {to}: {message(args, one)!r}")
        checks = "compare checksums" + ("" if args.no_verify else " and load it from the Hub as a stranger")
        print(f"would {checks}" + (f", then tag it {one.tag}" if one.tag else ""))
        if args.public:
            print("would make it public")
        if args.collection:
            print(f"would add it to collection {args.collection}")
        print()
    if args.license is None:
        print("no license is named for the weights, so nobody may use them further: --license apache-2.0, say\n")
    print(f"wrote {', '.join(str(one.folder) for one in plans)}; nothing was sent")
    words = [word for word in args.words if word.replace("-", "_") not in ("__dry_run", "__json")]
    repo = [] if args.REPO else [plans[0].repo_id]
    # REPO after RUN, wherever flags stand
    at = words.index(str(args.RUN)) + 1 if str(args.RUN) in words else len(words)
    print(f"next: {command('push', *words[:at], *repo, *words[at:])}")
    return {"dry_run": True, "plans": [described(one) for one in plans]}


def described(one: Plan) -> dict[str, Any]:
    """A plan as `published.json` has it."""
    from gpt2small_hf.publishing.secret_scan import allowed_secrets

    return {
        "repo_id": one.repo_id,
        "revision": one.revision,
        "native": one.publication.native,
        "tag": one.tag,
        "files": one.files,
        "allowed_secrets": allowed_secrets(),
        "logit_difference": one.checked["logit_difference"],
        "checked_with": one.checked["versions"],
    }


def message(args: Namespace, one: Plan) -> str:
    """First line of the commit."""
    if args.message and one.revision == (args.revision or "main"):
        return args.message
    run, then = one.source.run, ""
    if run and run.measured and not one.source.is_checkpoint:
        then = f" (held-out loss {run.loss_nats:.3f})"
    what = "Update code and card of" if args.code_only else "Publish"
    return f"{what} {one.source.label}{then}{', native GPT-2' if one.publication.native else ''}"


def only(args: Namespace, one: Plan) -> list[str] | None:
    """The files to send, if not all: with --code_only those that are not the model itself."""
    from gpt2small_hf.publishing.stage import is_loaded

    return [name for name in one.files if name.endswith(".py") or not is_loaded(name)] if args.code_only else None


def look(hub: Hub, args: Namespace, one: Plan, before: dict[str, Any]) -> Remote:
    """Look at the repository, and refuse what would ruin it. Raises: UsageError, hub.AuthError, hub.UploadError."""
    from gpt2small_hf.publishing.commit import find_changes
    from gpt2small_hf.publishing.repository_checks import (
        check_card,
        check_ignored,
        check_replace,
        check_same_weights,
        check_tag,
        find_other_model,
    )

    remote = hub.look(
        one.repo_id,
        one.revision,
        proposal=message(args, one) if args.create_pr else None,
        writes=not args.create_pr or args.private or args.public,
    )
    if remote.pull_request:
        say("adds to", f"{remote.pull_request}, your open pull request of this title")
    published = [record["files"] for record in flat(before) if record["repo_id"] == one.repo_id]
    remote.other_model = find_other_model(hub, remote, published)
    replaces = args.replace and remote.other_model is not None
    if not args.create_pr:
        check_replace(hub, remote, replace=args.replace)
    check_tag(hub, remote, one.tag, one.folder)
    check_card(
        hub, remote, one.folder, one.publication.license, replace=args.replace_card or args.create_pr or replaces
    )
    changes = find_changes(hub, remote, one.folder, one.files, only(args, one))
    if remote.exists:
        check_ignored(hub, remote, one.folder, changes.sent, create_pr=args.create_pr)
    if replaces and remote.is_overwritten and not args.create_pr:
        say("replaces", f"{one.repo_id}, {one.revision}: {remote.other_model}; its state stays as {remote.former_tag}")
    for line in changes.told():
        say("changes", f"{one.repo_id}, {'a pull request' if args.create_pr else one.revision}: {line}")
    if args.code_only:
        check_same_weights(hub, remote, one.folder)
    return remote


def send(hub: Hub, args: Namespace, one: Plan, remote: Remote) -> dict[str, Any]:
    """Push one folder, load it again and tag it. Returns: its record. Raises: as `hub.Hub`, and VerifyError."""
    from gpt2small_hf.publishing.adapter import find_base
    from gpt2small_hf.publishing.commit import commit_folder
    from gpt2small_hf.publishing.hub_errors import VerifyError
    from gpt2small_hf.publishing.verify import CheckError
    from gpt2small_hf.runs.files import write_json

    hub.prepare(remote)
    if args.private and remote.private is False:  # before anything new is in it
        hub.make_public(one.repo_id, public=False)
        say("hidden", one.repo_id)
    if not args.create_pr and hub.tag_former(remote):
        say("tagged", f"{remote.former_tag}, the former state of {one.repo_id}")
    waiting(f"sending what is not there of {one.size} to {one.repo_id} …")
    pushed = commit_folder(
        hub, remote, one.folder, one.files, message(args, one), names=only(args, one), create_pr=args.create_pr
    )
    say("sent", f"{one.repo_id}, {pushed.pull_request or one.revision}, commit {pushed.commit[:12]}: {pushed.said}")
    record = {
        **described(one),
        "url": remote.url(),
        "commit": pushed.commit,
        "pull_request": pushed.pull_request,
        "verified": None,
        "replaced": remote.replaced,
    }
    path = one.source.place.published  # what is there now, whatever comes next
    write_json(path, remembered([{**record, **linked(one)}, *flat(read_published(path))]))
    n_files = hub.verify(remote, one.folder, pushed.commit)
    if args.no_verify:
        record["verified"] = {"checksums": n_files}
        say("verified", f"checksums of {n_files} files")
    else:
        waiting(f"downloading {one.repo_id} from the Hub, to load it in an isolated process …")
        try:
            with TemporaryDirectory(prefix="downloaded-", ignore_cleanup_errors=True) as cache:
                there = hub.download(one.repo_id, pushed.commit, Path(cache))  # here: what loads it has no token
                if one.is_adapter:
                    base = find_base(one.source, one.publication)
                    hub.download(base.repo, base.commit, Path(cache))
                # Of an adapter the files: AutoTokenizer cannot tell offline that it has no config.json.
                where, revision = (there, None) if one.is_adapter else (one.repo_id, pushed.commit)
                found = load_isolated(one, where, Path(cache), revision)
        except CheckError as error:
            raise VerifyError(
                f"{one.repo_id} at {pushed.commit[:12]} is there but does not work for a stranger: {error} It was not "
                "tagged, and not made public."
            ) from None
        record["verified"] = {"checksums": n_files, "logit_difference": found.logit_difference, "with": found.versions}
        say("verified", f"checksums of {n_files} files; from the Hub it {told(found, one)}")
    if one.tag:
        made = hub.tag(remote, one.tag, pushed.commit, message(args, one))
        say("tagged", one.tag if made else f"{one.tag}, which was there already, at commit {remote.tags[one.tag][:12]}")
    return record


def finish(
    hub: Hub, args: Namespace, plans: list[Plan], records: list[dict[str, Any]], before: dict[str, Any]
) -> dict[str, Any]:
    """Show it, collect it, and write down what was published. Returns: the record."""
    from gpt2small_hf.publishing.facts import example_prompts
    from gpt2small_hf.publishing.privacy import scrub
    from gpt2small_hf.runs.files import read_json, write_json
    from gpt2small_hf.runs.provenance import made_by

    repositories = dict.fromkeys(one.repo_id for one in plans)
    for repo_id in repositories:
        if args.public:
            hub.make_public(repo_id, public=True)
            say("shown", f"{repo_id} is public")
        if args.collection:
            hub.collect(args.collection, repo_id)
            say("collected", f"{repo_id} in {args.collection}")
    first = plans[0]
    record = {**records[0], "made_by": scrub(made_by().to_json(), repositories)}
    path = first.source.place.published
    write_json(path, remembered([{**record, **linked(first)}, *records[1:], *flat(before)]))
    done = "proposed to" if record["pull_request"] else "published"
    commits = {told["url"]: told["commit"][:12] for told in reversed(records)}
    print(f"\n{done} {', '.join(f'{url} at commit {commit}' for url, commit in reversed(commits.items()))}")
    if args.license is None:
        print("no license is named for the weights, so nobody may use them further: --license apache-2.0, say")
    print(f"wrote {path}")
    if record["pull_request"]:
        print(f"next: look at {record['pull_request']}, and merge it")
    elif not first.is_adapter:
        context = read_json(first.folder / "config.json")["max_position_embeddings"]
        question = [example_prompts(first.folder, context).prompt] if first.source.run else []
        print(f"next: {example_command('use_from_hub.py', first.repo_id, *question)}")
    return {**record, **linked(first), "others": records[1:]}


def linked(one: Plan) -> dict[str, Any]:
    """What a card names beside its own model, for the next card of the same repository."""
    return {"twin": one.publication.twin, "branches": one.publication.branches}


def remembered(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What `published.json` says: the newest record of each repository and branch, the model itself before `others`."""
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in filter(None, records):
        key = (record["repo_id"], record["revision"], record["pull_request"])
        latest.setdefault(key, {name: value for name, value in record.items() if name != "others"})
    found = list(latest.values())
    first = next((one for one in found if is_the_model(one)), found[0])
    return {**first, "others": [one for one in found if one is not first]}


def is_the_model(record: dict[str, Any]) -> bool:
    """Whether this is what a stranger gets who names the repository alone, and no native twin."""
    return record["revision"] == "main" and not record["native"] and not record["pull_request"]


def say(word: str, line: str) -> None:
    """One step, done."""
    print(f"{word:<10}{line}", flush=True)


def known_token() -> str | None:
    """Return the token of the environment or of `hf auth login`, if it can be read: a dry run needs none."""
    from gpt2small_hf.publishing.arguments import AuthError, stored_token

    with suppress(AuthError):
        return stored_token()
    return None


def say_questions(questions: list[str], *, published: bool) -> None:
    """Print which questions of the run's chats are published, or left out."""
    from gpt2small_hf.publishing.secret_scan import has_secret
    from gpt2small_hf.report.tables import one_line

    token = known_token()
    named = ", ".join(
        "(not printed: it has what looks like a secret)"
        if has_secret(question, token)
        else f'"{one_line(question, 60)}"'
        for question in questions
    )
    if published:
        say("included", f"prompts from the run's chats, with the model's answers: {named}")
    else:
        say("left out", f"prompts from the run's chats: {named} (--publish_chat_questions publishes them)")


def waiting(line: str) -> None:
    """What takes a while."""
    print(line, file=sys.stderr, flush=True)
