"""Tokenizers that `data/tokenizer.py` loads and trains."""

import shutil
from pathlib import Path

import pytest
from conftest import SHARED_DATA, needs_shared_data
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gpt2small_hf.data.corpus.encoder import Encoder
from gpt2small_hf.data.corpus.sources import open_python_docs
from gpt2small_hf.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from gpt2small_hf.errors import UsageError


def python_docs() -> list[str]:
    return ["".join(map(str, document.blocks)) for document in open_python_docs().documents()]


def test_trained_tokenizer_is_byte_level_and_of_the_size_asked_for():
    tokenizer = train_tokenizer(python_docs(), 1024)
    assert len(tokenizer) == 1024
    text = "it's  naïve\r\n\t中文 🙂 \x00 <|endoftext|> don 't , ."
    assert tokenizer.decode(Encoder(tokenizer).encode([text])[0].tolist()) == text
    assert Encoder(tokenizer).fast is not None


@pytest.mark.slow
def test_training_twice_gives_the_same_tokenizer():
    one, two = (train_tokenizer(python_docs(), 700).backend_tokenizer.to_str() for _ in range(2))
    assert one == two


def test_saved_tokenizer_loads_without_our_code_and_is_the_same(tmp_path: Path):
    tokenizer = train_tokenizer(["a small text of few words"] * 3, 270)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded.eos_token == loaded.bos_token == loaded.pad_token == END_OF_TEXT
    assert loaded("a small", return_tensors=None)["input_ids"] == Encoder(loaded).encode(["a small"])[0].tolist()
    assert loaded.decode(loaded("so , it is .")["input_ids"]) == "so , it is ."


def test_folder_of_vocab_and_merges_alone_loads_and_is_saved_whole(tmp_path: Path):
    bare, saved = tmp_path / "bare", tmp_path / "saved"
    bare.mkdir()
    trained = train_tokenizer(python_docs()[:3], 400)
    trained.backend_tokenizer.model.save(str(bare))
    tokenizer = load_tokenizer(str(bare))
    tokenizer.save_pretrained(saved)
    again = load_tokenizer(str(saved))
    assert again.pad_token == again.eos_token == again.bos_token == END_OF_TEXT
    text = "a few words, it's all"
    ids = Encoder(trained).encode([text])[0].tolist()
    assert Encoder(tokenizer).encode([text])[0].tolist() == Encoder(again).encode([text])[0].tolist() == ids
    assert AutoTokenizer.from_pretrained(saved)(text)["input_ids"] == ids


def test_unknown_tokenizer_raises_a_one_line_error(tmp_path: Path):
    with pytest.raises(UsageError, match=r"^no tokenizer nobody/nothing: [^\n]*leave --tokenizer out to train one"):
        load_tokenizer("nobody/nothing")
    with pytest.raises(UsageError, match=r"the folder holds none that can be loaded"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_without_end_of_text_is_refused(tmp_path: Path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"has no end-of-text token \(eos_token\)"):
        load_tokenizer(str(tmp_path))


@needs_shared_data
def test_gpt2s_own_vocabulary_takes_the_fast_engine(tmp_path: Path):
    shutil.copytree(SHARED_DATA / "tokenizer_gpt2", tmp_path / "gpt2")
    encoder = Encoder(load_tokenizer(str(tmp_path / "gpt2")))
    assert encoder.fast is not None
    assert encoder.vocab_size == 50_257
    assert encoder.eos_id == 50_256
