"""docs/api.md: it has a section for each public name, with the real signature and an example that runs."""

import inspect
import re

import pytest
from conftest import REPOSITORY
from transformers import PreTrainedConfig

import gpt2small_hf

SECTIONS = re.findall(
    r"^## (\w+)\n\n`([^\n]+)`\n\n.+?```python\n(.+?)```",
    (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


def signature(name: str) -> str:
    """A call of a public name, without types; of the config, without the parameters of every config."""
    found = inspect.signature(getattr(gpt2small_hf, name))
    inherited = inspect.signature(PreTrainedConfig).parameters if name == "GPT2SmallConfig" else {}
    own = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name not in inherited]
    return name + str(inspect.Signature(own)).replace("'", '"')


def test_each_public_name_has_a_section():
    assert sorted(name for name, _, _ in SECTIONS) == sorted(gpt2small_hf.__all__)
    assert set(gpt2small_hf.__all__) <= set(dir(gpt2small_hf))


@pytest.mark.parametrize(("name", "shown"), [(name, shown) for name, shown, _ in SECTIONS])
def test_signature_shown_is_the_real_one(name, shown):
    assert shown == signature(name)


@pytest.mark.slow
def test_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for name, _, example in SECTIONS:
        exec(compile(example, f"docs/api.md, {name}", "exec"), names)
