"""Prove a published folder, unmodified, under several versions of transformers: a real environment for each.

python tests/compat/versions.py                                the floor we promise, one in the middle, the newest
python tests/compat/versions.py 5.4.0 newest --environments DIR    these two; keep the environments for next time

The folder is saved by the environment that runs this command. Each other one has PyTorch and transformers[torch] and
nothing of ours. Exit status: 0 if every check holds everywhere, else 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

FLOOR, MIDDLE = "5.4.0", "5.13.0"
HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=[FLOOR, MIDDLE, "newest"], metavar="VERSION")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="keep environments here, and use those there")
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="PyTorch for all of them")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "published"
        make_folder(folder)
        results = {}
        for version in args.versions:
            began = time.perf_counter()
            try:
                python = environment((args.environments or Path(place)).absolute() / version, version, args.torch)
            except subprocess.CalledProcessError:  # pip has said why
                parser.error(f"no environment with transformers {version} and torch {args.torch} could be made")
            installed = time.perf_counter()
            results[version] = check(python, folder, Path(place))
            print(
                f"{version}: environment {installed - began:.0f} s, checks {time.perf_counter() - installed:.0f} s",
                file=sys.stderr,
            )
    print(table(results))
    failures = [
        f"{version} {name}: {result}"
        for version, found in results.items()
        for name, result in found["checks"].items()
        if result != "ok"
    ]
    print("\n".join(failures) if failures else "Every check holds under every version.")
    return 1 if failures else 0


def make_folder(folder: Path) -> None:
    """Save a tiny published model and the loss that it has here."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from published import publish
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from version_checks import CHAT

    publish(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = tokenizer.apply_chat_template(CHAT, return_dict=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)(ids, labels=ids).loss
    (folder / "expected_loss.json").write_text(json.dumps(loss.item()))


def environment(folder: Path, version: str, torch: str) -> Path:
    """The Python of an environment with this transformers; pip leaves one alone that has it already."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    wanted = ["--upgrade", "transformers[torch]"] if version == "newest" else [f"transformers[torch]=={version}"]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={torch}", *wanted], check=True)
    return python


def check(python: Path, folder: Path, place: Path) -> dict[str, dict[str, str]]:
    """Run the checks there, with an empty cache and without the Hub (HF_HUB_OFFLINE)."""
    done = subprocess.run(
        [str(python), "-I", str(HERE / "version_checks.py"), str(folder)],
        cwd=place,
        env={
            "PATH": os.environ["PATH"],
            "HF_HOME": str(place / f"cache-{python.parents[1].name}"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):  # it did not even start: an import failed
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"versions": {"transformers": python.parents[1].name}, "checks": {"start": last}}


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """One column a version, one line a check."""
    versions = list(dict.fromkeys(name for found in results.values() for name in found["versions"]))
    checks = list(dict.fromkeys(name for found in results.values() for name in found["checks"]))
    lines = [["", *results]]
    lines += [[name, *(found["versions"].get(name, "?") for found in results.values())] for name in versions]
    for name in checks:
        states = [found["checks"].get(name, "not run") for found in results.values()]
        lines.append([name.replace("_", " "), *(s if s in ("ok", "not run") else "FAILED" for s in states)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
