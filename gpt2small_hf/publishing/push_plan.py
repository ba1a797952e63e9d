"""Arguments of `push` → what is published where: one `PushPlan` for each repository and branch."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt2small_hf.errors import UsageError
from gpt2small_hf.formatting import byte_size, console_table
from gpt2small_hf.invocation import command
from gpt2small_hf.publishing.license import License
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.published import PublishedCommit, find_record
from gpt2small_hf.publishing.result_facts import loss_at_step
from gpt2small_hf.publishing.secret_scan import allowed_secrets
from gpt2small_hf.publishing.source import PushSource, checkpoints
from gpt2small_hf.publishing.stage import Files, check_stage_folder, is_loaded
from gpt2small_hf.publishing.training_facts import trained_tokens
from gpt2small_hf.runs.layout import RunFolder
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
    files: Files = field(default_factory=dict)
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
        check_stage_folder(plan.folder)
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
    return [name for name in plan.files if name.endswith(".py") or not is_loaded(name)] if args.code_only else None


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
