"""The small model: pages as they should be, and that every byte counts."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.geometry.page_layout import Group, PlacementKind, layer_major, page_major
from pdkv.ids import LocalPages
from pdkv.kvcache.memory import allocate
from pdkv.kvcache.page_table import PageTable
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import Sampling
from tests.simulation.model import FORMAT, PAGE, VOCAB, SimulatedEngine, Truth, page_bytes, rows, written_bytes

PAGES = LocalPages.checked([3, 1, 7, 2], 20)
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 21).astype(np.uint32)


def made_pool(placement: PlacementKind = "page_major") -> SlotPool:
    place = {"page_major": page_major, "layer_major": layer_major}[placement](FORMAT, 20)
    memory = allocate(place.buffer_bytes, kind="torch")
    for buffer in memory.buffers:
        buffer.fill_(0x5A)
    return SlotPool(FORMAT, place, memory, PageTable(20))


def answered(pool: SlotPool, *chunks: int) -> list[int]:
    engine, at = SimulatedEngine(pool), 0
    for stop in (*chunks, len(PROMPT)):
        logits = engine.forward(PROMPT[at:stop], at, PAGES)
        at = stop
    said: list[int] = []
    while len(said) < 6:
        said.append(int(logits.argmax()))
        logits = engine.forward(np.array(said[-1:], np.uint32), at, PAGES)
        at += 1
    return said


@pytest.mark.parametrize("placement", ["page_major", "layer_major"])
@pytest.mark.parametrize("chunks", [(), (8,), (8, 16), (3, 20)])
def test_an_engine_over_pages_says_what_is_true_in_whatever_chunks(
    placement: PlacementKind, chunks: tuple[int, ...]
) -> None:
    assert answered(made_pool(placement), *chunks) == Truth(PROMPT).answer(Sampling(max_tokens=6))


def test_a_stop_token_ends_the_truth() -> None:
    whole = Truth(PROMPT).answer(Sampling(max_tokens=6))
    assert Truth(PROMPT).answer(Sampling(max_tokens=6, stop_tokens=(whole[2],)))[-1] == whole[2]


@pytest.mark.parametrize("placement", ["page_major", "layer_major"])
def test_the_bytes_of_a_prompts_pages(placement: PlacementKind) -> None:
    pool = made_pool(placement)
    SimulatedEngine(pool).forward(PROMPT, 0, PAGES)
    used = PAGES.array[: -(-len(PROMPT) // PAGE)]
    have = np.array([np.concatenate([b for g in Group for b in pool.group_bytes(p, g)]) for p in used.tolist()])
    due, written = page_bytes(rows(PROMPT, 0, 0)), written_bytes(len(PROMPT))
    assert have.shape == due.shape == written.shape
    assert (have == due)[written].all()
    assert not (have == due)[~written].any()
    pool.zero_tail(int(used[-1]), len(PROMPT) % PAGE)
    last = np.concatenate([b for g in Group for b in pool.group_bytes(int(used[-1]), g)])
    assert (last == due[-1]).all()


def test_a_wrong_bit_anywhere_changes_the_answer() -> None:
    right = answered(made_pool())
    for group in Group:
        for page in PAGES.array[:2].tolist():
            for segment in range(len(FORMAT.group_segments(group))):
                pool = made_pool()
                engine = SimulatedEngine(pool)
                engine.forward(PROMPT[:16], 0, PAGES)
                pool.group_bytes(page, group)[segment][5] ^= 1
                assert int(engine.forward(PROMPT[16:], 16, PAGES).argmax()) != right[0]


def test_pages_that_changed_places_change_the_answer() -> None:
    pool = made_pool()
    engine = SimulatedEngine(pool)
    engine.forward(PROMPT[:16], 0, PAGES)
    swapped = LocalPages.checked([1, 3, 7, 2], 20)
    assert int(engine.forward(PROMPT[16:], 16, swapped).argmax()) != answered(made_pool())[0]


def test_prompts_with_one_beginning_share_its_bytes_and_no_others_do() -> None:
    other = PROMPT.copy()
    other[9] += 1
    mine, theirs = page_bytes(rows(PROMPT, 0, 0)), page_bytes(rows(other, 0, 0))
    assert (mine[0] == theirs[0]).all()
    assert (mine[1] != theirs[1]).any()
    assert (mine[2] != theirs[2]).any()


def test_verifying_drafts_gives_what_steps_of_one_token_give() -> None:
    pool = made_pool()
    engine = SimulatedEngine(pool)
    engine.forward(PROMPT[:18], 0, PAGES)
    together = engine.verify(PROMPT[18:], 18, PAGES).logits
    alone = [engine.forward(PROMPT[i : i + 1], i, PAGES) for i in range(18, 21)]
    assert np.array_equal(together, np.stack(alone))
