"""`preview`: rows as they are trained on → text and a page from which everything learned can be read back."""

import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from gpt2small_hf.commands.preview import main
from gpt2small_hf.config.data import PrepareArguments
from gpt2small_hf.data.chat.conversations import Conversation
from gpt2small_hf.data.chat.template_checks import set_template
from gpt2small_hf.data.chat_dataset import IGNORED, ChatDataset
from gpt2small_hf.data.corpus.prepare import prepare
from gpt2small_hf.data.preview.render import as_html, as_text, read_tokens, visible
from gpt2small_hf.data.text_dataset import TextDataset
from gpt2small_hf.data.tokenizer import load_tokenizer, train_tokenizer
from gpt2small_hf.errors import UsageError

ODD = "⟦⟧⟨⟩⏎│␛\n\r\t\x1b\x7f\x9b\u200b\u202e\u2028\ufffd 🙂中é\u0301<|im_end|>endoftext0x+"
contents = st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=40)
settings_of = st.fixed_dictionaries(
    {"loss_on": st.sampled_from(["assistant", "last", "all"]), "packing": st.sampled_from(["padding", "best_fit"])}
)


def tokenizer_of(*, add_special_tokens: bool = True, template: str = "chatml") -> PreTrainedTokenizerFast:
    """One so small that most characters outside ASCII are several tokens."""
    texts = ["user system assistant and the words that people say to each other. 🙂中🙂中"] * 4
    tokenizer = train_tokenizer(texts, 320)
    set_template(tokenizer, template, add_special_tokens=add_special_tokens)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of()


def chat(*said: str, where: str = "chats.jsonl, line 1") -> Conversation:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return Conversation([{"role": roles[n % 2], "content": text} for n, text in enumerate(said)], where)


def write_chats(path: Path, *chats: Conversation) -> str:
    path.write_text("".join(json.dumps({"messages": chat.messages}) + "\n" for chat in chats), encoding="utf-8")
    return str(path)


def body(text: str) -> str:
    """The lines of the rows, which alone are indented: no legend and no headings."""
    return "\n".join(line[2:] for line in text.split("\n") if line.startswith("  "))


def read_back(shown: str) -> bytes:
    """What is shown → the text it stands for. Ends of lines without a mark are of the layout."""

    def meant(match: re.Match[str]) -> bytes:
        words = match[0]
        if words.startswith("⏎"):
            return b"\n"
        if words == "␡":
            return b"\x7f"
        if words.startswith("⟨U+"):
            return chr(int(words[3:-1], 16)).encode()
        if words.startswith("⟨0x"):
            return bytes([int(words[3:-1], 16)])
        return words[1:-1].encode() if len(words) > 1 else bytes([ord(words) - 0x2400])

    parts = re.split(r"(⏎\n?|⟨[^⟩]*⟩|[\u2400-\u241f\u2421])", shown)
    return b"".join(
        part.replace("\n", "").encode() if n % 2 == 0 else meant(re.fullmatch(r"(?s:.+)", part))
        for n, part in enumerate(parts)
    )


def marked(text: str) -> str:
    return "".join(re.findall(r"⟦(.*?)⟧", body(text), re.DOTALL))


def decoded(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


class Page(HTMLParser):
    """What a page holds: its tags, the text inside of some, and that each is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data


# ---- nothing is lost, and nothing looks like something else --------------------------------------------------------


@pytest.mark.slow
@given(
    said=st.lists(contents, min_size=2, max_size=4), others=st.lists(contents, min_size=2, max_size=2), how=settings_of
)
@example(said=["🙂", "🙂中\u200d🙂"], others=["", ""], how={"loss_on": "all", "packing": "best_fit"})
def test_marked_tokens_are_the_supervised_tokens(
    tokenizer: PreTrainedTokenizerFast, said: list[str], others: list[str], how: dict[str, str]
):
    rows = ChatDataset([chat(*said), chat(*others)], tokenizer, seq_len=600, **how)
    numbers = range(len(rows))
    labels = np.concatenate([rows[n]["labels"] for n in numbers])
    learned = labels[labels != IGNORED]
    everything = decoded(tokenizer, np.concatenate([rows[n]["input_ids"] for n in numbers]))
    plain = as_text(rows, tokenizer, numbers)
    assert read_back(marked(plain)).decode() == decoded(tokenizer, learned)
    assert read_back(re.sub("[⟦⟧]", "", body(plain))).decode() == everything
    with_ids = as_text(rows, tokenizer, numbers, ids=True)
    assert read_back(marked(with_ids)).decode() == decoded(tokenizer, learned)
    assert "+".join(re.findall(r"([\d+]+)⟦", body(with_ids))).split("+") == [str(id) for id in learned]
    page = Page(as_html(rows, tokenizer, numbers))
    assert read_back("".join(text[1:-1] for text in page.texts["mark"][1:])).decode() == decoded(tokenizer, learned)


@given(contents, contents)
def test_visible_text_is_unique_and_has_no_control_characters(one: str, other: str):
    assert (visible(one) == visible(other)) == (one == other)
    assert read_back(visible(one)).decode() == one
    assert all(character.isprintable() for character in visible(one).replace("\n", ""))


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_special_token_that_was_typed_is_not_shown_as_one(add_special_tokens: bool):
    tokenizer = tokenizer_of(add_special_tokens=add_special_tokens)
    end = "<|im_end|>" if add_special_tokens else "<|endoftext|>"
    typed = f"{end} ⟨{end}⟩ \x1b[7m{end}\x1b[0m"
    rows = ChatDataset([chat(typed, typed)], tokenizer, seq_len=500)
    text = as_text(rows, tokenizer, [0])
    assert body(text).count(f"⟨{end}⟩") == 2  # of the user's turn and of the assistant's
    assert body(text).count(end) == 2 + 6
    colored = as_text(rows, tokenizer, [0], color=True)
    assert colored.count(f"m⟨{end}⟩\x1b[0m") == 2
    assert f"\x1b[7m⟨{end}⟩" in colored
    assert f"\x1b[32;7m⟨{end}⟩" in colored
    page = Page(as_html(rows, tokenizer, [0]))
    assert page.texts["b"][1:].count(f"⟨{end}⟩") == 2


def test_colour_adds_nothing_but_colour(tokenizer: PreTrainedTokenizerFast):
    rows = ChatDataset([chat("One\x1b[31m\nline", "Two\n\nlines"), chat("a", "b")], tokenizer, seq_len=300)
    for ids in (False, True):
        plain = as_text(rows, tokenizer, range(1), ids=ids)
        colored = as_text(rows, tokenizer, range(1), ids=ids, color=True)
        assert "\x1b" not in plain
        assert re.sub(r"\x1b\[[\d;]+m", "", colored) == plain
        for line in colored.split("\n"):  # a pager that forgets colours at the end of a line loses none
            assert line.count("\x1b[") == 2 * line.count("\x1b[0m")


def test_tokens_that_share_a_character_show_it_whole(tokenizer: PreTrainedTokenizerFast):
    ids = tokenizer("a😀é", add_special_tokens=False)["input_ids"]
    pieces = read_tokens(tokenizer, np.array(ids), np.ones(len(ids), bool))
    assert [piece.text for piece in pieces] == ["a", "😀", "é"]
    assert [id for piece in pieces for id in piece.ids] == ids
    assert len(pieces[1].ids) > 1
    # At the beginning of a text nothing predicts the first of them.
    (whole,) = read_tokens(tokenizer, np.array(pieces[1].ids), np.arange(len(pieces[1].ids)) > 0)
    assert whole.supervised


def test_character_that_is_cut_shows_its_bytes(tokenizer: PreTrainedTokenizerFast):
    ids = tokenizer("😀", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    (cut,) = read_tokens(tokenizer, np.array(ids[:2]), np.ones(2, bool))
    assert visible(cut.text) == "⟨0xF0⟩⟨0x9F⟩⟨0x98⟩"


def test_entries_of_sentencepiece_and_ids_without_one_can_be_read():
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "▁Hi": 3, "▁you": 4, "\n": 5}
    words |= {f"<0x{byte:02X}>": len(words) + n for n, byte in enumerate("é".encode())}
    backend = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken("naïve thing", special=False)])
    pieces = read_tokens(tokenizer, np.array([0, 3, 4, 6, 7, 5, 8, 1, 999]), np.ones(9, bool))
    assert [piece.text for piece in pieces] == [
        *("<s>", " Hi", " you", "é", "\n", "naïve thing", "</s>"),
        "no such token",
    ]
    assert [piece.special for piece in pieces] == [True, *[False] * 5, True, True]


# ---- what is said of rows ------------------------------------------------------------------------------------------


def test_headings_of_packed_rows_say_what_the_rows_hold(tokenizer: PreTrainedTokenizerFast):
    chats = [chat("why " * n, "so " * n, where=f"some.jsonl, line {n}") for n in range(1, 9)]
    rows = ChatDataset(chats, tokenizer, seq_len=150, packing="best_fit")
    assert any(len(row) > 1 for row in rows.rows)
    for number in range(len(rows)):
        row = rows[number]
        learned = row["labels"] != IGNORED
        starts = [*np.flatnonzero(row["position_ids"] == 0), len(learned)]
        _, _, _, heading, *lines = as_text(rows, tokenizer, [number]).splitlines()
        count = f"{len(starts) - 1} conversation{'s' if len(starts) > 2 else ''}"
        assert heading == (
            f"row {number} of {len(rows)}: {len(learned)} of 150 tokens, {learned.sum()} supervised "
            f"({learned.mean():.1%}), {count}" + (", padding not shown" if len(learned) < 150 else "")
        )
        rules = [line for line in lines if line.startswith("──")]
        for n, (rule, (start, end)) in enumerate(zip(rules, pairwise(starts), strict=True)):
            assert rule == (
                f"── conversation {n + 1} of {len(starts) - 1}: {rows.chats[rows.rows[number][n]].where}: "
                f"{end - start} tokens, {learned[start:end].sum()} supervised"
            )
            asked = decoded(tokenizer, row["input_ids"][start:end]).split("\n")
            assert lines[lines.index(rule) + 2] == f"  {asked[1].replace('<|im_end|>', '⟨<|im_end|>⟩')}⏎"


def test_turns_that_did_not_fit_are_counted(tokenizer: PreTrainedTokenizerFast):
    long = chat(*(f"{'Question' if n % 2 == 0 else 'Answer'} {n // 2}" for n in range(8)))
    rows = ChatDataset([long, chat("short", "one")], tokenizer, seq_len=64)
    kept = len(rows.chats[0].messages)
    assert 2 <= kept < 8
    long_text, short_text = (as_text(rows, tokenizer, [n]) for n in (0, 1))
    assert f", {8 - kept} turns did not fit, " in long_text
    assert f", without its first {8 - kept} turns\n" in long_text
    assert "Question 0" not in long_text
    assert "Answer 3" in marked(long_text)
    assert "turns" not in short_text


def test_with_loss_on_all_only_what_nothing_predicts_is_unmarked(tokenizer: PreTrainedTokenizerFast):
    rows = ChatDataset([chat("Hello", "you")], tokenizer, seq_len=64, loss_on="all")
    text = body(as_text(rows, tokenizer, [0]))
    first = decoded(tokenizer, rows[0]["input_ids"][:1])
    assert text.startswith(f"⟨{first}⟩⟦user⏎\n")
    assert text.count("⟦") == 1


TEXTS = ["🙂中 one\tand 🙂 two\n", "中é\u200b" * 9, "<|endoftext|> ⟦typed⟧\x1b[0m ", "four " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of a few documents, with a tokenizer that has no whole character outside ASCII."""
    place = tmp_path_factory.mktemp("preview")
    text = place / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} {TEXTS[n % 4]}"}) + "\n" for n in range(80)), encoding="utf-8")
    return prepare(PrepareArguments(text=[str(text)], vocab_size=257, validation_fraction=0.03), place / "set")


@pytest.fixture
def words(folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(folder / "tokenizer"))


@pytest.mark.parametrize("packing", ["stream", "isolate", "bos_bestfit"])
def test_rows_of_text_show_every_byte_wherever_they_are_cut(folder: Path, words: PreTrainedTokenizerFast, packing: str):
    rows = TextDataset(folder, "train", 23, packing=packing)
    shown = cut = ""
    for number in range(12):
        text = body(as_text(rows, words, [number]))
        ids = rows[number]["input_ids"]
        raw = words.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert read_back(re.sub("[⟦⟧]", "", text)).decode(errors="replace") == raw
        shown += text
        cut += raw
    assert "⟨0x" in shown
    assert "\ufffd" in cut
    assert "\ufffd" not in shown


def test_documents_begin_where_positions_do(folder: Path, words: PreTrainedTokenizerFast):
    rows = TextDataset(folder, "train", 150, packing="isolate")
    for number in range(5):
        row = rows[number]
        starts = [*np.flatnonzero(row["position_ids"] == 0), 150]
        text = as_text(rows, words, [number])
        assert f"150 of 150 tokens, 149 supervised (99.3%), {len(starts) - 1} document" in text
        lengths = re.findall(r"^── document (\d+) of (\d+): (\d+) tokens?$", text, re.MULTILINE)
        sizes = np.diff(starts).tolist()
        assert lengths == [(str(n), str(len(sizes)), str(size)) for n, size in enumerate(sizes, start=1)]
        # All but the row's first token is learned, each document between marks of its own.
        assert text.count("⟦") == len(sizes) + 1
        parts = text.split("\n── ")[1:]
        assert all(body(part).startswith("⟦⟨<|endoftext|>⟩") for part in parts[1:])
    assert max(rows[n]["position_ids"].max() for n in range(5)) < 149


def test_rows_of_a_stream_are_one_piece(folder: Path, words: PreTrainedTokenizerFast):
    rows = TextDataset(folder, "train", 100)
    ends = int((rows[0]["input_ids"] == rows.eos_id).sum())
    text = as_text(rows, words, [0])
    assert f"row 0 of {len(rows)}: 100 of 100 tokens, 99 supervised (99.0%), {ends} end-of-text token" in text
    assert "──" not in text
    assert body(text).count("⟨<|endoftext|>⟩") == ends


# ---- the page ------------------------------------------------------------------------------------------------------


def test_page_needs_nothing_and_runs_nothing():
    tokenizer = tokenizer_of(template="llama2")  # whose special tokens look like tags
    typed = "<script>alert(1)</script><img src=x onerror=y>&lt;</mark>\"'"
    rows = ChatDataset([chat(typed, typed, where="a<b>.jsonl, line 1")], tokenizer, seq_len=500)
    source = as_html(rows, tokenizer, [0], ids=True, title=typed, facts=[("data", typed)])
    without_tags = re.sub(r"</?[a-z]\w*( [^<>]*)?>|<!doctype html>", "", source)
    assert "<" not in without_tags
    assert ">" not in without_tags
    page = Page(source)
    assert {tag for tag, _ in page.tags} <= set(
        re.findall(r"\w+", "html head meta title style body h1 dl dt dd p section h2 h3 div mark b span sub")
    )
    assert {name for _, attributes in page.tags for name in attributes} <= {
        *("lang", "charset", "http-equiv", "content", "name", "class", "title")
    }
    assert not re.search(r"url\(|@import|https?:", page.texts["style"][0])
    assert "prefers-color-scheme: dark" in page.texts["style"][0]
    assert page.texts["title"] == page.texts["h1"] == page.texts["dd"] == [typed]
    assert page.texts["h3"][0].startswith("conversation 1 of 1: a<b>.jsonl, line 1: ")
    ids = rows[0]["input_ids"].tolist()
    titles = [attributes["title"] for _, attributes in page.tags if "title" in attributes]
    assert [int(id) for title in titles for id in str(title).split("+")] == ids
    assert page.texts["sub"] == titles
    assert not Page(as_html(rows, tokenizer, [0])).texts.get("sub")


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path) -> str:
    long = chat(*(f"{'Question' if n % 2 == 0 else 'Answer'} number {n // 2}" for n in range(12)))
    return write_chats(tmp_path / "chats.jsonl", chat("Hello there", "Hi"), long, chat("Nobody answers"))


@pytest.fixture
def preview(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object) -> str:
        main([str(word) for word in words])
        return capsys.readouterr().out

    return run


def facts(shown: str) -> dict[str, str]:
    """What stands above the rows, by name."""
    above = shown.split("⟦supervised tokens⟧")[0]
    return {line[:11].strip(): line[11:] for line in above.splitlines()}


def test_chats_are_shown_with_what_was_recognised(preview: Callable[..., str], chats: str):
    shown = preview(chats, "--max_length", "120", "-n", "1", "--first_row", "1")
    said = facts(shown)
    assert said["data"] == f"{chats}: 3 conversations, messages (role, content)"
    removed = int(re.search(r", 1 too long, kept without their first turns \((\d+) in all\)", said["of these"])[1])
    assert said["of these"].startswith("3 conversations, ")
    assert said["of these"].endswith("1 without a token to learn, left out")
    assert said["template"] == "chatml; an answer ends with <|endoftext|>"
    assert "trained on these chats" in said["tokenizer"]
    assert "--tokenizer" in said["tokenizer"]
    (heading,) = re.findall(r"^row .*", shown, re.MULTILINE)
    assert heading.startswith("row 1 of 2: ")
    assert f", {removed} turns did not fit" in heading
    assert f"── conversation 1 of 1: {chats}, line 2: " in shown
    n_tokens, n_learned, share = re.search(r": (\d+) tokens, (\d+) supervised \((.+)%\)", said["rows"]).groups()
    everything = preview(chats, "--max_length", "120")
    rows = re.findall(r"^row \d+ of 2: (\d+) of 1,024 tokens, (\d+) supervised", everything, re.MULTILINE)
    assert [int(n_tokens), int(n_learned)] == np.sum(np.array(rows, int), axis=0).tolist()
    assert share == f"{100 * int(n_learned) / int(n_tokens):.1f}"


def test_conversations_that_do_not_fit_are_counted_with_the_flag_that_keeps_them(
    preview: Callable[..., str], chats: str, tmp_path: Path
):
    tokenizer = tokenizer_of()
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(tmp_path / "words")
    lost = facts(preview(chats, "--tokenizer", tmp_path / "words"))["too long"]
    assert re.match(r"[12] of 3 conversations have more than 64 tokens \(the context of .*words\): ", lost)
    assert "--max_position_embeddings" in lost
    kept = preview(chats, "--tokenizer", tmp_path / "words", *re.search(r"--seq_len \d+", lost)[0].split())
    assert "too long" not in facts(kept)
    lost = facts(preview(chats, "--tokenizer", tmp_path / "words", "--max_length", "60"))["too long"]
    flags = re.search(r"keep all: (.*)", lost)[1].split()
    assert "too long" not in facts(preview(chats, "--tokenizer", tmp_path / "words", *flags))


def test_rows_shorter_than_the_context_of_the_base_are_called_the_default(
    preview: Callable[..., str], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    model = tmp_path / "run" / "model"
    tiny_config(max_position_embeddings=2048).save_pretrained(model)
    longer = tokenizer_of()
    longer.model_max_length = 2048
    longer.save_pretrained(model)
    path = write_chats(tmp_path / "chats.jsonl", chat("why " * 270, "so " * 270), chat("Hello", "you"))
    shown = preview(path, "--tokenizer", model.parent)
    lost = facts(shown)["too long"]
    assert "1 of 2 conversations have more than 1,024 tokens (the default of --seq_len): " in lost
    assert "--max_position_embeddings 2048 and no shorter" in lost  # what the base has: less is refused
    assert " --max_position_embeddings 2048 --seq_len 1024" in shown.splitlines()[-1]
    longest = re.search(r"keep all: --seq_len (\d+)", lost)[1]
    assert f" --seq_len {longest}" in preview(path, "--tokenizer", model.parent, "--seq_len", longest).splitlines()[-1]


def test_next_command_repeats_the_previewed_settings(preview: Callable[..., str], chats: str):
    flags = ["--loss_on", "last", "--template", "llama2", "--add_special_tokens", "--seq_len", "200"]
    shown = preview(chats, f"{chats}[:1]", *flags, "--packing", "best_fit")
    assert "new tokens " in shown
    assert "⟨[INST]⟩" in shown
    next_line = shown.splitlines()[-1]
    assert shlex.split(next_line.removeprefix("next: ")) == [
        *("gpt2small", "train", "examples/chat.yaml", "--chat_data", chats, f"{chats}[:1]", "--template", "llama2"),
        *("--add_special_tokens", "true", "--loss_on", "last"),
        *("--max_position_embeddings", "200", "--packing", "best_fit"),
    ]
    assert preview(chats).splitlines()[-1].endswith(" --template chatml --add_special_tokens false")


def test_tokenizer_of_a_run_and_its_own_template(
    preview: Callable[..., str], chats: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    model = tmp_path / "run" / "model"
    tokenizer.save_pretrained(model)
    shown = preview(chats, "--tokenizer", model.parent)
    assert facts(shown)["tokenizer"] == f"{model.parent}, {len(tokenizer):,} entries"
    assert facts(shown)["template"] == "the tokenizer's own; an answer ends with <|im_end|>"
    assert "⟨<|im_start|>⟩user⏎" in shown
    assert "--init_from" not in shown
    tiny_config().save_pretrained(model)
    assert f" --init_from {model} --add_special_tokens false" in preview(chats, "--tokenizer", model.parent)
    as_prepared = tmp_path / "set"
    (as_prepared / "tokenizer").mkdir(parents=True)
    tokenizer.save_pretrained(as_prepared / "tokenizer")
    assert "⟨<|im_start|>⟩user⏎" in preview(chats, "--tokenizer", as_prepared)


def test_template_given_as_jinja_is_not_written_out(preview: Callable[..., str], chats: str):
    jinja = (
        "{% for m in messages %}{{ '\n' + m.role }}: {% generation %}{{ m.content + eos_token }}"
        "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}{{ '\nassistant' }}: {% endif %}"
    )
    with pytest.raises(UsageError, match="generation"):  # the user's turns are marked too
        preview(chats, "--template", jinja)
    good = jinja.replace(
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    assert facts(preview(chats, "--template", good))["template"].startswith("as given; ")


def test_page_is_written_and_replaced(preview: Callable[..., str], chats: str, tmp_path: Path):
    page = tmp_path / "new" / "page.html"
    shown = preview(chats, "--html", page, "--ids")
    assert shown.splitlines()[-2] == f"wrote {page}"
    read = Page(page.read_text(encoding="utf-8"))
    assert read.texts["title"] == [f"Supervised tokens of {chats}"]
    assert dict(zip(read.texts["dt"], read.texts["dd"], strict=True)) == facts(shown)
    assert read.texts["h2"] == re.findall(r"^row .*", shown, re.MULTILINE)
    preview(chats, "--html", page, "-n", "1")
    assert len(Page(page.read_text(encoding="utf-8")).texts["h2"]) == 1
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_folder_of_chats_is_shown_whole_or_by_split(preview: Callable[..., str], tmp_path: Path):
    write_chats(tmp_path / "train.jsonl", chat("learn", "this"))
    write_chats(tmp_path / "validation.jsonl", chat("measure", "that"), chat("and", "this"))
    assert facts(preview(tmp_path))["of these"] == "3 conversations"
    held_out = preview(tmp_path, "--split", "validation")
    assert facts(held_out)["of these"] == "2 conversations"
    assert "learn⟨" not in held_out
    with pytest.raises(UsageError, match=r"no file in .*train.jsonl is named validation. Leave --split out"):
        preview(tmp_path / "train.jsonl", "--split", "validation")


def test_rows_that_cannot_be_read_are_counted(preview: Callable[..., str], chats: str):
    with Path(chats).open("a", encoding="utf-8") as file:
        file.write('{"messages": []}\n{"text": "no chat"}\n')
    with pytest.raises(UsageError, match="line 4 has no turns"):
        preview(chats)
    # The name may follow the flag, as after any switch.
    for words in (["--skip_bad_rows", chats], ["--skip-bad-rows", "true", chats], [chats, "--skip_bad_rows"]):
        assert facts(preview(*words))["data"].endswith(
            "3 conversations, messages (role, content), 2 rows left out that could not be read"
        )


def test_chats_without_answers_can_be_previewed_with_loss_on_all(preview: Callable[..., str], tmp_path: Path):
    path = write_chats(tmp_path / "asked.jsonl", chat("Is anybody there?"))
    with pytest.raises(UsageError, match=r"asked.jsonl has no assistant turns.*--loss_on all"):
        preview(path)
    assert "Is anybody there?" in marked(preview(path, "--loss_on", "all"))


def test_prepared_folder_is_shown_by_its_own_tokenizer(preview: Callable[..., str], folder: Path):
    shown = preview(folder, "--seq_len", "64", "--packing", "isolate", "-n", "2")
    rows = TextDataset(folder, "train", 64, packing="isolate")
    assert facts(shown)["data"] == f"{folder}, train: {rows.n_tokens:,} tokens in 78 documents"
    assert facts(shown)["rows"].startswith(f"{len(rows)} of 64 tokens (isolate), {rows.cropped_share:.1%} of the")
    assert facts(shown)["tokenizer"] == "trained here, 257 entries"
    assert len(re.findall(r"^row ", shown, re.MULTILINE)) == 2
    assert shown.endswith(f"next: gpt2small train --data_dir {folder} --seq_len 64 --packing isolate\n")
    held_out = preview(folder, "--split", "validation")
    n_tokens = TextDataset(folder, "validation", 1).n_tokens
    assert n_tokens < 256
    assert f"row 0 of 1: {n_tokens} of {n_tokens} tokens" in held_out


def test_tails_that_are_held_out_are_not_shown_as_documents(preview: Callable[..., str], tmp_path: Path):
    (tmp_path / "one.txt").write_text("A line of text.\n" * 40)
    one = prepare(PrepareArguments(text=[str(tmp_path / "one.txt")], vocab_size=257), tmp_path / "one")
    assert facts(preview(one))["data"].endswith(" tokens in 1 document without the end")
    assert facts(preview(one, "--split", "validation"))["data"].endswith(" tokens in the end of 1 document")


def test_terminal_that_lacks_characters_gets_their_numbers(chats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    main([chats, "-n", "1"])
    narrow.flush()
    assert b"\\u27e6Hi\\u27e8<|endoftext|>\\u27e9\\u27e7" in narrow.buffer.getvalue()  # pyright: ignore


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--n_rows 0", "--n_rows is 0. Give 1 or more."),
        ("-n -1", "--n_rows is -1"),
        ("--first_row -1", "--first_row is -1. Give 0 or more."),
        ("--first_row 2", "--first_row is 2, but the last row is number 1."),
        ("--seq_len 1", "--seq_len is 1. Give 2 or more."),
        ("--packing isolate", "--packing isolate applies to text. For chats choose best_fit or padding."),
        ("--packing best", "--packing"),
        ("--max_length 65 --seq_len 64", "--max_length is 65, but a row has 64 tokens. Raise --seq_len."),
        ("--max_length 1", "--max_length is 1. Give 2 or more."),
        ("--max_length 4", "conversations can be used"),
        ("--template none", "--template none is neither a name"),
        ("--tokenizer nowhere/at_all", "--tokenizer nowhere/at_all does not exist in"),
        ("--html page", "--html page is not the name of a page. Name a file that ends with .html."),
        ("--html .", "--html . is not the name of a page"),
        ("--tempate chatml", "--tempate is not a flag. Did you mean --template?"),
        ("--chat_data more.jsonl", "--chat_data is not a flag"),
    ],
)
def test_mistake_is_one_line(preview: Callable[..., str], chats: str, flags: str, message: str):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        preview(chats, *flags.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--template chatml", "--template does not apply to"),
        ("--tokenizer gpt2", "it contains its tokenizer. Leave it out."),
        ("--packing padding", "--packing padding applies to chats. For text choose one of stream"),
        ("--split validation --packing isolate", "held-out rows always use stream. Leave it out."),
        ("--seq_len 1000000", "Lower --seq_len"),
        ("more.jsonl", "is prepared text, which is previewed separately"),
    ],
)
def test_mistake_with_prepared_text_is_one_line(preview: Callable[..., str], folder: Path, flags: str, message: str):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        preview(folder, *flags.split())
    assert "\n" not in str(error.value)


def test_page_replaces_no_folder_and_no_data(preview: Callable[..., str], chats: str, tmp_path: Path):
    folder = tmp_path / "folder.html"
    folder.mkdir()
    (folder / "kept").touch()
    before = Path(chats).read_bytes()
    for path in (folder, chats):
        with pytest.raises(UsageError, match="is not the name of a page"):
            preview(chats, "--html", path)
    assert (folder / "kept").exists()
    assert Path(chats).read_bytes() == before


def test_unfinished_set_is_refused(preview: Callable[..., str], tmp_path: Path):
    (tmp_path / "set.partial").mkdir()
    with pytest.raises(UsageError, match=r"set is not finished"):
        preview(tmp_path / "set")
    with pytest.raises(UsageError, match=r"absent\.jsonl does not exist"):
        preview(tmp_path / "absent.jsonl")


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: gpt2small preview DATA … [--flag value …]\n")
    for flag in ("--template", "--loss_on", "--overlong", "--tokenizer", "--n_rows", "--ids", "--html"):
        assert f"\n  {flag} " in shown or f"\n  {flag}\n" in shown
    assert "--chat_data TEXT" not in shown
