# pyright: strict
"""Recipes: flat YAML files whose keys are flag names; found by name, read and merged with those that they extend."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gpt2small_hf.errors import UsageError
from gpt2small_hf.resources import resource

BASELINE = "baseline"
"""The recipe of a sweep that the others are compared with."""


def find_recipe(name: str, folder: Path = Path()) -> Path:
    """Return the path of a recipe: a file in `folder`, or an example of the package, with or without `.yaml`.

    Examples are named `tiny`, `examples/tiny.yaml`, `interventions/baseline`. If neither exists: `folder / name`.
    """
    here, packaged = folder / name, _example(Path(name))
    places = [place for path in (here, packaged) for place in (path, path.parent / f"{path.name}.yaml")]
    return next((place for place in places if place.is_file()), here)


def _example(name: Path) -> Path:
    return resource("examples").joinpath(*name.parts[name.parts[:1] == ("examples",) :])


def read_recipe(path: Path, alternatives: Sequence[set[str]] = (), above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe. `extends: other.yaml` merges it with another one, whose settings it overrides.

    `alternatives` are settings of which one replaces the others; `above` are recipes that extend this one.

    Raises: UsageError naming the file if it is missing, empty, not YAML, or not a list of `key: value`.
    """
    try:
        if path.is_fifo():  # it is read more than once
            raise UsageError(f"the recipe {path} is a pipe. Save it as a file.")
        text = path.read_text(encoding="utf-8")
        loaded: Any = yaml.load(text, _RecipeLoader)
    except OSError as error:
        packaged = sorted(each.stem for each in resource("examples").glob("*.yaml"))
        near = difflib.get_close_matches(path.stem, packaged, 1)
        extends = f" {above[-1]} extends it." if above else ""
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"Cannot read the recipe {path} ({error.strerror}).{extends} Recipes of the package: {', '.join(packaged)}."
            f"{hint}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter of long integers and deep nesting
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not text.strip():
        raise UsageError(f"{path} is empty. Write one `flag_name: value` per line, as in examples/tiny.yaml.")
    recipe: dict[str, Any] = {} if loaded is None else loaded  # a recipe of comments has the defaults
    if not isinstance(recipe, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"{path} is not a recipe: write one `flag_name: value` per line, as in examples/tiny.yaml.")
    if unnamed := [key for key in recipe if not isinstance(key, str)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"{path}: {unnamed[0]} is not the name of a flag.")
    base = recipe.pop("extends", None)
    if base is None:
        return recipe
    above, lower = (*above, path.resolve()), find_recipe(str(base), path.parent)
    if lower.resolve() in above:
        raise UsageError(f"{path} extends {base}, which extends it. Remove one of the two lines.")
    return merge_recipes(read_recipe(lower, alternatives, above), recipe, alternatives)


def merge_recipes(
    lower: dict[str, Any], upper: dict[str, Any], alternatives: Sequence[set[str]] = ()
) -> dict[str, Any]:
    """Return `lower` overridden by `upper`, without the alternatives of the settings in `upper`."""
    replaced = {name for group in alternatives if group & upper.keys() for name in group}
    return {key: value for key, value in lower.items() if key not in replaced} | upper


def recipe_text(path: Path, alternatives: Sequence[set[str]] = ()) -> str:
    """Return the text of a recipe, merged with those that it extends. Raises: as `read_recipe`."""
    if extended(path) is None:
        return path.read_text(encoding="utf-8")
    return f"# {path.name}, with what it extends\n{as_yaml(read_recipe(path, alternatives))}"


def extended(path: Path) -> Path | None:
    """Return the recipe that a recipe extends; None if it extends none."""
    recipe: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), _RecipeLoader) or {}
    base = recipe.get("extends")
    return None if base is None else find_recipe(str(base), path.parent)


def find_recipes(folder: Path) -> dict[str, Path]:
    """Return the recipes of a folder, or of one of the package's examples, by name, with the baseline first.

    Raises: UsageError if it has no baseline.
    """
    found = folder if folder.is_dir() else _example(folder)
    recipes = {path.stem: path for path in sorted(found.glob("*.yaml"))}
    if BASELINE not in recipes:
        raise UsageError(f"{folder} has no {BASELINE}.yaml to compare with. Name a folder of recipes with one.")
    return {BASELINE: recipes.pop(BASELINE), **recipes}


def as_yaml(recipe: dict[str, Any]) -> str:
    """Return settings as the text of a recipe."""
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=110)


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which `no` is a string, as in `eval_strategy: no`, and keys are unique."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]} is given twice. Remove one of the lines.")
        return super().construct_mapping(node, deep)


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
