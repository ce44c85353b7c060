"""Everything that two nodes in this process do to the bytes of their pages, written down, and done again in order.

Guarantees: a page is followed from the reservation that got it, under a number that no other ever has, so the record
doesn't know of ids that are given twice, of trees or of evictions; it is done again by the engine and plain copies
alone. If every step then has the logits that it had, nothing else ever changed a byte that a step read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel
from pdkv.geometry.page_layout import page_format
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.base import NodeParts
from pdkv.node.sampling import logits_digest
from tests.node.toy import PAGE, Pair

Span = tuple[int, int]
NOT_WRITTEN = -1


@dataclass(frozen=True, slots=True)
class Step:
    """The engine computed `tokens` from `start` on, in these pages of the record."""

    decodes: bool
    tokens: UInt32Array
    start: int
    pages: np.ndarray
    logits_digest: int

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Copy:
    """Pages were read from a peer, or came back from host memory, where they were copies of `source`."""

    source: np.ndarray
    target: np.ndarray


@dataclass
class Record:
    """Of both nodes of a pair; pages have one count of numbers."""

    events: list[Step | Copy] = field(default_factory=list)
    pages: int = 1

    def watch(self, pair: Pair) -> None:
        """From now on, with pools in which nothing is cached."""
        prefill, decode = (self._followed(node.parts, decodes=node is pair.decode) for node in pair.nodes)
        transfer, store = pair.decode.parts.transfer, pair.decode.preemption.store
        read, save, load = transfer.read, store.save, store.load
        saved: dict[Any, np.ndarray] = {}

        def reading(order: Any) -> Any:
            self.events.append(Copy(prefill[order.remote.array], decode[order.local.array]))
            return read(order)

        def saving(pages: LocalPages, tokens: int) -> Any:
            copy = save(pages, tokens)
            saved[copy] = decode[pages.array]
            return copy

        def loading(copy: Any, first: int, pages: LocalPages) -> None:
            load(copy, first, pages)
            self.events.append(Copy(saved[copy][first:], decode[pages.array]))

        transfer.read = reading  # type: ignore[method-assign]
        store.save, store.load = saving, loading  # type: ignore[method-assign]

    def _followed(self, parts: NodeParts, *, decodes: bool) -> np.ndarray:
        """int64 [pages of the pool]: the number of each page in the record."""
        engine: Any = parts.engine
        reserve, run = parts.manager.reserve, engine._run
        number = np.zeros(parts.pool.num_pages, np.int64)

        def reserving(*args: Any, **kwargs: Any) -> Any:
            made = reserve(*args, **kwargs)
            number[made.pages.array] = np.arange(self.pages, self.pages + len(made.pages))
            self.pages += len(made.pages)
            return made

        def running(tokens: UInt32Array, start: int, pages: LocalPages) -> Any:
            computed = run(tokens, start, pages)
            held = number[pages.array[: -(-(start + len(tokens)) // PAGE)]]
            self.events.append(Step(decodes, tokens.copy(), start, held, logits_digest(computed.logits[-1])))
            return computed

        parts.manager.reserve = reserving  # type: ignore[method-assign]
        engine._run = running
        return number


@dataclass
class History:
    """What was written into each page of a record: the token of each slot, and the step's span that wrote it."""

    tokens: np.ndarray
    spans: np.ndarray

    @classmethod
    def of(cls, pages: int) -> History:
        return cls(np.full((pages, PAGE), NOT_WRITTEN), np.full((pages, PAGE, 2), NOT_WRITTEN))

    def copy(self, event: Copy) -> None:
        self.tokens[event.target] = self.tokens[event.source]
        self.spans[event.target] = self.spans[event.source]

    def write(self, step: Step) -> None:
        positions = np.arange(step.start, step.stop)
        at = step.pages[positions // PAGE], positions % PAGE
        self.tokens[at] = step.tokens
        self.spans[at] = step.start, step.stop

    def behind(self, step: Step) -> tuple[list[int], list[Span]]:
        """Tokens and spans of [0, stop), as the step read them."""
        tokens = self.tokens[step.pages].reshape(-1)[: step.stop]
        spans = self.spans[step.pages].reshape(-1, 2)[: step.stop]
        return tokens.tolist(), [(int(a), int(b)) for a, b in spans]


def done_again(
    record: Record, model: LoadedModel, changed: Callable[[SlotPool, Copy], None] = lambda pool, copy: None
) -> list[Step]:
    """The steps whose logits are others than they were. `changed` may damage pages after a copy."""
    pool = SlotPool.create(page_format(model.shape), record.pages + 1)
    engine = ReferenceEngine(model, pool)
    other: list[Step] = []
    for event in record.events:
        if isinstance(event, Copy):
            pool.copy_pages(_ids(event.source, pool), _ids(event.target, pool))
            changed(pool, event)
        elif logits_digest(engine.forward(event.tokens, event.start, _ids(event.pages, pool))) != event.logits_digest:
            other.append(event)
    return other


def _ids(pages: np.ndarray, pool: SlotPool) -> LocalPages:
    return LocalPages.checked(pages, pool.num_pages)
