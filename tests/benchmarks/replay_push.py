"""Push a run to a Hub on loopback while one of its calls fails, push it again, and check what the Hub then has.

    python tests/benchmarks/replay_push.py [--only xet/new,lfs/pull/commit] [--cases 100] [--seed 0]

A case is a transport (`TRANSPORTS`), a state of the Hub with a command (`SCENARIOS`), a call that this command makes
there (`hub.CALLS`) and what happens to that call (`FAULTS`). Its name is `xet/new/commit/lost`. After the first
command, these must hold:

- each branch and pull request has its former files, or those that were staged, and no mixture;
- there are no second commits, pull requests or tags;
- a release is tagged, and a repository made public, only after its checksums were compared;
- a model that is replaced has a tag;
- the exit status is 0, 2, 3, 4 or 5, an error is one line, and all of it took less than `MOST_SECONDS`.

Then what a person would do about the error is done (the fault ends; a rule, a branch or a tag is removed), requests
that got no answer are done late, and the same command must complete with status 0 and leave exactly one commit.

Prints a table and the cases that failed, and exits with 1 if there are any. Pushes are forks of a process that has
imported everything. They wait a twentieth of the time between attempts, the rest is added to the time of the case. The
client's time-outs are a tenth of the defaults. POSIX only.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import run_train, tiny_words
from hub import CALLS, TOKEN, HubServer
from publishing.push_runner import NOWHERE, OF_HUB, Command, Done, Waiting, contents

from gpt2small_hf.formatting import console_table
from gpt2small_hf.publishing.card import add_mark, content_hash
from gpt2small_hf.runs.files import read_json
from gpt2small_hf.runs.layout import RunFolder

REPO, TWIN, OF_OTHERS = "you/tiny", "you/tiny-native", "else/tiny"
TRANSPORTS = ("lfs", "xet")
PACE = 0.05
"""By which a wait between two attempts is multiplied."""
MOST_SECONDS = 400
SHORT_WAITS = f"""
import os, time
sleep = time.sleep
def wait(seconds):
    if seconds < 1:
        return sleep(seconds)
    with open(os.environ["WAITED"], "a") as file:
        file.write(f"{{seconds * {1 - PACE}}}\\n")
    sleep(seconds * {PACE})
time.sleep = wait
"""
TIME_OUTS = {
    "HF_HUB_DOWNLOAD_TIMEOUT": "1",
    "HF_XET_CLIENT_CONNECT_TIMEOUT": "1s",
    "HF_XET_CLIENT_READ_TIMEOUT": "6s",
    "HF_XET_CLIENT_RETRY_MAX_DURATION": "12s",
}
QUOTA = "Private repository storage limit reached"
HIDE_WORDS = ("xorb", "shard", "cdn")
"""Calls of which the client reports the status alone."""


# ---- states of the Hub -------------------------------------------------------------------------------------------


@dataclass
class Scenario:
    """A state of the Hub, a command, and what is to come of it."""

    words: str
    set_up: Callable[[HubServer, RunFolder], None] = lambda hub, run: None
    refs: dict[tuple[str, str], str] = field(default_factory=lambda: {(REPO, "refs/heads/main"): "staged"})
    """Repository and reference → the folder that is to be there."""
    keeps: tuple[str, ...] = (".gitattributes",)
    """Files of others that stay."""
    resolve: Callable[[HubServer, RunFolder], None] | None = None
    """What a person does when the command is refused even if no call fails."""
    calls: str = ""
    """Calls that are made to fail, if the command makes them."""
    faults: tuple[str, ...] = ()
    """What happens to them. Unset: `TELLING`."""

    @property
    def to_stage(self) -> list[str]:
        """The command that stages the same folders."""
        return [word for word in self.words.split() if word not in ("--no_verify", "--public", "--replace")]


def release(run: RunFolder) -> str:
    """The tag of a push of this run."""
    return f"step-20-{content_hash(read_json(run.root / 'staged.json')['files'])}"


def published_before(hub: HubServer, run: RunFolder) -> None:
    """An earlier push of other weights and code, to which a picture was added."""
    hub.create(REPO, private=True)
    files = {"gpt.py": b"# older\n", "model.safetensors": b"older\0", "fox.png": b"a picture\0"}
    card = {"README.md": add_mark("---\nlicense: mit\n---\n\n# Older\n").encode()}
    hub.commit(REPO, {"config.json": b'{"model_type": "gpt2small"}', **files, **card})


def of_somebody(hub: HubServer, run: RunFolder, repo: str = REPO) -> None:
    """Somebody's own GPT-2."""
    hub.create(repo)
    files = {"pytorch_model.bin": b"pickle\0", "vocab.txt": b"words\n", "README.md": b"# My GPT-2\n"}
    hub.commit(repo, {"config.json": b'{"model_type": "gpt2"}', "fox.png": b"a picture\0", **files})


def with_rules(rules: bytes) -> Callable[[HubServer, RunFolder], None]:
    """A repository with a `.gitignore`."""

    def set_up(hub: HubServer, run: RunFolder) -> None:
        hub.create(REPO)
        hub.commit(REPO, {".gitignore": rules})

    return set_up


def without_rules(hub: HubServer, run: RunFolder) -> None:
    """The repository's owner removes `.gitignore`."""
    hub.commit(REPO, {}, delete=[".gitignore"])


def branch_named_as_release(hub: HubServer, run: RunFolder) -> None:
    """A branch has the name of the tag."""
    hub.create(REPO)
    hub.repos[REPO].refs[f"refs/heads/{release(run)}"] = hub.landed[-1].oid


def without_branch(hub: HubServer, run: RunFolder) -> None:
    """The repository's owner removes that branch."""
    del hub.repos[REPO].refs[f"refs/heads/{release(run)}"]


def release_of_another_model(hub: HubServer, run: RunFolder) -> None:
    """The tag marks other files."""
    hub.create(REPO)
    hub.repos[REPO].refs[f"refs/tags/{release(run)}"] = hub.landed[-1].oid


def without_release(hub: HubServer, run: RunFolder) -> None:
    """The repository's owner removes that tag."""
    del hub.repos[REPO].refs[f"refs/tags/{release(run)}"]


def tag_named_as_branch(hub: HubServer, run: RunFolder) -> None:
    """A tag has the name of a checkpoint's branch."""
    hub.create(REPO)
    hub.repos[REPO].refs["refs/tags/step-10"] = hub.landed[-1].oid


def without_tag(hub: HubServer, run: RunFolder) -> None:
    """The repository's owner removes that tag."""
    del hub.repos[REPO].refs["refs/tags/step-10"]


def website_made(hub: HubServer, run: RunFolder) -> None:
    """A repository made on the website."""
    hub.create(REPO)
    hub.commit(REPO, {"README.md": b"---\nlanguage: en\n---\n"})


QUICK = f"runs/short {REPO} --no_verify"
PICTURE = (".gitattributes", "fox.png")
CHECKPOINTS = {(REPO, "refs/heads/step-10"): "staged-step-10", (REPO, "refs/heads/main"): "staged"}
TELLING = ("lost", "HTML", "killed before", "killed after")
SCENARIOS = {
    "new": Scenario(QUICK, calls=" ".join(CALLS)),
    "update": Scenario(QUICK, published_before, keeps=PICTURE, calls="preupload commit tag"),
    "replace": Scenario(f"{QUICK} --replace", of_somebody, keeps=PICTURE, calls="tag put xorb commit"),
    "next": Scenario(
        f"{QUICK} --revision next", website_made, {(REPO, "refs/heads/next"): "staged"}, calls="branch commit"
    ),
    "checkpoints": Scenario(f"{QUICK} --all_checkpoints", refs=CHECKPOINTS, calls="branch commit tag"),
    "native": Scenario(
        f"{QUICK} --also_native",
        refs={(REPO, "refs/heads/main"): "staged", (TWIN, "refs/heads/main"): "staged-native"},
        calls="create commit tag",
    ),
    "public": Scenario(f"{QUICK} --public", calls="commit tag settings"),
    "pull": Scenario(
        f"runs/short {OF_OTHERS} --no_verify --create_pr",
        lambda hub, run: of_somebody(hub, run, OF_OTHERS),
        {(OF_OTHERS, "refs/pr/1"): "staged"},
        PICTURE,
        calls="discussions preupload put xet-token commit",
        faults=(*TELLING, "silent", "done and silent", "500 for ever", "quota"),
    ),
    "rules": Scenario(QUICK, with_rules(b"*.safetensors\n"), resolve=without_rules, calls="preupload"),
    "other rules": Scenario(
        QUICK, with_rules(b"checkpoint-*/\n"), keeps=(".gitattributes", ".gitignore"), calls="preupload commit"
    ),
    "branch named so": Scenario(QUICK, branch_named_as_release, resolve=without_branch, calls="refs"),
    "tag taken": Scenario(QUICK, release_of_another_model, resolve=without_release, calls="refs"),
    "tag named so": Scenario(
        f"{QUICK} --all_checkpoints", tag_named_as_branch, CHECKPOINTS, resolve=without_tag, calls="refs"
    ),
    "verified": Scenario(f"runs/short {REPO} --public", calls="cdn tag"),
}


# ---- faults ------------------------------------------------------------------------------------------------------

KILLED = {"killed before": False, "killed after": True}
"""Kind of fault → whether the work of the call is done."""


def fails(status: int, times: int = 1, headers: dict[str, str] | None = None, words: str = "") -> Callable:
    """Answer with a status."""
    more = {**(headers or {}), **({"X-Error-Message": words} if words else {})}
    return lambda hub, call, after: hub.fail(
        CALLS[call][1], CALLS[call][0], status, times, after, more, {"error": words or f"fault {status}"}
    )


def injected(kind: str, times: int = 1) -> Callable:
    """As `HubServer.inject`."""
    return lambda hub, call, after: hub.inject(call, kind, times, after)


def truncated(hub: HubServer, call: str, after: int) -> None:
    """Answer with the first half of a JSON object."""
    kind = {"Content-Type": "application/json"}
    hub.fail(CALLS[call][1], CALLS[call][0], 200, 1, after, kind, b'{"files": [{"path": "config.json", "upl')


def killed(call: str) -> None:
    """Kill the client, in `Case.run`."""


FAULTS: dict[str, Callable] = {
    "500": fails(500),
    "500 for ever": fails(500, -1),
    "429": fails(429, 2, {"Retry-After": "3"}),
    "429 with RateLimit": fails(
        429, 1, {"RateLimit": '"api";r=0;t=20', "RateLimit-Policy": '"fixed window";"api";q=9;w=300'}
    ),
    "quota": fails(403, -1, words=QUOTA),
    "401": fails(401, -1),
    "dropped": injected("dropped"),
    "dropped for ever": injected("dropped", -1),
    "lost": injected("lost"),
    "lost for ever": injected("lost", -1),
    "silent": injected("silent"),
    "silent for ever": injected("silent", -1),
    "done and silent": injected("done-silent"),
    "HTML": injected("html"),
    "HTML for ever": injected("html", -1),
    "truncated": truncated,
    "an empty object": injected("empty", -1),
    **dict.fromkeys(KILLED, killed),
}
SCENARIOS["new"].faults = tuple(FAULTS)


@dataclass(frozen=True)
class Case:
    """One fault."""

    transport: str
    scenario: str
    call: str
    fault: str
    after: int
    """Calls of this name before the one that fails."""

    @classmethod
    def named(cls, name: str) -> Case:
        """The case of this name, without a number of calls; `lfs/new/none` is without a fault."""
        transport, scenario, call, fault = [*name.split("/"), ""][:4]
        return cls(transport, scenario, call, fault, 0)

    def __str__(self) -> str:
        return "/".join(
            (self.transport, self.scenario, self.call + f"+{self.after}" * bool(self.after), self.fault)
        ).rstrip("/")


# ---- a case ------------------------------------------------------------------------------------------------------


class Place:
    """A transport's folder: runs that are staged, and the process that forks for each push."""

    def __init__(self, root: Path, transport: str, run: Path, waiting: Waiting | None = None) -> None:
        root.mkdir()
        self.root, self.transport, self.run, self.count = root, transport, run, 0
        environment = {**TIME_OUTS, "WAITED": str(root / "waited")}
        self.waiting = waiting or Waiting(root / "home", xet=transport == "xet", more=environment, then=SHORT_WAITS)

    def start(self, words: list[str], folder: Path, url: str = NOWHERE) -> Command:
        """Start a push to the Hub at `url`.

        Each has a home of its own, because hf_xet remembers there what a server has.
        """
        self.count += 1
        out, err, home, waited = (self.root / f"{name}{self.count}" for name in ("out", "err", "home", "waited"))
        home.mkdir()
        for path in (out, err, waited):
            path.touch()
        given = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "WAITED": str(waited)}
        return self.waiting.start(words, folder, given, out, err)

    def waited(self) -> float:
        """Seconds that the last push would have waited longer."""
        return sum(map(float, (self.root / f"waited{self.count}").read_text().split()))

    def staged(self, scenario: Scenario) -> Path:
        """The folder for `stage`."""
        return self.root / re.sub(r"\W+", "-", " ".join(scenario.to_stage))

    def stage(self, scenario: Scenario, folder: Path) -> None:
        """Copy the run into `folder`, staged and checked as this command needs it."""
        staged = self.staged(scenario)
        if not staged.exists():
            shutil.copytree(self.run, staged / "runs" / "short")
            done = self.start([*scenario.to_stage, "--dry_run"], staged).wait()
            assert done.status == 0, done.err
        shutil.copytree(staged, folder, dirs_exist_ok=True)


@dataclass
class Found:
    """What came of a case."""

    wrong: list[str] = field(default_factory=list)
    status: int = 0
    seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)


class Attempt:
    """The Hub and the run of one case, and what was there before it."""

    def __init__(self, place: Place, scenario: Scenario, hub: HubServer, folder: Path) -> None:
        self.place, self.scenario, self.hub, self.folder = place, scenario, hub, folder
        self.run = RunFolder(folder / "runs" / "short")
        place.stage(scenario, folder)
        scenario.set_up(hub, self.run)
        self.remember()

    def remember(self) -> None:
        """Remember what the Hub has now."""
        hub = self.hub
        self.n_before = len(hub.landed)
        self.public = {name for name, repo in hub.repos.items() if not repo.private}
        self.former = {
            (name, ref): hub.files(name, oid) for name, repo in hub.repos.items() for ref, oid in repo.refs.items()
        }
        self.tags = {(name, tag) for name, repo in hub.repos.items() for tag in repo.tags}

    def push(self) -> tuple[Done, float]:
        """Push to the end. Returns: also the seconds that it takes with real waits."""
        done = self.place.start(self.scenario.words.split(), self.folder, self.hub.url).wait()
        return done, done.seconds + self.place.waited()

    def expected(self, repo: str, ref: str) -> dict[str, bytes]:
        """The files that are to be there."""
        former = self.former.get((repo, ref)) or self.former.get((repo, "refs/heads/main")) or OF_HUB
        kept = {name: former[name] for name in self.scenario.keeps if name in former}
        return {**kept, **contents(self.run.root / self.scenario.refs[repo, ref])}

    def check(self, *, complete: bool) -> list[str]:
        """What is not as it should be, between the two commands or (`complete`) at the end."""
        wrong: list[str] = []
        ours = [commit for commit in self.hub.landed[self.n_before :] if commit.author == "you"]
        commits = Counter((commit.repo, commit.ref) for commit in ours if commit.title != "initial commit")
        for (name, ref), oid in ((pair, oid) for pair in self._refs() for oid in [self._head(*pair)]):
            there = self.hub.files(name, oid)
            if (name, ref) not in self.scenario.refs:
                before = self.former.get((name, ref), OF_HUB)
                if there != before:
                    wrong.append(f"{name} {ref} was changed")
                continue
            former = [self.former.get((name, ref)), self.former.get((name, "refs/heads/main")), OF_HUB]
            allowed = [self.expected(name, ref), *([] if complete else filter(None, former))]
            if there not in allowed:
                names = sorted(n for n in {*there, *allowed[0]} if there.get(n) != allowed[0].get(n))
                wrong.append(f"{name} {ref} differs: {', '.join(names)}")
        for pair in self.scenario.refs:
            if commits[pair] > 1 or (complete and commits[pair] != 1):
                wrong.append(f"{commits[pair]} commits to {' '.join(pair)}")
        if others := commits.keys() - self.scenario.refs.keys():
            wrong.append(f"commits to {others}")
        return [*wrong, *self._wrong_tags(complete=complete), *self._wrong_visibility(complete=complete)]

    def _refs(self) -> list[tuple[str, str]]:
        return [(n, ref) for n, repo in self.hub.repos.items() for ref in repo.refs if "refs/tags/" not in ref]

    def _head(self, name: str, ref: str) -> str:
        return self.hub.repos[name].refs[ref]

    def _wrong_tags(self, *, complete: bool) -> list[str]:
        """Tags that are too many, missing, or not where they belong."""
        wrong = []
        for (name, ref), folder in self.scenario.refs.items():
            repo = self.hub.repos.get(name)
            if repo is None:
                continue
            new = {tag: oid for tag, oid in repo.tags.items() if (name, tag) not in self.tags}
            former = {tag: oid for tag, oid in new.items() if tag.startswith("before-")}
            before = self.former.get((name, ref), {})
            was_replaced = "--replace" in self.scenario.words and self.hub.files(name, self._head(name, ref)) != before
            if len(former) > 1 or any(self.hub.files(name, oid) != before for oid in former.values()):
                wrong.append(f"tags of the former state: {former}")
            if was_replaced and not former:
                wrong.append("the former state has no tag")
            releases = {tag: oid for tag, oid in new.items() if tag not in former}
            is_release = ref != "refs/pr/1" and not folder.startswith("staged-step")
            if len(releases) > 1 or (is_release and complete and len(releases) != 1):
                wrong.append(f"tags of {name}: {sorted(releases)}")
            if is_release and any(self.hub.files(name, oid) != self.expected(name, ref) for oid in releases.values()):
                wrong.append(f"a tag of {name} marks something else")
            for oid in releases.values() if is_release else []:
                paths = [(one.method, one.path, one.status) for one in self.hub.requests]
                tagged = next(i for i, one in enumerate(paths) if one[:2] == ("POST", f"/api/models/{name}/tag/{oid}"))
                if ("GET", f"/api/models/{name}/tree/{oid}", 200) not in paths[:tagged]:
                    wrong.append(f"{name} was tagged before it was verified")
        return wrong

    def _wrong_visibility(self, *, complete: bool) -> list[str]:
        """What can be seen and should not, or the other way round; pull requests."""
        wrong = []
        for name, repo in self.hub.repos.items():
            asked = "--public" in self.scenario.words
            if not repo.private and name not in self.public and not (asked and repo.tags):
                wrong.append(f"{name} is public")
            if complete and asked and repo.private:
                wrong.append(f"{name} is not public")
            pulls = sum(pull.is_pull_request for pull in repo.discussions.values())
            if pulls > 1 or (complete and pulls != ("--create_pr" in self.scenario.words)):
                wrong.append(f"{pulls} pull requests")
        if complete:
            record = read_json(self.run.published)
            known = {(one["repo_id"], one["commit"]) for one in [record, *record["others"]]}
            if missing := [pair for pair in self.scenario.refs if (pair[0], self._head(*pair)) not in known]:
                wrong.append(f"published.json does not have {missing}")
        return wrong


def refusal(done: Done) -> list[str]:
    """What is wrong about how a push ended."""
    if done.status == 0:
        return []
    if done.status not in (2, 3, 4, 5) or "Traceback" in done.err:
        return [f"status {done.status}: {done.err.strip()[-2000:]}"]
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    return [] if len(lines) == 1 and done.err.endswith(f"{lines[0]}\n") else [f"not one line: {done.err}"]


def replay(place: Place, case: Case) -> Found:
    """Run a case."""
    found, scenario = Found(), SCENARIOS[case.scenario]
    with tempfile.TemporaryDirectory(dir=place.root) as folder, HubServer() as hub:
        attempt = Attempt(place, scenario, hub, Path(folder))
        if case.fault in KILLED:
            method, path = CALLS[case.call]
            pause = hub.pause(path, method, case.after, when_done=KILLED[case.fault])
            command = place.start(scenario.words.split(), attempt.folder, hub.url)
            command.reach(pause)
            command.kill()
            if KILLED[case.fault]:
                pause.release()
            else:
                pause.hang_up()
            hub.settle()
            found.status = -9
        else:
            if case.fault:
                FAULTS[case.fault](hub, case.call, case.after)
            done, found.seconds = attempt.push()
            found.status = done.status
            found.wrong += refusal(done)
            if case.fault == "quota" and case.call not in HIDE_WORDS and done.status and QUOTA not in done.err:
                found.wrong.append(f"the Hub's words are missing: {done.err.splitlines()[-1]}")
            found.calls = Counter(
                name
                for name, (method, path) in CALLS.items()
                for one in hub.requests
                if method in (None, one.method) and re.search(path, one.path)
            )
        found.wrong += [f"after the fault: {wrong}" for wrong in attempt.check(complete=False)]
        hub.stop_faults()
        if scenario.resolve and (found.status or case.fault in KILLED):
            scenario.resolve(hub, attempt.run)
            attempt.remember()
        done, seconds = attempt.push()
        found.seconds = max(found.seconds, seconds)
        if done.status != 0:
            found.wrong.append(f"the same command again: status {done.status}: {done.err.strip()[-1000:]}")
        else:
            found.wrong += [f"at the end: {wrong}" for wrong in attempt.check(complete=True)]
        if found.seconds > MOST_SECONDS:
            found.wrong.append(f"{found.seconds:.0f} s")
        found.wrong += [f"leaked a token to {one.path}" for one in hub.leaks] + hub.unknown_routes
    return found


def cases_of(name: str, transport: str, calls: Counter[str]) -> list[Case]:
    """All cases of a scenario whose command makes these calls: the first of a name fails, or the last, or all.

    Cases in which both transports behave the same in a new repository are run with one of them.
    """
    scenario = SCENARIOS[name]
    of_xet = ("xet-token", "xorb", "shard", "preupload", "commit")
    return [
        Case(transport, name, call, kind, after)
        for call in CALLS
        if call in scenario.calls.split() and calls[call] and call != "cas"
        for kind in scenario.faults or TELLING
        if name != "new" or transport == "lfs" or call in of_xet or kind in TELLING
        for after in sorted({0, calls[call] - 1} if kind in TELLING else {0})
    ]


def main() -> int:
    """Run all, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="Beginnings of the names of cases, with commas. Unset: all.")
    parser.add_argument("--cases", type=int, help="Number of cases, drawn at random. Unset: all.")
    parser.add_argument("--seed", type=int, default=0, help="Of the random draw.")
    args = parser.parse_args()
    began, only = time.perf_counter(), args.only.split(",")

    def work(place: Place) -> dict[Case, Found]:
        results, cases = {}, []
        for name in SCENARIOS:
            case = Case.named(f"{place.transport}/{name}/none")
            if any(str(case).startswith(part) or part.startswith(f"{place.transport}/{name}/") for part in only):
                results[case] = report(case, replay(place, case))
                cases += cases_of(name, place.transport, results[case].calls)
        cases = [case for case in cases if any(str(case).startswith(part) for part in only)]
        if args.cases is not None:
            cases = random.Random(args.seed).sample(cases, min(len(cases), args.cases // len(TRANSPORTS)))
        for number, case in enumerate(cases, start=1):
            results[case] = report(case, replay(place, case))
            if number % 20 == 0:
                print(f"{place.transport}: {number} of {len(cases)} cases", file=sys.stderr, flush=True)
        return results

    def report(case: Case, found: Found) -> Found:
        for wrong in found.wrong:
            print(f"{case}: {wrong}", flush=True)
        return found

    with tempfile.TemporaryDirectory(prefix="replay-") as root:
        os.chdir(root)
        run = run_train(tiny_words(Path(root), Path(root, "runs", "short")))
        shutil.rmtree(run.checkpoints / "checkpoint-20")
        places = [Place(Path(root, transport), transport, run.root) for transport in TRANSPORTS]
        with ThreadPoolExecutor(len(places)) as pool:
            try:
                results = {case: found for part in pool.map(work, places) for case, found in part.items()}
            finally:  # also when interrupted: no further push is started
                for place in places:
                    place.waiting.process.kill()
        os.chdir("/")
    rows = []
    for transport in TRANSPORTS:
        for name in SCENARIOS:
            found = [one for case, one in results.items() if (case.transport, case.scenario) == (transport, name)]
            if not found:
                continue
            statuses = Counter(one.status for one in found)
            how = ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items()))
            longest = max(one.seconds for one in found)
            rows.append(
                [transport, name, str(len(found)), how, f"{longest:.0f}", str(sum(bool(f.wrong) for f in found))]
            )
    print(console_table(["transport", "scenario", "cases", "status: cases", "longest, s", "failed"], rows))
    failed = sum(bool(found.wrong) for found in results.values())
    print(f"{len(results)} cases, {failed} failed; {time.perf_counter() - began:.0f} s.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
