"""What the radix tree is made of, and what its calls answer.

Guarantees: plain records; only the tree makes and changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pdkv.ids import Int32Array

NO_PAGES = np.empty(0, np.int32)


class Use(NamedTuple):
    """What a request does with the pages that it locks."""

    priority: int = 0
    output: bool = False
    """They are made of its answer, not of its prompt."""


@dataclass(eq=False, slots=True)
class Node:
    """A run of consecutive pages below `parent`. Has the properties of `eviction.NodeUse`."""

    parent: Node | None
    pages: Int32Array
    key: bytes
    """Hash of the first page: its name among the parent's children."""
    created: int = 0
    last_used: int = 0
    uses: int = 0
    priority: int = 0
    output: bool = False
    locks: int = 0
    """Holders of this node or of one below it."""
    room: Int32Array | None = None
    """An array that begins with `pages` and has room for more; made by `grow`."""
    children: dict[bytes, Node] = field(default_factory=dict)

    def path(self) -> Iterator[Node]:
        """This node and all above it, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def grow(self, pages: Int32Array) -> None:
        """Append pages: the cost follows those appended, however often it happens."""
        have, total = self.pages.size, self.pages.size + pages.size
        room = self.room
        if room is None or room.size < total:
            self.room = room = np.empty(max(total, 2 * have), np.int32)
            room[:have] = self.pages
        room[have:total] = pages
        self.pages = room[:total]

    def cut(self, kept: int) -> Int32Array:
        """Drop all but the first `kept` pages, and return those dropped."""
        gone = self.pages[kept:]
        self.pages, self.room = own(self.pages[:kept]), None
        return gone


class Match(NamedTuple):
    """Where a chain leaves the tree. Good until the tree changes."""

    node: Node
    inside: int
    """How many pages of `node` belong to the match."""
    pages: Int32Array
    """int32 [matched pages]."""


class Insertion(NamedTuple):
    node: Node
    """Its last page is the last one of the inserted chain."""
    existing: Int32Array
    """Pages that the tree had for the first hashes of the chain: it keeps them and takes only the pages after them."""


@dataclass(slots=True)
class TreeWork:
    """What the calls so far have looked at: a test of growth counts this instead of time."""

    nodes: int = 0
    probes: int = 0


def own(part: Int32Array) -> Int32Array:
    """The part itself, or a copy if it would keep alive an array more than twice its size."""
    whole = part.base
    return part.copy() if whole is not None and whole.size > 2 * part.size else part
