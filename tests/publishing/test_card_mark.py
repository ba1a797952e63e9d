"""The hash at the end of a card and the hash of the loaded files: edited cards and other models are recognised."""

import re
import shutil

import pytest
from conftest import REPOSITORY

from gpt2small_hf.errors import UsageError
from gpt2small_hf.publishing.card import add_mark, content_hash, is_marked, is_unedited
from gpt2small_hf.publishing.stage import check_stage_folder, read_record

OLD_STAGE = REPOSITORY / "tests" / "publishing" / "old_stage"
"""Card and record of a folder that was staged when the card had other headings (not `.md`, which ruff would format)."""
CARD = add_mark("---\nlicense: mit\n---\n\n# A model\n\nIts loss is **3.141**.\n\n- one\n- two\n")


def test_marked_card_is_unedited_with_either_line_ends():
    old = (OLD_STAGE / "card.txt").read_text(encoding="utf-8")
    for card in (CARD, old):
        assert is_unedited(card)
        assert is_unedited(card.replace("\n", "\r\n"))
        assert is_marked(card)


def test_card_edited_anywhere_is_recognised():
    for at in range(len(CARD) - 1):
        other = "y" if CARD[at] == "x" else "x"
        assert not is_unedited(CARD[:at] + other + CARD[at + 1 :]), at
        assert not is_unedited(CARD[:at] + "x" + CARD[at:]), at
        assert not is_unedited(CARD[:at] + CARD[at + 1 :]), at
    assert not is_unedited(CARD + "x")
    assert not is_unedited(CARD + "\nMore.\n")
    assert is_marked(CARD + "\nMore.\n")


def test_card_without_its_own_mark_is_not_unedited():
    mark = re.compile(r"\n<!-- made by gpt2small_hf, \w{16} -->\n$")
    body, (other,) = mark.sub("", CARD), mark.findall(add_mark("# Another\n"))
    assert len(body) < len(CARD)
    for card in (body, body + other, "", "# A model\n"):
        assert not is_unedited(card)


def test_folder_staged_by_an_earlier_version_is_replaced_unless_its_card_was_edited(tmp_path):
    folder = tmp_path / "staged"
    folder.mkdir()
    shutil.copyfile(OLD_STAGE / "card.txt", folder / "README.md")
    shutil.copyfile(OLD_STAGE / "staged.json", tmp_path / "staged.json")
    assert "README.md" in read_record(folder)["files"]
    check_stage_folder(folder)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8")
    card.write_text(text.replace("# short", "# My model"), encoding="utf-8")
    assert not is_unedited(card.read_text(encoding="utf-8"))
    with pytest.raises(UsageError, match=r"README\.md was edited"):
        check_stage_folder(folder)


FILES = {
    name: {"size": 1, "sha256": f"{number:064}"}
    for number, name in enumerate(
        ("model.safetensors", "config.json", "gpt.py", "tokenizer.json", "chat_template.jinja", "README.md")
    )
}


def test_content_hash_changes_with_each_loaded_file_and_with_no_other():
    before = content_hash(FILES)
    assert re.fullmatch("[0-9a-f]{8}", before)
    other = {"size": 1, "sha256": "f" * 64}
    for name in FILES.keys() - {"README.md"}:
        assert content_hash({**FILES, name: other}) != before
        assert content_hash({kept: file for kept, file in FILES.items() if kept != name}) != before
    assert content_hash({**FILES, "more.py": other}) != before
    for name in ("README.md", "LICENSE", "resolved.json", "evaluation/heldout.json", "charts/loss.png", "charts/x.png"):
        assert content_hash({**FILES, name: other}) == before
    assert content_hash(dict(reversed(FILES.items()))) == before
