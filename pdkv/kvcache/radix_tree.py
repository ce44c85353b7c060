"""Cached pages by the hash chain of their tokens.

Guarantees: a page stands in the tree at most once and a hash leads to at most one page; if page i of a prompt is found,
so are all before it; a locked page is never evicted, nor any page before it; splitting an edge changes no lock; prompt
and answer never share a node, and below an answer's node are only others. A node is a run of pages with one array of
page ids, so a call costs the nodes and pages it touches, not those of the tree.

The keys must be a hash *chain* (each hash covers all tokens before it): equal hashes then mean equal prefixes, so an
edge is compared by a binary search over its hashes, and one equal hash at its end stands for all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pdkv.errors import BoundsError, CapacityError, IntegrityError
from pdkv.ids import HASH_BYTES, HASH_ITEM, Int32Array, PageHashes
from pdkv.kvcache.eviction import EvictionOrder, Key, LeastRecentlyUsed
from pdkv.kvcache.keyed_heap import KeyedHeap
from pdkv.kvcache.radix_node import NO_PAGES, Insertion, Match, Node, TreeWork, Use, own

_PROMPT = Use()


class RadixTree:
    """A tree over the pages of one pool. Not thread-safe; time is a counter of its own."""

    def __init__(self, num_pages: int, order: EvictionOrder | None = None) -> None:
        self.work = TreeWork()
        self.root = Node(parent=None, pages=NO_PAGES, key=b"")
        self.order: EvictionOrder = order or LeastRecentlyUsed()
        self._leaves: KeyedHeap[Node, Key] = KeyedHeap()
        """Nodes without locks and children."""
        self._hash = np.zeros(num_pages, HASH_ITEM)
        self._held = np.zeros(num_pages, np.bool_)
        self._clock = 0
        self._pages = 0
        self._evictable = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._pages

    @property
    def evictable(self) -> int:
        """Pages that `evict` can give."""
        return self._evictable

    @property
    def locked(self) -> int:
        return self._pages - self._evictable

    def holds(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """bool [pages]."""
        found: npt.NDArray[np.bool_] = self._held[pages]
        return found

    def hashes(self, pages: Int32Array) -> npt.NDArray[np.uint8]:
        """uint8 [pages, 32] of pages in the tree."""
        found: npt.NDArray[np.uint8] = self._hash[pages].view(np.uint8).reshape(-1, HASH_BYTES)
        return found

    def pages_to(self, node: Node) -> Int32Array:
        """int32: the pages from the root to the end of `node`."""
        return np.concatenate([each.pages for each in node.path()][::-1])

    def match(self, hashes: PageHashes, *, limit: int | None = None, below: Node | None = None) -> Match:
        """The longest known prefix of `hashes`, at most `limit` pages. Changes nothing.

        With `below`, the chain goes on from the end of that node.
        """
        stop = len(hashes) if limit is None else min(limit, len(hashes))
        node = below or self.root
        inside, at = node.pages.size, 0
        found: list[Int32Array] = []
        while at < stop:
            child = node.children.get(_hash_at(hashes, at))
            if child is None:
                break
            node, inside = child, self._common(child, hashes, at, stop)
            found.append(child.pages[:inside])
            at += inside
            self.work.nodes += 1
            if inside < child.pages.size:
                break
        return Match(node, inside, np.concatenate(found) if found else NO_PAGES)

    def would_lock(self, match: Match) -> int:
        """How many evictable pages a lock on the match would take away. Changes nothing."""
        pages, inside = 0, match.inside
        for node in match.node.path():
            self.work.nodes += 1
            if node.locks:
                break
            pages += inside
            inside = node.parent.pages.size if node.parent else 0
        return pages

    def boundary(self, match: Match) -> Node:
        """The node whose last page is the match's last page; splits an edge if there is none."""
        return match.node if match.inside == match.node.pages.size else self._split(match.node, match.inside)

    def insert(
        self, hashes: PageHashes, pages: Int32Array, *, below: Node | None = None, use: Use = _PROMPT
    ) -> Insertion:
        """Add a chain, from the root or from the end of `below`. The new node is not locked.

        Raises `BoundsError` if the columns differ in length, or a page to be added is in the tree already.
        """
        match = self._fit(hashes, pages, below)
        known = match.pages.size
        parent = node = self.boundary(match)
        if known < pages.size:
            node = self._attach(parent, hashes.column()[known:], pages[known:], use)
            self._evictable += node.pages.size
            self._leaves.discard(parent)
            self._offer(node)
        return Insertion(node, match.pages)

    def extend(self, held: Node, hashes: PageHashes, pages: Int32Array, *, use: Use = _PROMPT) -> Insertion:
        """`insert` below `held`, where the caller's lock ends, and move that lock to the end of the chain.

        A node that only the caller has ever used grows in place: pages that come one by one make one long node.
        Raises as `insert`, with nothing changed.
        """
        match = self._fit(hashes, pages, held)
        # One use, one lock and no child: both are the caller's, so nobody else's lock or lease ends here.
        alone = held.uses == 1 == held.locks and not held.children and held.parent is not None
        if alone and held.output == use.output:
            self._hold(hashes.column(), pages)
            held.grow(pages)
            return Insertion(held, NO_PAGES)
        known = match.pages.size
        node = self.boundary(match)
        self.extend_lock(held, node, use=use)
        if known < pages.size:
            node = self._attach(node, hashes.column()[known:], pages[known:], use)
            node.locks = node.uses = 1
        return Insertion(node, match.pages)

    def lock(self, node: Node, *, use: Use | None = None) -> None:
        """Keep the node and all above it from eviction, until one `unlock` of the same node.

        With `use`, a request has them in its sequence, which the eviction order may count.
        """
        self._clock += 1
        for each in node.path():
            self.work.nodes += 1
            self._lock_one(each, use)

    def extend_lock(self, held: Node, to: Node, *, use: Use | None = None) -> None:
        """Turn a lock on `held` into one on `to`, a node below it (or itself).

        Raises `IntegrityError`, with nothing changed, if `to` is not below it.
        """
        between: list[Node] = []
        node: Node | None = to
        while node is not held:
            if node is None:
                raise IntegrityError("a lock can only be extended downwards")
            between.append(node)
            node = node.parent
        self.work.nodes += len(between)
        self._clock += 1
        for each in between:
            self._lock_one(each, use)

    def unlock(self, node: Node) -> None:
        """Give one lock back. Raises `IntegrityError` if there is none."""
        if node.locks < 1:
            raise IntegrityError("a tree node was unlocked more often than locked")
        self._clock += 1
        for each in node.path():
            self.work.nodes += 1
            each.locks -= 1
            each.last_used = self._clock
            if not each.locks:
                self._evictable += each.pages.size
                self._offer(each)

    def evict(self, count: int) -> Int32Array:
        """Take `count` pages out, in the eviction order, from the ends of unlocked branches.

        Raises `CapacityError`, with nothing changed, if fewer are evictable.
        """
        if count > self._evictable:
            raise CapacityError(
                f"{count} pages to evict, {self._evictable} evictable", wanted=count, evictable=self._evictable
            )
        out: list[Int32Array] = []
        missing = count
        while missing > 0:
            node = self._leaves.pop()
            if node is None:
                raise IntegrityError("pages are counted as evictable, but no branch has an unlocked end")
            pages = node.pages
            if pages.size > missing:
                pages = node.cut(pages.size - missing)
                self._offer(node)
            else:
                self._drop(node)
            out.append(pages)
            missing -= pages.size
        self.work.nodes += len(out)
        gone = np.concatenate(out) if out else NO_PAGES
        self._held[gone.astype(np.intp)] = False
        self._pages -= gone.size
        self._evictable -= gone.size
        return gone

    def renumber(self, source: Int32Array, target: Int32Array) -> None:
        """Pages [i] of `source` are `target[i]` from now on: none of these was in the tree. Costs the whole tree."""
        number = np.arange(self._held.size, dtype=np.int32)
        number[source] = target
        self._hash[target] = self._hash[source]
        self._held[source] = False
        self._held[target] = True
        stack = [self.root]
        while stack:
            node = stack.pop()
            node.pages, node.room = number[node.pages], None
            stack += node.children.values()

    def _lock_one(self, node: Node, use: Use | None) -> None:
        if not node.locks:
            self._evictable -= node.pages.size
            if not node.children:
                self._leaves.discard(node)
        node.locks += 1
        node.last_used = self._clock
        if use is not None:
            node.uses += 1
            node.priority = max(node.priority, use.priority)
            node.output = node.output and use.output

    def _offer(self, node: Node) -> None:
        """List the node for eviction if it is an unlocked end of a branch."""
        if not node.locks and not node.children and node.parent is not None:
            self._leaves.set(node, self.order.key(node))

    def _drop(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise IntegrityError("the root was evicted")
        del parent.children[node.key]
        node.parent = None
        self._offer(parent)

    def _fit(self, hashes: PageHashes, pages: Int32Array, below: Node | None) -> Match:
        """What the tree has of a chain to be inserted. Raises as `insert`."""
        if len(hashes) != pages.size:
            raise BoundsError("pages to insert", pages.size, f"{len(hashes)}: one a hash")
        match = self.match(hashes, below=below)
        new = pages[match.pages.size :]
        held = self._held[new.astype(np.intp)]
        if np.count_nonzero(held):
            raise BoundsError("page to insert", int(new[held][0]), "a page that is not in the tree")
        return match

    def _hold(self, names: npt.NDArray[np.void], pages: Int32Array) -> None:
        at = pages.astype(np.intp)  # numpy indexes four times faster with its own kind of integer
        self._hash[at] = names
        self._held[at] = True
        self._pages += pages.size

    def _attach(self, parent: Node, names: npt.NDArray[np.void], pages: Int32Array, use: Use) -> Node:
        self._clock += 1
        self._hold(names, pages)
        now, key = self._clock, names[0].tobytes()
        node = parent.children[key] = Node(parent, pages.copy(), key, now, now)
        node.priority, node.output = use.priority, use.output
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Put the first `at` pages into a new node above; the old one stays the end that its lockers hold."""
        parent = node.parent
        if parent is None:
            raise IntegrityError("the root was split")
        upper = Node(parent, own(node.pages[:at]), node.key, node.created, node.last_used)
        upper.uses, upper.priority, upper.output, upper.locks = node.uses, node.priority, node.output, node.locks
        parent.children[node.key] = upper
        node.parent, node.pages, node.room = upper, own(node.pages[at:]), None
        node.key = self._hash[node.pages[0]].tobytes()
        upper.children[node.key] = node
        return upper

    def _common(self, node: Node, hashes: PageHashes, at: int, stop: int) -> int:
        """How many of the node's pages go on with `hashes[at:stop]`; the first one does."""
        low, high = 1, min(node.pages.size, stop - at)
        middle = high
        while low < high:
            self.work.probes += 1
            if self._hash[node.pages[middle - 1]].tobytes() == _hash_at(hashes, at + middle - 1):
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def check(self, held: Iterable[Node] | None = None) -> None:
        """Recount everything; raises `IntegrityError`. Costs the whole tree: for tests and `pdkv doctor`.

        `held`: the nodes that are locked, once for each lock; without it lock counts are only checked for order.
        """
        expected = None if held is None else Counter(each for node in held for each in node.path())
        seen = np.zeros(self._held.size, np.int64)
        evictable, leaves, stack = 0, 0, [self.root]
        while stack:
            node = stack.pop()
            self._check_node(node)
            if expected is not None and node.locks != expected[node]:
                raise IntegrityError("a tree node's locks", counted=expected[node], kept=node.locks)
            np.add.at(seen, node.pages, 1)
            evictable += 0 if node.locks else node.pages.size
            leaves += node in self._leaves
            stack += node.children.values()
        if not np.array_equal(seen, self._held):
            raise IntegrityError("pages of the tree", wrong=np.flatnonzero(seen != self._held))
        if (int(seen.sum()), evictable, leaves) != (self._pages, self._evictable, len(self._leaves)):
            raise IntegrityError(
                "counts of the tree",
                counted=(int(seen.sum()), evictable, leaves),
                kept=(self._pages, self._evictable, len(self._leaves)),
            )

    def _check_node(self, node: Node) -> None:
        if node.locks < sum(child.locks for child in node.children.values()):
            raise IntegrityError("a tree node has fewer locks than its children")
        if any(key != child.key or child.parent is not node for key, child in node.children.items()):
            raise IntegrityError("a tree node's child knows another parent or key")
        if node is self.root:
            return
        if node.output and not all(child.output for child in node.children.values()):
            raise IntegrityError("a prompt goes on below pages that count as an answer's")
        if not node.pages.size or self._hash[node.pages[0]].tobytes() != node.key:
            raise IntegrityError("a tree node's key is not its first page's hash")
        if (node in self._leaves) != (not node.locks and not node.children):
            raise IntegrityError("a tree node is wrongly listed, or not listed, for eviction")
        if node in self._leaves and self._leaves.key(node) != self.order.key(node):
            raise IntegrityError("a tree node is listed for eviction at an outdated place")


def _hash_at(hashes: PageHashes, index: int) -> bytes:
    return hashes.raw[index * HASH_BYTES : (index + 1) * HASH_BYTES]
