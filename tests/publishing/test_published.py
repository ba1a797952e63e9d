"""`published.json`: records of earlier versions load, the newest of each branch is kept, errors name the file."""

import pytest

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.publication import PublishedCommit, find_record, published_json, read_published
from gpt2small_hf.runs.files import write_json


def test_newest_record_of_each_branch_is_kept_and_the_main_model_is_first(tmp_path):
    path = tmp_path / "published.json"
    assert read_published(path) == []
    old = {"repo_id": "you/tiny", "revision": "main", "commit": "a" * 40, "native": False, "pull_request": None}
    branch = {**old, "revision": "step-10", "from_tomorrow": [1]}
    write_json(path, {**old, "branches": [{"revision": "step-10"}], "others": [branch]})
    before = read_published(path)
    assert [record.revision for record in before] == ["main", "step-10"]
    found = find_record(before, "you/tiny")
    assert found is not None
    assert found.branches == [{"revision": "step-10"}]
    assert find_record(before, "you/another") is None
    native, newer = (
        PublishedCommit(repo_id=name, commit="b" * 40, native=name != "you/tiny") for name in ("n", "you/tiny")
    )
    told = published_json([native, newer, *before])
    assert (told["repo_id"], told["commit"], told["schema_version"]) == ("you/tiny", "b" * 40, 1)
    assert [other["repo_id"] for other in told["others"]] == ["n", "you/tiny"]
    assert branch.items() <= told["others"][1].items()
    for content in ({"repo_id": 1}, [1], {**old, "others": [{}]}):
        write_json(path, content)
        with pytest.raises(UsageError, match=r"published\.json is broken\. Delete it"):
            read_published(path)
