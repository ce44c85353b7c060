"""Text to tokens and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pdkv.errors import ConfigError, FieldRefused
from pdkv.http.tokenizer import ByteTokenizer, Tokenizer, tokenizer_named

TEXT = "Once upon a page there was a str\u00f6m of pages, na\u00efve \U0001f40d and all. "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a byte-level BPE of this very text."""
    folder = tmp_path_factory.mktemp("checkpoint")
    made = Trained(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT * 4], trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}), "utf-8")
    return folder


def spoken(tokenizer: Tokenizer, tokens: list[int]) -> str:
    decoder = tokenizer.decoder()
    return "".join([*(decoder.push(token) for token in tokens), decoder.flush()])


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = tokenizer_named("bytes")
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert spoken(tokenizer, tokens.tolist()) == text


@given(st.binary())
def test_any_bytes_are_said_as_they_would_be_at_once(raw: bytes) -> None:
    assert spoken(ByteTokenizer(), list(raw)) == raw.decode("utf-8", "replace")


def test_half_a_character_is_replaced() -> None:
    assert ByteTokenizer().encode("\ud800").tolist() == [ord("?")]
    assert spoken(ByteTokenizer(), [0xC3, 300, 65]) == "\ufffd\ufffdA"


def test_a_checkpoints_own(checkpoint: Path) -> None:
    tokenizer = tokenizer_named(str(checkpoint))
    tokens = tokenizer.encode(TEXT).tolist()
    assert len(tokens) < len(TEXT.encode())
    assert spoken(tokenizer, tokens) == TEXT
    assert spoken(tokenizer, [*tokens, 0]) == TEXT  # a special token is not said
    assert tokenizer.stop_tokens == (0,)


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few pieces, and bytes for all that they don't have, as SentencePiece's have them."""
    folder = tmp_path_factory.mktemp("by-bytes")
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "\u00e9"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Trained(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.save(str(folder / "tokenizer.json"))
    return folder


@given(tokens=st.lists(st.integers(0, 300), max_size=60))
def test_any_tokens_can_be_said_and_few_are_held_back(checkpoint: Path, by_bytes: Path, tokens: list[int]) -> None:
    """tokenizers' own stream raises for bytes that are no character, if another token comes after them."""
    for folder in (checkpoint, by_bytes):
        decoder: Any = tokenizer_named(str(folder)).decoder()
        for token in tokens:
            decoder.push(token)
            assert len(decoder._held) < 8


@given(text=st.text(st.characters(exclude_characters="\u2581\ufffd", exclude_categories=["Cs"])))
def test_text_is_said_whole_however_it_is_cut(checkpoint: Path, by_bytes: Path, text: str) -> None:
    for folder in (checkpoint, by_bytes):
        tokenizer = tokenizer_named(str(folder))
        assert spoken(tokenizer, tokenizer.encode(text).tolist()) == text


def test_bytes_that_are_no_character_come_before_one(by_bytes: Path) -> None:
    tokens = [1 + 0xFF, 1 + ord("x"), 1 + 0xC3, 260, 258]
    assert spoken(tokenizer_named(str(by_bytes)), tokens).endswith("\u00e9a")


def test_generation_config_comes_first(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}', "utf-8")
    assert tokenizer_named(str(tmp_path)).stop_tokens == (5, 7)


def test_files_that_are_none_are_named(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"bytes, or a directory with tokenizer\.json"):
        tokenizer_named(str(tmp_path / "none"))
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match="a tokenizer's file"):
        tokenizer_named(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text("[]", "utf-8")
    with pytest.raises(ConfigError, match="a JSON object"):
        tokenizer_named(str(tmp_path))


def test_without_one_text_is_refused_and_none_is_said() -> None:
    none = tokenizer_named("")
    with pytest.raises(FieldRefused, match="prompt: 'hello' can't be used; allowed: a list of token ids"):
        none.encode("hello")
    assert (spoken(none, [1, 2]), none.speaks) == ("", False)
