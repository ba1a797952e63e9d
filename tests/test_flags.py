"""Dataclass < recipe < flag, and mistakes that name the remedy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st

from gpt2small_hf.config.parser import FlagParser, as_flags, without_flags
from gpt2small_hf.config.recipe import find_recipe, read_recipe, recipe_text
from gpt2small_hf.errors import UsageError


@dataclass
class Settings:
    """A few of each kind."""

    learning_rate: float = 0.1
    names: list[str] | None = None
    bf16: bool = False
    shuffle: bool = True
    extra: dict[str, Any] | str | None = field(default=None)


def fill(words):
    return FlagParser(Settings, prog="prog").fill(words)[0]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(0, 1),
            "names": st.lists(st.text("abc", min_size=1), min_size=1, max_size=3),
            "bf16": st.booleans(),
            "shuffle": st.booleans(),
        },
    )
)
def test_recipe_written_as_flags_gives_the_same_settings(recipe):
    assert fill(as_flags(recipe)) == Settings(**recipe)


def test_flag_overrides_recipe_and_recipe_overrides_default():
    settings = fill([*as_flags({"learning_rate": 0.2, "names": ["a", "b"]}), "--learning_rate", "0.3"])
    assert settings == Settings(learning_rate=0.3, names=["a", "b"])


def test_recipe_reads_no_as_a_string_and_false_as_a_boolean(tmp_path):
    (tmp_path / "r.yaml").write_text("eval_strategy: no\nbf16: false\nshuffle: True\n")
    assert read_recipe(tmp_path / "r.yaml") == {"eval_strategy": "no", "bf16": False, "shuffle": True}


def test_recipe_overrides_the_one_it_extends(tmp_path):
    (tmp_path / "base.yaml").write_text("max_steps: 5\nlearning_rate: 0.2\nbf16: true\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "middle.yaml").write_text("extends: ../base.yaml\nlearning_rate: 0.3\n")
    (tmp_path / "more" / "top.yaml").write_text("extends: middle.yaml\ntokens: 900\n")
    merged = read_recipe(tmp_path / "more" / "top.yaml", [{"max_steps", "tokens"}])
    assert merged == {"learning_rate": 0.3, "bf16": True, "tokens": 900}
    alone = recipe_text(tmp_path / "more" / "top.yaml", [{"max_steps", "tokens"}])
    assert alone == "# top.yaml, with what it extends\nlearning_rate: 0.3\nbf16: true\ntokens: 900\n"
    assert recipe_text(tmp_path / "base.yaml") == (tmp_path / "base.yaml").read_text()


@pytest.mark.parametrize("name", ["tiny", "tiny.yaml", "examples/tiny", "examples/tiny.yaml"])
def test_recipe_of_the_package_is_found_by_name_unless_there_is_a_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a folder is not a recipe
    assert find_recipe(name) == REPOSITORY / "examples" / "tiny.yaml"
    (tmp_path / "mine.yaml").write_text(f"extends: {name}\nmax_steps: 3\n")
    assert read_recipe(find_recipe("mine")) == {**read_recipe(REPOSITORY / "examples" / "tiny.yaml"), "max_steps": 3}
    here = Path(f"{name.removesuffix('.yaml')}.yaml")
    here.parent.mkdir(exist_ok=True)
    here.write_text("max_steps: 7\n")
    assert find_recipe(name) == here


def test_unknown_recipe_names_those_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tinny", "/tiny.yaml", "../tiny.yaml", ".", "/", ""):
        with pytest.raises(UsageError, match=r"Cannot read the recipe .*ecipes of the package: .*gpt2-small.*tiny"):
            read_recipe(find_recipe(name))
    with pytest.raises(UsageError, match=r"Did you mean tiny\?$"):
        read_recipe(find_recipe("tinny"))
    Path("mine.yaml").write_text("extends: other.yaml\n")
    with pytest.raises(UsageError, match=r"Cannot read the recipe other\.yaml \(.*\)\. .*mine\.yaml extends it\."):
        read_recipe(Path("mine.yaml"))


def test_recipes_that_extend_each_other_are_refused_and_so_is_one_that_is_not_there(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(UsageError, match=r"b\.yaml extends a\.yaml, which extends it"):
        read_recipe(tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("extends: nowhere.yaml\n")
    with pytest.raises(UsageError, match=r"Cannot read the recipe .*nowhere\.yaml"):
        read_recipe(tmp_path / "c.yaml")


def test_dashes_are_accepted_and_abbreviations_are_not():
    assert fill(["--learning-rate", "0.5"]).learning_rate == 0.5
    with pytest.raises(UsageError, match=r"--learning is not a flag\. Did you mean --learning_rate\?"):
        fill(["--learning", "0.5"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bf61"], "--bf61 is not a flag. Did you mean --bf16?"),
        (["--zzz", "1"], "--zzz is not a flag. All flags: prog --help"),
        (["--learning_rate", "fast"], "--learning_rate: 'fast' is not a number"),
        (["stray"], "stray is not a flag"),
    ],
)
def test_flag_error_names_the_fix(words, message):
    with pytest.raises(UsageError) as caught:
        fill(words)
    assert str(caught.value).startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- a\n- b\n", "is not a recipe"),
        ("a: [1\n", "is not valid YAML"),
        (f"seed: {'9' * 5000}\n", "is not valid YAML"),
        (f"a: {'[' * 5000}\n", "is not valid YAML"),
        (None, "Cannot read the recipe"),
        ("1: 2\n", "1 is not the name of a flag"),
        ("a: 1\na: 2\n", "a is given twice"),
        ("", "is empty"),
        (" \n\n", "is empty"),
    ],
)
def test_invalid_recipe_is_reported_with_its_path(tmp_path, content, words):
    path = tmp_path / "r.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=words) as caught:
        read_recipe(path)
    assert "r.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_recipe_of_comments_has_the_defaults(tmp_path):
    (tmp_path / "r.yaml").write_text("# nothing but defaults\n")
    assert read_recipe(tmp_path / "r.yaml") == {}


@pytest.mark.parametrize("spelled", ["--preflight_only", "--preflight_only true", "--preflight-only=true"])
def test_without_flags_removes_a_flag_and_its_value(spelled):
    words = ["r.yaml", *spelled.split(), "--output_dir", "runs/preflight-a", "--prompts", "One", "preflight"]
    kept = ["r.yaml", "--output_dir", "runs/preflight-a", "--prompts", "One", "preflight"]
    assert without_flags(words, {"preflight_only"}) == kept
    assert without_flags([*kept, *spelled.split()], {"preflight_only"}) == kept
