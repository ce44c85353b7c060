"""Rows of 656, 576 and 1,152 bytes: one path through the code for all, in which the format's name decides nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdkv.adapters.reference.model import LoadedModel
from pdkv.geometry.page_layout import PlacementKind, page_format
from pdkv.geometry.row_format import MAIN_ROWS
from pdkv.kvcache.pool import SlotPool
from tests.adapters.reference.runs import Run

ROWS = {"fp8_ds_mla": 656, "fp8": 576, "bf16": 1152}
LENGTH, PAGES = 150, 4


def words() -> np.ndarray:
    return np.random.default_rng(1).integers(97, 123, LENGTH).astype(np.uint32)


def make(model: LoadedModel, main_row: str, *, placement: PlacementKind, named: str, seed: int) -> Run:
    """A run over rows of a format that goes by another name."""
    fmt = page_format(model.shape, main_row=main_row)
    fmt = replace(fmt, main_row=replace(fmt.main_row, name=named))
    return Run(model, SlotPool.create(fmt, 8, placement=placement), page_seed=seed, pages=PAGES)


@pytest.fixture(autouse=True)
def other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROWS:
        monkeypatch.setitem(MAIN_ROWS, f"{name}, renamed", replace(MAIN_ROWS[name], name=f"{name}, renamed"))


@pytest.mark.parametrize("main_row", ROWS)
def test_a_prompt_goes_from_pool_to_pool_and_on(tiny: LoadedModel, main_row: str) -> None:
    """Prefilled here, copied byte by byte into another placement and another name, decoded in both: bit for bit."""
    here = make(tiny, main_row, placement="page_major", named=main_row, seed=0)
    there = make(tiny, main_row, placement="layer_major", named=f"{main_row}, renamed", seed=7)
    assert here.pool.main_view(0).shape[-1] == ROWS[main_row]
    first = here.prefill(words(), 128)
    here.copy_to(there, PAGES)
    tokens, logits = here.decode(first, LENGTH, 3)
    others, theirs = there.decode(first, LENGTH, 3)
    assert tokens == others
    assert [a.tobytes() for a in logits] == [b.tobytes() for b in theirs]


@pytest.mark.parametrize("main_row", ROWS)
def test_control_every_part_of_a_row_counts(tiny: LoadedModel, main_row: str) -> None:
    for part in MAIN_ROWS[main_row].parts:
        here, there = (make(tiny, main_row, placement="page_major", named=main_row, seed=seed) for seed in (0, 7))
        first = here.prefill(words(), 128)
        here.copy_to(there, PAGES)
        rows = there.pool.main_view(0)[int(there.pages.array[0])].numpy()
        rows[:, MAIN_ROWS[main_row].part_slice(part.name)] = 0
        assert here.decode(first, LENGTH, 1)[1][0].tobytes() != there.decode(first, LENGTH, 1)[1][0].tobytes(), part
