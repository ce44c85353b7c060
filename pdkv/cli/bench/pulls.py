"""What sources and sinks are told to be and to do, and what a pull took: plain values.

Guarantees: needs neither torch nor NIXL, so that whoever only asks and compares starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.geometry.page_layout import PlacementKind
from pdkv.ids import Int32Array
from pdkv.node.messages import Shipment
from pdkv.rpc.bench import BenchPrompt


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What a source has of its operator, whatever node it is told to be."""

    node_id: str = "source"
    memory_bytes: int = 1 << 30
    """Most of a pool."""
    ucx_tls: str = ""
    net_devices: str = ""


@dataclass(frozen=True, slots=True)
class SinkNode:
    """The decode node that a sink is to be."""

    model: str
    pool_pages: int
    placement: PlacementKind = "page_major"
    read_pages: int = 0
    """Most pages of one READ; 0: the node's default."""
    touched: bool = True
    """The pool's memory is committed before the first pull."""
    node_id: str = "sink"
    ucx_tls: str = ""
    net_devices: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A sink that is connected."""

    connect_s: tuple[float, ...]
    """A source each: introductions both ways, memory made known, a first read."""
    lanes: tuple[str, ...]
    main_bytes: int
    """Of a page."""
    index_bytes: int
    build_s: float


@dataclass(frozen=True, slots=True)
class Wish:
    """Pull prompts: one from each of some sources at once, or one after another."""

    prompts: tuple[tuple[str, BenchPrompt], ...]
    """Source address, and the prompt that it has or makes."""
    hit_pages: int = 0
    """Of each prompt, that are here already."""
    scattered: bool = False
    digests: bool = True
    in_turn: bool = False
    zeroed: bool = True
    """False only for memory that was never written to."""
    damaged_pages: int = 0
    """Of those pulled, changed by a bit after they were proved: to show that a comparison finds them."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What pulls that ran at once took; times are points on this machine's monotonic clock."""

    began_s: float
    """The first request was asked of its source."""
    committed_s: float
    """The last full page was proved and in the tree; with nothing to pull, the request was admitted. Of requests in
    turn, as if nothing had been between one and the next."""
    admitted_s: float
    """The last request could have been answered: tail page and account, too."""
    each_s: tuple[float, ...]
    """A prompt each: from asked to committed."""
    stages_s: dict[str, float]
    """Medians of the prompts: from asked to the first time that each stage was reached."""
    pages: int
    """Full pages that were pulled; beside them, a tail page a prompt."""
    hit_pages: int
    shipped: Shipment
    """Sums of what the node itself accounts for, tails included."""
    descriptors_before: int
    """Without merging: a descriptor a page and piece."""
    post_s: float
    cpu_s: float
    local: Int32Array
    """Page ids of the longest read."""
    remote: Int32Array

    @property
    def seconds(self) -> float:
        return self.committed_s - self.began_s
