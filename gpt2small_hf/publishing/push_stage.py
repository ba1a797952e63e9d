"""A `PushPlan` → a staged folder with its card, without secrets, loaded in an isolated process."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from gpt2small_hf.errors import UsageError, print_stderr
from gpt2small_hf.publishing import card, stage
from gpt2small_hf.publishing.adapter import fill_cache, find_base, stage_adapter
from gpt2small_hf.publishing.arguments import known_token
from gpt2small_hf.publishing.license import write_license
from gpt2small_hf.publishing.lineage_facts import copyright_holders
from gpt2small_hf.publishing.push_plan import PushPlan, print_step
from gpt2small_hf.publishing.secret_scan import check_secrets
from gpt2small_hf.publishing.verify import Checked, CheckError, check
from gpt2small_hf.runs.files import atomic_write
from gpt2small_hf.runs.provenance import versions


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
            stage_adapter(source, folder, find_base(source, publication), **options)
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
        stage.make_readable(folder)
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
                    fill_cache(Path(cache), find_base(plan.source, plan.publication))
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
