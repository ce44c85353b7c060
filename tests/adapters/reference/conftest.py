"""One seeded model for all tests of the reference engine, and pools to run it in."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from pdkv.adapters.reference.model import LoadedModel, load_model
from pdkv.geometry.page_layout import PlacementKind, page_format
from pdkv.kvcache.pool import SlotPool
from tests.adapters.reference.runs import Run


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Threads of a small model wait for each other longer than they compute when other processes share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture
def run(tiny: LoadedModel) -> Callable[..., Run]:
    def make(*, placement: PlacementKind = "page_major", page_seed: int = 0, main_row: str = "fp8_ds_mla") -> Run:
        fmt = page_format(tiny.shape, main_row=main_row)
        return Run(tiny, SlotPool.create(fmt, 140, placement=placement), page_seed=page_seed)

    return make


@pytest.fixture(scope="session")
def prompt() -> Callable[[int], np.ndarray]:
    """A prompt of n bytes: pseudo-words in lower case, the same for the same n."""

    def make(length: int) -> np.ndarray:
        rng = np.random.default_rng(length)
        letters = rng.integers(ord("a"), ord("z") + 1, length)
        letters[rng.random(length) < 0.18] = ord(" ")
        return letters.astype(np.uint32)

    return make
