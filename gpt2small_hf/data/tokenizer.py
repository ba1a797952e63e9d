"""A tokenizer: loaded from the Hub or a folder, or trained here. Saved so that `AutoTokenizer` loads it anywhere.

`encoding.py` makes the ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from gpt2small_hf.errors import UsageError

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(
    name: str,
    *,
    trust_remote_code: bool = False,
    fix: str = "Give a folder with tokenizer.json, or leave --tokenizer out to train one here.",
) -> PreTrainedTokenizerFast:
    """A fast tokenizer by Hub id or folder, with an end-of-text token, which also pads.

    A folder may hold GPT-2's `vocab.json` and `merges.txt` alone.

    Raises: UsageError, which ends with `fix`, if there is none that can be loaded.
    """
    folder = Path(name).expanduser()
    bare = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    described = (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()
    try:
        if bare and not described:
            tokenizer = GPT2Tokenizer.from_pretrained(folder)
        else:
            # Explicit, because the default prompts the user if the folder also contains model code.
            place = folder if folder.is_dir() else name
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
            if not tokenizer.vocab_size:  # without its files, a known type is built from nothing
                raise OSError("it has no vocabulary")
    except (OSError, ValueError, KeyError) as error:
        what = (
            "the folder holds none that can be loaded" if folder.is_dir() else "no such folder, and the Hub gave none"
        )
        raise UsageError(f"no tokenizer {name}: {what} ({(str(error).splitlines() or ['?'])[0]}). {fix}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"the tokenizer {name} has no fast version (tokenizer.json). Convert it, or choose another.")
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer {name} has no end-of-text token (eos_token), which ends every document. "
            "Set one in its tokenizer_config.json, or choose another."
        )
    for trace in ("is_local", "local_files_only"):  # how it was loaded must not be saved with it
        tokenizer.init_kwargs.pop(trace, None)
    if tokenizer.bos_token_id is None:
        tokenizer.bos_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's with `vocab_size` entries; fewer if the texts have no more pairs to join.

    `model_max_length` is unset: it depends on the model, and training sets it when it saves one.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
