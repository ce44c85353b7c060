"""What a sweep measures: one case a row.

Guarantees: a case says all that its pull depends on; a sweep names each case once; one that doesn't fit into the memory
that pools may take is left out and told of, never made smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import product
from typing import Any

from pdkv.geometry.page_layout import PlacementKind


class Mode(StrEnum):
    WARM = "warm"
    """The source has the prompt in its cache: all of it is announced at once. Memory and connection were used."""
    COLD = "cold"
    """The same over a new connection, into memory that was never touched."""
    STREAMING = "streaming"
    """The source seals and announces the prompt chunk by chunk, while earlier chunks are pulled."""


SERIES_PAGES = 32
"""Pulled in one repetition of a small case."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What nodes have to be built for."""

    source: PlacementKind
    sink: PlacementKind
    chunk_pages: int
    read_pages: int
    sources: int
    sinks: int
    cold: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    pages: int
    """Full pages of each prompt; a pull has one prompt a source."""
    mode: Mode = Mode.WARM
    scattered: bool = True
    """Page ids in random order, on both sides."""
    source: PlacementKind = "page_major"
    sink: PlacementKind = "page_major"
    digests: bool = True
    chunk_pages: int = 32
    """Pages that are announced together when streaming."""
    read_pages: int = 0
    """Most pages of one READ; 0: a node's default."""
    sources: int = 1
    """That each sink pulls from at once."""
    sinks: int = 1
    """That pull at once, the same prompts."""
    hit: float = 0.0
    """Part of the pages that the sink has already."""

    @property
    def hit_pages(self) -> int:
        return int(self.hit * self.pages)

    @property
    def series(self) -> int:
        """Prompts that a repetition pulls from a source: several one after another where one is soon done."""
        alone = self.mode is Mode.WARM and not self.hit and self.sources == self.sinks == 1
        return max(SERIES_PAGES // self.pages, 1) if alone else 1

    @property
    def setup(self) -> Setup:
        return Setup(
            self.source,
            self.sink,
            self.chunk_pages,
            self.read_pages,
            self.sources,
            self.sinks,
            self.mode is Mode.COLD,
        )

    @property
    def source_pages(self) -> int:
        """Of a source's pool: its prompts, a tail a sink, and the write sink."""
        return self.series * self.pages + self.sinks + 1

    @property
    def sink_pages(self) -> int:
        return self.series * self.sources * (self.pages + 1) + 1

    def __str__(self) -> str:
        """What is not as usual."""
        usual = Case(self.pages)
        words = [_counted(self.pages)]
        words += [self.mode.value] if self.mode is not usual.mode else []
        words += [f"chunks of {self.chunk_pages}"] if self.mode is Mode.STREAMING else []
        words += [] if self.scattered else ["contiguous"]
        if (self.source, self.sink) != (usual.source, usual.sink):
            words.append(f"{self.source} to {self.sink}" if self.source != self.sink else f"both {self.source}")
        words += [] if self.digests else ["no digests"]
        words += [f"READs of {_counted(self.read_pages)}"] if self.read_pages else []
        words += [f"{self.sources} to {self.sinks}"] if (self.sources, self.sinks) != (1, 1) else []
        words += [f"{self.hit:.0%} hit"] if self.hit else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of each dimension; the first of each is the base case's."""

    pages: tuple[int, ...]
    mode: tuple[Mode, ...] = (Mode.WARM,)
    scattered: tuple[bool, ...] = (True,)
    placement: tuple[tuple[PlacementKind, PlacementKind], ...] = (("page_major", "page_major"),)
    """Of source and sink."""
    digests: tuple[bool, ...] = (True,)
    chunk_pages: tuple[int, ...] = (32,)
    read_pages: tuple[int, ...] = (0,)
    sources: tuple[int, ...] = (1,)
    sinks: tuple[int, ...] = (1,)
    hit: tuple[float, ...] = (0.0,)

    def cases(self, *, every: bool = False) -> list[Case]:
        """The base case, and each other value by itself (a chunk's in a streaming pull); `every`: all values with all
        others."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        base = {name: options[0] for name, options in values.items()}
        if every:
            chosen = [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]
        else:
            chosen = [base]
            for name, options in values.items():
                streaming = {"mode": Mode.STREAMING} if name == "chunk_pages" else {}
                chosen += [{**base, **streaming, name: option} for option in options[1:]]
        # what is announced at once has no chunks
        chosen = [each if each["mode"] is Mode.STREAMING else {**each, **_of(base, "chunk_pages")} for each in chosen]
        return list(dict.fromkeys(_case(**each) for each in chosen))


QUICK = Sweep(
    pages=(192, 1, 16, 64),
    mode=(Mode.WARM, Mode.COLD, Mode.STREAMING),
    scattered=(True, False),
    placement=(("page_major", "page_major"), ("layer_major", "layer_major"), ("page_major", "layer_major")),
    digests=(True, False),
    hit=(0.0, 0.5),
)
"""On small hosts, in less than a minute."""
FULL = Sweep(
    pages=(256, *(1 << n for n in range(15) if n != 8)),
    mode=(Mode.WARM, Mode.COLD, Mode.STREAMING),
    scattered=(True, False),
    placement=(
        ("page_major", "page_major"),
        ("layer_major", "layer_major"),
        ("page_major", "layer_major"),
        ("layer_major", "page_major"),
    ),
    digests=(True, False),
    chunk_pages=(32, 8, 128),
    read_pages=(0, 1, 4, 64),
    sources=(1, 2, 4),
    sinks=(1, 2),
    hit=(0.0, 0.25, 0.5, 0.75, 1.0),
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Cases that fit, and what is to be said of the others."""

    cases: list[Case]
    left_out: list[str] = field(default_factory=list)


def fit(cases: list[Case], page_bytes: int, memory_bytes: int) -> Fitted:
    """Those whose pools take at most `memory_bytes` each."""
    fitted = Fitted([])
    for case in cases:
        pool_bytes = max(case.source_pages, case.sink_pages) * page_bytes
        if pool_bytes <= memory_bytes:
            fitted.cases.append(case)
        else:
            words = f"{case}: a pool of {pool_bytes / 1e6:,.0f} MB, at most {memory_bytes / 1e6:,.0f} (--memory)"
            fitted.left_out.append(words)
    return fitted


def by_setup(cases: list[Case]) -> Iterator[tuple[Setup, list[Case]]]:
    """In the order in which setups come first."""
    for setup in dict.fromkeys(case.setup for case in cases):
        yield setup, [case for case in cases if case.setup == setup]


def _counted(pages: int) -> str:
    return f"{pages:,} page{'' if pages == 1 else 's'}"


def _of(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: values[name]}


def _case(*, placement: tuple[PlacementKind, PlacementKind], **rest: Any) -> Case:
    source, sink = placement
    return replace(Case(**rest), source=source, sink=sink)
