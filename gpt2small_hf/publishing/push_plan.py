"""Arguments of `push` → a `PushPlan` for each repository and branch → staged folders, loaded in an isolated process."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpt2small_hf.errors import UsageError, print_stderr
from gpt2small_hf.formatting import byte_size, console_table
from gpt2small_hf.invocation import command
from gpt2small_hf.publishing import card, stage
from gpt2small_hf.publishing.arguments import known_token
from gpt2small_hf.publishing.license import License, write_license
from gpt2small_hf.publishing.lineage_facts import copyright_holders
from gpt2small_hf.publishing.publication import Publication, PublishedCommit, find_record
from gpt2small_hf.publishing.result_facts import loss_at_step
from gpt2small_hf.publishing.secret_scan import allowed_secrets, check_secrets
from gpt2small_hf.publishing.source import PushSource, checkpoints
from gpt2small_hf.publishing.training_facts import trained_tokens
from gpt2small_hf.publishing.verify import Checked, CheckError, check
from gpt2small_hf.runs.files import atomic_write
from gpt2small_hf.runs.layout import RunFolder
from gpt2small_hf.runs.provenance import versions
from gpt2small_hf.runs.reader import Run

NO_LICENSE = "the weights have no license, so nobody may reuse them: name one, such as --license apache-2.0"


@dataclass
class PushPlan:
    """A folder to push to a branch of a repository."""

    source: PushSource
    folder: Path
    publication: Publication
    revision: str = "main"
    tag: str | None = None
    files: stage.Files = field(default_factory=dict)
    checked: dict[str, Any] = field(default_factory=dict)
    """What the isolated process found in the staged folder."""

    @property
    def repo_id(self) -> str:
        """The repository to push to."""
        return self.publication.repo_id

    @property
    def is_adapter(self) -> bool:
        """Whether it is a LoRA adapter without its base model."""
        return self.source.adapter is not None

    @property
    def size(self) -> str:
        """Size of all files, as text."""
        return byte_size(sum(file["size"] for file in self.files.values()))


def plan_push(args: Namespace, source: PushSource, before: list[PublishedCommit]) -> list[PushPlan]:
    """Plan what is published where: the model, then its checkpoints, then its native twin. Raises: UsageError."""
    staged = args.output_dir or source.run_folder.staged
    if source.adapter and not args.output_dir:
        staged = sibling_folder(staged, "adapter")
    if source.adapter and (args.all_checkpoints or args.also_native or args.code_only):
        raise UsageError("An adapter has no checkpoints, native form or code of its own. Publish the run for these.")
    if not staged.name or staged.resolve().is_relative_to(source.model.resolve()):
        raise UsageError(f"--output_dir {staged}: use a folder of its own, outside {source.model}.")
    repo_id = args.REPO or f"YOUR-NAME/{re.sub(r'[^A-Za-z0-9]+', '-', source.name).strip('-') or 'model'}"
    again = find_record(before, repo_id)
    native = f"{repo_id}-native"
    baseline = None if args.baseline is None else Run(RunFolder(args.baseline))
    if baseline is not None and baseline.folder.root.resolve() == source.run_folder.root.resolve():
        raise UsageError(f"--baseline {args.baseline} is the run that is published. Name the one to compare it with.")
    publication = Publication(
        repo_id,
        license=args.license and License(args.license, args.license_name, args.license_link, args.license_file),
        languages=args.language or [],
        baseline=baseline,
        twin=native if args.also_native else again.twin if again else None,
        branches=again.branches if again else [],
        questions=args.publish_chat_questions,
        developers=args.developers or [],
        contact=args.contact,
        origin=args.origin or source.origin,
    )
    plans = [PushPlan(source, staged, publication, args.revision or "main", args.tag)]
    if args.all_checkpoints:
        plans += plan_checkpoints(args, plans[0])
    if args.also_native:
        twin = replace(publication, repo_id=native, native=True, twin=repo_id, branches=[])
        plans.append(PushPlan(source, sibling_folder(staged, "native"), twin, args.revision or "main", args.tag))
    if args.tag in [plan.revision for plan in plans]:
        raise UsageError(f"--tag {args.tag} is the name of a branch that --all_checkpoints makes. Use another.")
    for plan in plans:  # all of them, before any is written
        stage.check_stage_folder(plan.folder)
    return plans


def plan_checkpoints(args: Namespace, main: PushPlan) -> list[PushPlan]:
    """Plan a branch for each checkpoint of a run, and list them in the card of the model. Raises: UsageError."""
    source, publication = main.source, main.publication
    if source.run is None or source.is_checkpoint:
        raise UsageError(f"--all_checkpoints publishes those of a finished run, and {args.RUN} is not one.")
    sources = checkpoints(source.run_folder)
    if not sources:
        raise UsageError(f"{source.run_folder.checkpoints} has no complete checkpoint. Leave --all_checkpoints out.")
    branches = [*publication.branches, *map(checkpoint_branch, sources)]
    latest = {branch["revision"]: branch for branch in branches}
    main.publication = replace(publication, branches=sorted(latest.values(), key=lambda branch: branch["step"]))
    plans = []
    for checkpoint in sources:
        name = f"step-{checkpoint.step}"
        pinned = replace(publication, pin=name, pin_moves=True, branches=[], twin=None)
        plans.append(PushPlan(checkpoint, sibling_folder(main.folder, name), pinned, name))
    return plans


def checkpoint_branch(source: PushSource) -> dict[str, Any]:
    """Return a checkpoint's branch, step, tokens and loss, for the card of the finished model."""
    then = loss_at_step(source)
    loss = then.eval_loss if then else None
    return {"revision": f"step-{source.step}", "step": source.step, "tokens": trained_tokens(source), "loss": loss}


def sibling_folder(staged: Path, name: str) -> Path:
    """Return the folder beside `staged` in which another form of the model is staged."""
    return staged.with_name(f"{staged.name}-{name}")


def commit_message(args: Namespace, plan: PushPlan) -> str:
    """Return the first line of the commit's message."""
    if args.message and plan.revision == (args.revision or "main"):
        return args.message
    run, loss = plan.source.run, ""
    if run and run.measured and not plan.source.is_checkpoint:
        loss = f" (held-out loss {run.loss_nats:.3f})"
    what = "Update code and card of" if args.code_only else "Publish"
    return f"{what} {plan.source.label}{loss}{', native GPT-2' if plan.publication.native else ''}"


def files_to_send(args: Namespace, plan: PushPlan) -> list[str] | None:
    """List the files to send, with --code_only those that are not weights, settings or tokenizer. None: all."""
    return (
        [name for name in plan.files if name.endswith(".py") or not stage.is_loaded(name)] if args.code_only else None
    )


def plan_record(plan: PushPlan) -> dict[str, Any]:
    """Return the fields of `published.json` that are known before the push; the next card takes twin and branches."""
    return {
        "repo_id": plan.repo_id,
        "revision": plan.revision,
        "native": plan.publication.native,
        "tag": plan.tag,
        "files": plan.files,
        "allowed_secrets": allowed_secrets(),
        "logit_difference": plan.checked["logit_difference"],
        "checked_with": plan.checked["versions"],
        "twin": plan.publication.twin,
        "branches": plan.publication.branches,
    }


def print_plans(args: Namespace, plans: list[PushPlan]) -> dict[str, Any]:
    """Print what a push would do. Returns: the same as a record."""
    for plan in plans:
        rows = [[name, f"{file['size']:,}", file["sha256"][:12]] for name, file in plan.files.items()]
        print(f"{plan.repo_id}, {plan.revision}")
        print(console_table(["file", "bytes", "SHA-256"], [*rows, [f"{len(rows)} files", plan.size, ""]]), end="\n\n")
        to = "a pull request" if args.create_pr else plan.revision
        print(f"would create {plan.repo_id}, private, if it does not exist")
        print(f"would commit the files that differ to {to}: {commit_message(args, plan)!r}")
        checks = "compare checksums" + ("" if args.no_verify else " and load it from the Hub in an isolated process")
        print(f"would {checks}" + (f", then tag it {plan.tag}" if plan.tag else ""))
        if args.public:
            print("would make it public")
        print()
    if args.license is None:
        print(f"{NO_LICENSE}\n")
    print(f"wrote {', '.join(str(plan.folder) for plan in plans)}; nothing was sent")
    words = [word for word in args.words if word.replace("-", "_") not in ("__dry_run", "__json")]
    repo = [] if args.REPO else [plans[0].repo_id]
    # REPO after RUN, wherever flags stand
    at = words.index(str(args.RUN)) + 1 if str(args.RUN) in words else len(words)
    print(f"next: {command('push', *words[:at], *repo, *words[at:])}")
    return {"dry_run": True, "plans": [plan_record(plan) for plan in plans]}


def print_step(word: str, line: str) -> None:
    """Print a step that is done."""
    print(f"{word:<10}{line}", flush=True)


# ---- stage and check -----------------------------------------------------------------------------------------------


def stage_for_push(args: Namespace, plan: PushPlan) -> None:
    """Stage a folder, write its card, and check both for unfinished text and secrets. Raises: UsageError."""
    source, publication, known = plan.source, plan.publication, stage.read_record(plan.folder)
    with atomic_write(plan.folder) as folder:
        options = {
            "new_code": args.code_only,
            "allow_modified_code": args.allow_modified_code,
            "questions": args.publish_chat_questions,
            "private": publication.private,
        }
        if publication.native:
            stage.stage_native(args.output_dir or source.run_folder.staged, folder)
        elif plan.is_adapter:
            stage.stage_adapter(source, folder, stage.find_base(source, publication), **options)
        else:
            stage.stage(source, folder, **options)
        has_code = not publication.native and not plan.is_adapter
        write_license(folder, publication.license, native=not has_code, **copyright_holders(source, publication))
        if plan.revision == "main" or not args.all_checkpoints:
            loaded = card.content_hash(stage.list_files(folder))
            step = "model" if source.step is None else f"step-{source.step}"
            plan.tag = None if args.create_pr else plan.tag or f"{step}-{loaded}"
            plan.publication = replace(plan.publication, pin=plan.tag)
        text = card.render(source, folder, plan.publication)
        (folder / "README.md").write_text(text, encoding="utf-8")
        plan.files = stage.list_files(folder)
        card.check_finished(text, set(plan.files))
        quoted = [source.run_folder.samples, *[source.run_folder.answers] * args.publish_chat_questions]
        origin = partial(stage.staged_from, source, license_file=args.license_file)
        check_secrets(folder, known_token(), quoted, origin)
        same = {"with": known.get("with"), "checked": known.get("checked")} if known.get("files") == plan.files else {}
        stage.write_record(plan.folder, plan.files, known, **same)  # first: after a kill no staged file is unknown
    page = stage.page_path(plan.folder)
    with atomic_write(page) as temporary:
        temporary.write_text(card.page(text, plan.folder.name), encoding="utf-8")
    print_step("staged", f"{plan.folder}: {len(plan.files)} files, {plan.size}; no secrets found, card complete")
    then = known.get("files", {})
    if changed := [name for name in plan.files if then and then.get(name) != plan.files[name]]:
        print_step("changed", f"since the last staging: {', '.join(changed)}")
    print_step("card", f"{page} is its preview for a browser")


def check_isolated(plans: list[PushPlan]) -> None:
    """Load each staged folder in an isolated process, unless the same files were before. Raises: UsageError."""
    for plan in plans:
        known = stage.read_record(plan.folder)
        used = {name: version for name, version in versions().items() if name in ("torch", "transformers")}
        if known.get("files") == plan.files and known.get("with") == used and known.get("checked"):
            plan.checked = known["checked"]
            print_step("isolated", f"{plan.folder}: these files were loaded in an isolated process before")
            continue
        print_stderr(f"loading {plan.folder} in an isolated process …")
        try:
            with TemporaryDirectory(prefix="base-", ignore_cleanup_errors=True) as cache:
                if plan.is_adapter:
                    stage.fill_cache(Path(cache), stage.find_base(plan.source, plan.publication))
                found = load_isolated(plan, plan.folder.resolve(), Path(cache))
        except CheckError as error:
            raise UsageError(f"{plan.folder} does not load in an isolated process: {error}") from None
        plan.checked = asdict(found)
        stage.write_record(plan.folder, plan.files, known, **{"with": used, "checked": plan.checked})
        print_step("isolated", f"{plan.folder} {describe_check(found, plan)}")


def load_isolated(plan: PushPlan, where: str | Path, cache: Path, revision: str | None = None) -> Checked:
    """Load a staged folder, or its copy from the Hub, in an isolated process. Raises: CheckError."""
    return check(
        where,
        revision=revision,
        reference=plan.source.model,
        card=(plan.folder / "README.md").read_text(encoding="utf-8"),
        repo_id=plan.repo_id,
        tag=plan.publication.pin,
        native=plan.publication.native,
        adapter=plan.is_adapter,
        cache=cache,
    )


def describe_check(found: Checked, plan: PushPlan) -> str:
    """Describe what the isolated process found."""
    same = "bit for bit" if found.logit_difference == 0 else f"to {found.logit_difference:.1e}"
    ran = f"{len(found.printed)} code blocks ran"
    what = "torch, transformers and peft" if plan.is_adapter else "torch and transformers"
    return f"works with {what} alone: logits equal {same}, {ran} ({found.seconds:.0f} s)"
