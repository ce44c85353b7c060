"""Many seeds, on several processes, and what they came to.

Guarantees: a seed that fails is named with the command that replays it, and a process that dies ends the whole; what is
counted is the same however the seeds are spread.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

from pdkv.node.stages import Stage
from tests.simulation.faults import KINDS
from tests.simulation.mutations import HARMLESS, MUTATIONS
from tests.simulation.run import Result, Run

BATCH = 100
"""Seeds that a process takes at a time."""
GARBAGE = 2
"""Seeds between two looks for it: with more, memory is always new, and never in a core's cache."""


@dataclass(slots=True)
class Sum:
    """What runs came to, together."""

    seeds: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    """Seed to the law that was broken."""
    ends: Counter[str] = field(default_factory=Counter)
    """How requests ended, and how many."""
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Fault and stage, and how often it was injected there."""
    virtual_s: float = 0.0

    def add(self, result: Result) -> None:
        self.seeds += 1
        if result.broken:
            self.failed[result.seed] = result.broken
        self.ends.update(result.ends)
        self.hits.update(result.hits)
        self.virtual_s += result.virtual_s

    def join(self, other: Sum) -> None:
        self.seeds += other.seeds
        self.failed |= other.failed
        self.ends.update(other.ends)
        self.hits.update(other.hits)
        self.virtual_s += other.virtual_s

    def least(self) -> int:
        """Hits of the pair of fault and stage that was hit least."""
        return min(self.hits[kind, stage.value] for kind in KINDS for stage in Stage)


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines, no warnings of coroutines that a dead process left behind, garbage looked for between seeds."""
    hook, level = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda *_: None
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            # asyncio's register of all tasks is for `asyncio.all_tasks`, and costs as much as making them
            with patch.object(asyncio.tasks._all_tasks, "add", lambda task: None):  # type: ignore[attr-defined]
                yield
        finally:
            gc.enable()
            gc.unfreeze()
            gc.collect()
            logging.disable(level)
            sys.unraisablehook = hook


def one(seed: int, *, mutation: str = "", keep_log: bool = False) -> Result:
    """A single run."""
    with mutated(mutation), quiet():
        return Run(seed, keep_log=keep_log).go()


def several(seeds: Sequence[int], *, mutation: str = "", stop_at: str = "") -> Sum:
    """Runs in this process, up to the first that breaks a law which the pattern `stop_at` finds, if it is given."""
    total = Sum()
    with mutated(mutation), quiet():
        for seed in seeds:
            result = Run(seed).go()
            total.add(result)
            if total.seeds % GARBAGE == 0:
                gc.collect()
            if stop_at and re.search(stop_at, result.broken):
                break
    return total


def many(seeds: Sequence[int], jobs: int, *, mutation: str = "", told: Callable[[Sum, float], None]) -> Sum:
    """Runs on `jobs` processes; `told` hears of the sum so far, and the seconds."""
    began, total = time.monotonic(), Sum()
    batches = [(seeds[at : at + BATCH], mutation) for at in range(0, len(seeds), BATCH)]
    # forked: this process has no thread yet, and a spawned one would import torch for seconds
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for part in pool.imap_unordered(_batch, batches):
            total.join(part)
            told(total, time.monotonic() - began)
            if mutation and total.failed:
                break
    return total


def mutated(name: str):  # type: ignore[no-untyped-def]
    """The build that is run: the product's, unless a mutation is named."""
    return (MUTATIONS | HARMLESS)[name]() if name else nullcontext()


def _batch(work: tuple[Sequence[int], str]) -> Sum:
    seeds, mutation = work
    return several(seeds, mutation=mutation, stop_at="." if mutation else "")
