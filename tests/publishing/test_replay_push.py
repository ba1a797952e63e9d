"""Some of the cases of `benchmarks/replay_push.py`, so that it still runs and pushes still pass it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.replay_push import SCENARIOS, Attempt, Case, Place, replay
from hub import HubServer

from publishing.push_runner import REPO, DryRun, Waiting

pytest_plugins = ["publishing.push_runner"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def place(waiting: Callable[[bool], Waiting], dry_run: DryRun, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Of cases over LFS, with a run that was staged before."""
    place = Place(tmp_path_factory.mktemp("replay") / "lfs", "lfs", dry_run.place / "runs" / "short", waiting(False))
    place.staged(SCENARIOS["new"]).symlink_to(dry_run.place)
    return place


@pytest.mark.parametrize(
    "name",
    [
        "new/create/killed after",
        "new/put/killed before",
        "new/commit/lost",
        "new/commit/quota",
        "new/commit/killed after",
        "new/tag/killed after",
        "update/preupload/HTML",
        "replace/tag/killed after",
        "replace/commit/killed before",
        "public/settings/killed before",
        "rules/none",
        "branch named so/none",
    ],
)
def test_a_push_that_failed_completes_when_given_again(place: Place, name: str) -> None:
    assert replay(place, Case.named(f"lfs/{name}")).wrong == []


def test_a_mixture_of_files_and_a_second_commit_are_found(place: Place, tmp_path: Path) -> None:
    with HubServer() as hub:
        attempt = Attempt(place, SCENARIOS["new"], hub, tmp_path)
        done, _ = attempt.push()
        assert (done.status, attempt.check(complete=True)) == (0, [])
        hub.commit(REPO, {"gpt.py": b"# older\n"}, author="you")
        wrong = attempt.check(complete=True)
    assert f"{REPO} refs/heads/main differs: gpt.py" in wrong
    assert f"2 commits to {REPO} refs/heads/main" in wrong
