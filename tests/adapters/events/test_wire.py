"""Bytes of a batch, as each consumer's own types read them, and what those that count fields insist on."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pdkv.adapters.events.wire import encode_batch
from pdkv.ids import LocalPages
from pdkv.kvcache.events import AllCleared, Event, PagesRemoved, PagesStored, PublicChain, PublicPages
from tests.adapters.events.consumers import LAYOUTS

TOKENS = np.arange(130, dtype=np.uint32)
READERS = [(encoding, name) for encoding, layouts in LAYOUTS.items() for name in layouts]


def stored(*, cache_salt: str = "", bigram: bool = False, first: int = 0) -> PagesStored:
    public = PublicChain(TOKENS, cache_salt=cache_salt, bigram=bigram)
    pages = LocalPages.checked(np.arange(first + 1, 3, dtype=np.int32), 3)
    event = PublicPages(3).stored(public, first, pages)
    assert event is not None
    return event


def plain(*events: Event, encoding: Any = "array") -> list[Any]:
    decoded: list[Any] = msgspec.msgpack.decode(encode_batch(events, encoding, 1.5))
    return decoded


@pytest.mark.parametrize(("encoding", "reader"), READERS)
def test_each_reader_gets_every_field(encoding: Any, reader: str) -> None:
    run, gone = stored(), PagesRemoved(np.array([-5, 7]))
    payload = encode_batch([AllCleared(), run, gone], encoding, 1.5)
    batch: Any = msgspec.msgpack.decode(payload, type=LAYOUTS[encoding][reader])
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    cleared, got, removed = batch.events
    assert [type(e).__name__ for e in batch.events] == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
    assert msgspec.to_builtins(cleared) in (["AllBlocksCleared"], {"type": "AllBlocksCleared"})
    assert got.block_hashes == run.ids.tolist()
    assert (got.parent_block_hash, got.token_ids, got.block_size) == (None, TOKENS[:128].tolist(), 64)
    assert (got.lora_id, got.medium) == (None, "GPU")
    assert (removed.block_hashes, removed.medium) == ([-5, 7], "GPU")


@pytest.mark.parametrize(("encoding", "reader"), READERS)
def test_a_reader_of_the_other_encoding_refuses(encoding: Any, reader: str) -> None:
    """Negative control: the types do check."""
    other: Any = "map" if encoding == "array" else "array"
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode_batch([stored()], other, 1.5), type=LAYOUTS[encoding][reader])


def test_a_continued_run_names_its_parent() -> None:
    whole, rest = stored(), stored(first=1)
    ((_, (event,), _),) = [plain(rest)]
    assert event[1:4] == [[whole.ids[1]], whole.ids[0], TOKENS[64:128].tolist()]


def test_fields_stand_where_those_who_count_them_expect_them() -> None:
    """llm-d's decoder refuses a struct of another length, Dynamo's a batch of other than three."""
    time, events, rank = plain(AllCleared(), stored(), PagesRemoved(np.array([1])))
    assert (time, rank) == (1.5, 0)
    assert [(event[0], len(event)) for event in events] == [
        ("AllBlocksCleared", 1),
        ("BlockStored", 8),
        ("BlockRemoved", 3),
    ]
    assert events[1][5:] == [None, "GPU", None]


def test_a_salt_comes_with_the_first_page_of_a_prompt() -> None:
    """vLLM's extra_keys, one entry a page; SGLang names it cache_salt, on each event."""
    _, (root, child), _ = plain(stored(cache_salt="s"), stored(cache_salt="s", first=1))
    assert root[8:] == [[["s"], None]]
    assert len(child) == 8
    _, (root, child), _ = plain(stored(cache_salt="s"), stored(cache_salt="s", first=1), encoding="map")
    assert (root["cache_salt"], root["extra_keys"]) == ("s", [["s"], None])
    assert child["cache_salt"] == "s"
    assert "extra_keys" not in child
    batch: Any = msgspec.msgpack.decode(
        encode_batch([stored(cache_salt="s")], "array", 1.5), type=LAYOUTS["array"]["vllm, positional"]
    )
    assert batch.events[0].extra_keys == [("s",), None]


@pytest.mark.parametrize(("encoding", "reader"), [("array", "sglang, positional"), ("map", "sglang, named")])
def test_bigram_tokens_are_pairs(encoding: Any, reader: str) -> None:
    payload = encode_batch([stored(bigram=True)], encoding, 1.5)
    batch: Any = msgspec.msgpack.decode(payload, type=LAYOUTS[encoding][reader])
    assert batch.events[0].token_ids == [(t, t + 1) for t in range(128)]
    assert batch.events[0].block_size == 64
