"""Templates and finished cards: what is refused, with the line."""

import pytest
from huggingface_hub import ModelCard

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.card import check_finished, is_unedited, render
from publishing.cards import HEADER

pytest_plugins = ["publishing.cards"]
pytestmark = pytest.mark.usefixtures("in_checkout")


# ---- the template -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{{ carbon_footprint }}", "names an unknown fact: 'carbon_footprint' is undefined"),
        (
            "{{ training.emissions }}",
            "dict object' has no attribute 'emissions'",
        ),
        ("{% if budget %}x{% endif %}", "names an unknown fact: 'budget' is undefined"),
        ("\n{% if training %}", ", line 2 cannot be rendered: Unexpected end of template."),
        ("{{ name | shouted }}", ", line 1 cannot be rendered: No filter named 'shouted'."),
        ("{% include 'more.j2' %}", " cannot be rendered: 'more.j2' not found"),
    ],
)
def test_a_template_that_asks_for_what_nobody_knows_is_refused_by_the_name_of_it(words, said, cards, tmp_path):
    card, template = cards["run"], tmp_path / "mine.j2"
    template.write_text(words)
    with pytest.raises(UsageError) as refused:
        render(card.source, card.folder, card.publication, template)
    assert str(refused.value).startswith(f"{template}")
    assert said in str(refused.value)


def test_a_template_of_ones_own_is_rendered_with_the_same_facts(cards, tmp_path):
    card, template = cards["run"], tmp_path / "mine.j2"
    template.write_text(
        "# {{ name | md }}\n\n{{ model.sizes.total | approximate }} parameters, "
        "loss {{ heldout.after.loss_nats | loss }}\n"
    )
    text = render(card.source, card.folder, card.publication, template)
    loss = card.source.run.loss_nats
    assert ModelCard(text).text.strip().startswith(f"# short\n\n16,608 parameters, loss {loss:.3f}\n")
    assert is_unedited(text)


# ---- the gate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Machine type: TODO", "the card has TODO in line 7: 'Machine type: TODO'"),
        ("FIXME later", "the card has TODO in line 7"),
        ("[More Information Needed]", "the card has More Information Needed in line 7"),
        ("A tuned version of [](https://huggingface.co/).", "the card has an empty link in line 7"),
        ("A tuned version of [gpt2]().", "the card has an empty link in line 7"),
        ("A tuned version of []().", "the card has an empty link in line 7"),
        ("| loss | None |", "the card has None in line 7: '| loss | None |'"),
        ("| loss | nan |", "the card has nan in line 7"),
        ("**NaN**", "the card has nan in line 7"),
        ("{{ loss }}", "the card has an unrendered placeholder in line 7"),
        ("{% if loss %}", "the card has an unrendered placeholder in line 7"),
        ("![loss](charts/loss.png)", "the card links charts/loss.png in line 7, which is not published"),
        ("See [the settings](resolved.json).", "the card links resolved.json in line 7, which is not published"),
        ("See `code` and [x](y.md) and `more`.", "the card links y.md in line 7, which is not published"),
        ('See [x](y.md "title").', "the card links y.md in line 7, which is not published"),
    ],
)
def test_an_unfinished_card_is_refused_with_the_line(line, said):
    with pytest.raises(UsageError) as refused:
        check_finished(f"{HEADER}# A model\n\n{line}\n", {"README.md"})
    assert str(refused.value).startswith(said)
    assert "Correct model_card.j2." in str(refused.value)


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("---\nlicense: TODO\n---\n\n# A model\n", "the card has TODO in line 2: 'license: TODO'"),
        ("---\nlicense: None\n---\n\n# A model\n", "the card has None in line 2"),
        ("---\nlicense: [\n---\n\n# A model\n", "the card's metadata is not YAML: "),
        ("---\nlicense\n---\n\n# A model\n", "the card has no metadata between two lines of ---"),
        ("# A model\n", "the card has no metadata between two lines of ---"),
        ("---\nlicense: mit\n", "the card has no metadata between two lines of ---"),
        ("", "the card has no metadata between two lines of ---"),
    ],
)
def test_metadata_that_is_missing_or_unfinished_is_refused(card, said):
    with pytest.raises(UsageError) as refused:
        check_finished(card, set())
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "lines",
    [
        "```text\nreturn None  # TODO {{ x }} {% if %} nan []() ![](gone.png)\n```",
        "```python\ndef f() -> None: ...\n```",
        "````text\n```\nNone\n```\nNone\n````",
        "a `None` and ``a ` None`` and `{{ x }}`",
        "| `None` | `TODO` |",
        "TODOs, nano, NaNs, Nonesuch, None_such",
        "[up](#results) [out](https://example.com) [mail](mailto:a@b.c) ![there](charts/loss.png) [it](README.md)",
        "an array[0] (zero) and \\[a\\](b)",
    ],
)
def test_the_same_words_in_code_and_other_words_are_no_reason(lines):
    check_finished(f"{HEADER}# A model\n\n{lines}\n", {"README.md", "charts/loss.png"})


def test_after_a_block_of_code_the_gate_looks_again():
    with pytest.raises(UsageError, match=r"the card has None in line 10: 'None'"):
        check_finished(f"{HEADER}# A model\n\n```text\nNone\n```\nNone\n", {"README.md"})


def test_a_missing_picture_of_a_real_card_is_refused(cards):
    card = cards["run"]
    with pytest.raises(UsageError, match=r"^the card links charts/loss\.png in line \d+, which is not published"):
        check_finished(card.text, card.files - {"charts/loss.png"})
