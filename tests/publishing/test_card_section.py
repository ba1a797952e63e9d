"""A section added to a copy of the card: only the template and one file of facts change."""

from changed_copy import load_changed, write_changed
from conftest import REPOSITORY

from gpt2small_hf.publishing import facts
from gpt2small_hf.publishing.card import check_finished, render
from gpt2small_hf.publishing.publication import Publication
from gpt2small_hf.publishing.source import find_source
from gpt2small_hf.publishing.stage import list_files, stage

TEMPLATE = {
    "## Citation\n": (
        "{% if training %}\n## Environmental impact\n\n"
        "Training took {{ '{:.3f}'.format(training.device_hours) }} device hours.\n\n{% endif %}\n## Citation\n"
    ),
}
FACTS = {
    '        "flops": None if tokens is None else flops * tokens,\n': (
        '        "flops": None if tokens is None else flops * tokens,\n'
        '        "device_hours": run.resolved.device.count * (training_seconds(rows) or 0) / 3600,\n'
    ),
}


def test_card_section_with_a_new_fact_is_added_in_two_files(tiny_run, tmp_path, monkeypatch):
    write_changed("model_card.j2", TEMPLATE, tmp_path / "model_card.j2")
    copy = load_changed("gpt2small_hf/publishing/training_facts.py", FACTS, tmp_path, monkeypatch)
    monkeypatch.setattr(facts, "training_facts", copy.training_facts)
    source, folder = find_source(tiny_run.root), tmp_path / "staged"
    stage(source, folder)
    card = render(source, folder, Publication("you/short"), tmp_path / "model_card.j2")
    check_finished(card, {*list_files(folder)})
    assert "## Environmental impact\n\nTraining took 0.000 device hours.\n\n## Citation\n" in card


def test_architecture_guide_names_the_files_of_a_new_card_section():
    (line,) = [
        line
        for line in (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n- ")
        if line.startswith("**A card section**")
    ]
    for name in ("model_card.j2", "publishing/training_facts.py"):
        assert f"`{name}`" in line
