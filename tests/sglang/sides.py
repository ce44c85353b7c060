"""Both sides of a comparison: a cache of SGLang's that says events, and a cache manager of pdkv whose publisher sends
them over ZMQ to a reader with SGLang's types.

Guarantees: nothing of SGLang is replaced, and its tree is the one that a server makes; what is known of pdkv has gone
over a socket, all that was said before.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from pdkv.adapters.events import Encoding, EventSettings, event_publisher
from pdkv.ids import LocalPages, PageHashes
from pdkv.kvcache.events import PublicChain
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.page_hash import chain, namespace_seed
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from tests.adapters.events.consumers import LAYOUTS, Subscriber
from tests.kvcache.pools import tiny_format
from tests.waiting import DEADLINE_S

PAGE = 64
NUM_PAGES = 400
ANYWHERE = "tcp://127.0.0.1:*"
TOPIC = "kv@n0@tiny"
TREES = {
    "RadixCache": "",
    "UnifiedRadixCache, core in Python": "python",
    "UnifiedRadixCache, core in Rust": "rust",
}
"""SGLang's trees, by the core that the unified one has: servers have one of the last two."""


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    cache_salt: str = ""
    extra_key: str = ""

    def key(self, *, bigram: bool = False) -> RadixKey:
        """As SGLang's scheduler makes it."""
        salt, extra = self.cache_salt or None, self.extra_key or None
        return RadixKey(array("q", self.tokens), extra, is_bigram=bigram, cache_salt=salt)


@dataclass
class Known:
    """What events say of one cache."""

    standing: Counter[int] = field(default_factory=Counter)
    """Ids, and how often each is stored."""
    parent_of: dict[int, int | None] = field(default_factory=dict)
    tokens_of: dict[int, tuple[object, ...]] = field(default_factory=dict)
    salt_of: dict[int, str | None] = field(default_factory=dict)

    def hear(self, events: Sequence[Any]) -> Self:
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    self.standing.subtract(event.block_hashes)
                    self.standing = +self.standing
                case _:
                    self.standing.clear()
        return self

    def _stored(self, event: Any) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for at, id_ in enumerate(event.block_hashes):
            self.standing[id_] += 1
            self.parent_of[id_], parent = parent, id_
            self.tokens_of[id_] = tuple(map(_plain, event.token_ids[at * size : (at + 1) * size]))
            self.salt_of[id_] = getattr(event, "cache_salt", None)

    def unlike(self, other: Known) -> list[str]:
        """In what the two differ, of what stands."""
        mine, theirs = set(self.standing), set(other.standing)
        found = [f"{len(mine ^ theirs)} ids stand in one of the two"] if mine != theirs else []
        for name in ("parent_of", "tokens_of", "salt_of"):
            one, two = getattr(self, name), getattr(other, name)
            wrong = [id_ for id_ in mine & theirs if one[id_] != two[id_]]
            found += [f"{name} {len(wrong)} ids"] if wrong else []
        return found


def _plain(token: object) -> object:
    return tuple(token) if isinstance(token, list) else token


class Theirs:
    """A cache of SGLang's on CPU, with as many pages as the other one."""

    def __init__(self, tree: str, *, bigram: bool = False, dynamo: bool = False, adapter: str = "") -> None:
        """With an `adapter`, requests of that extra_key are of a LoRA adapter that has a name."""
        self.allocator = PagedTokenToKVPoolAllocator(NUM_PAGES * PAGE, PAGE, torch.float32, "cpu", None, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            is_eagle=bigram,
            enable_kv_cache_events=True,
            dynamo_kv_event_format=dynamo,
        )
        if adapter:
            of_adapter = SimpleNamespace(extra_key=adapter, lora_id=adapter)
            params.kv_event_lora_names.register(of_adapter, "its name")
        if core := TREES[tree]:
            params.tree_components, params.tree_core_backend = (ComponentType.FULL,), core
        self.cache = UnifiedRadixCache(params) if core else RadixCache(params)
        self.runs_in = type(getattr(self.cache, "tree_core", self.cache)).__name__
        self.events: list[Any] = []
        self._bigram = bigram

    def serve(self, prompt: Prompt) -> int:
        """Its full pages go into the tree. Returns how many were there."""
        units = (len(prompt.tokens) - self._bigram) // PAGE * PAGE
        value = self.allocator.alloc(units)
        assert value is not None, "the pool is large enough"
        there = self.cache.insert(InsertParams(key=prompt.key(), value=value)).prefix_len
        self.allocator.free(value[:there])
        return int(there) // PAGE

    def hit(self, prompt: Prompt) -> int:
        """Pages that a lookup finds; where it ends within a node, SGLang splits that."""
        return int(self.cache.match_prefix(MatchPrefixParams(key=prompt.key())).device_prefix_len) // PAGE

    def evict(self, count: int) -> None:
        self.cache.evict(EvictParams(num_tokens=count * PAGE))

    def known(self) -> Known:
        self.events += self.cache.take_events()
        return Known().hear(self.events)


class Ours:
    """A cache manager of pdkv, and what a reader with SGLang's types hears of it over ZMQ.

    With `bigram` the reader has the types of tests/adapters/events/consumers.py: SGLang's don't read its own pairs.
    """

    def __init__(self, *, encoding: Encoding = "map", bigram: bool = False, layout: Any = KVEventBatch) -> None:
        self.manager = CacheManager(SlotPool.create(tiny_format(), NUM_PAGES))
        self.publisher = event_publisher(EventSettings(ANYWHERE, ANYWHERE, TOPIC, encoding), NUM_PAGES + 1)
        self.manager.observer = self.publisher
        self._verifier = Verifier(self.manager.pool)
        self._bigram = bigram
        layout = LAYOUTS["map"]["sglang, named"] if bigram else layout
        self.reader = Subscriber(self.publisher.address, self.publisher.replay_address, layout, TOPIC)
        # a page of no prompt's, that comes and goes: when it is heard of, so is all that was said before
        self._mark = PublicChain(np.full(PAGE + bigram, 7, np.uint32), bigram=bigram)
        self._mark_page = LocalPages.kept(np.array([NUM_PAGES], np.int32))
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.reader.__exit__(kind, error, tb)
        self.publisher.close()

    def serve(self, prompt: Prompt) -> int:
        """Its full pages go into the tree, as a request's do. Returns how many were hits."""
        tokens = np.array(prompt.tokens, np.uint32)
        seed = namespace_seed(bytes(32), prompt.extra_key, prompt.cache_salt)
        hashes = chain(tokens, seed=seed, bigram=self._bigram)
        reservation = self.manager.reserve(hashes, len(hashes), max_hit_pages=len(hashes))
        reservation.public = PublicChain(tokens, cache_salt=prompt.cache_salt, bigram=self._bigram)
        had = len(reservation.hit)
        if had < len(hashes):
            pages, part = reservation.sequence[had:], hashes.part(had, len(hashes))
            self.manager.commit(self._verifier.seal(reservation.id, had, pages, part))
        self.manager.end(reservation)
        return had

    def evict(self, count: int) -> None:
        """So many pages have to go for a request that needs all that is free and `count` more."""
        wanted = self.manager.census()["free"] + count
        self.manager.end(self.manager.reserve(PageHashes(), wanted, max_hit_pages=0))

    def known(self) -> Known:
        self.heard()
        return Known().hear(self.reader.events)

    def heard(self) -> list[Any]:
        """All events so far."""
        (mark,) = self._mark.ids(0, 1)
        self.publisher.stored(self._mark, 0, self._mark_page)
        while mark not in self.reader.index.ids:
            self.reader.take()
        self.publisher.removed(self._mark_page)
        while mark in self.reader.index.ids:
            self.reader.take()
        return self.reader.events

    def mark(self) -> None:
        """Something to hear: a page that comes and goes."""
        self.publisher.stored(self._mark, 0, self._mark_page)
        self.publisher.removed(self._mark_page)

    def _listen(self) -> None:
        """Until a live batch comes: a SUB socket takes a while to be known to its publisher."""
        for _ in range(int(DEADLINE_S * 100)):
            self.mark()
            if self.reader.waiting(10):
                return
        raise AssertionError("the reader hears nothing")


def plain(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Events as they are on the wire, by name."""
    decoded: list[dict[str, Any]] = msgspec.msgpack.decode(msgspec.msgpack.encode(list(events)))
    return decoded
