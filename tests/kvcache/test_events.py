"""What is told of the tree: public ids, runs and their parents, and that it adds up to the tree after anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, find, given, settings
from hypothesis import strategies as st

from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.events import Event, PagesRemoved, PagesStored, PublicChain, PublicPages, public_seed
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.page_hash import chain, event_ids, namespace_seed
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from tests.kvcache.pools import pages_of, tiny_format
from tests.kvcache.router_index import RouterIndex

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "page_hash.json").read_text())
TOKENS = {  # the golden file writes its inputs as expressions
    "list(range(130))": np.arange(130),
    "list(range(128))": np.arange(128),
    "list(range(63))": np.arange(63),
    "list(range(64)) + [2**40 + 5] + list(range(65, 128))": np.array([*range(64), 2**40 + 5, *range(65, 128)]),
    "[(i * 2654435761) % 154880 for i in range(1048576)]": np.arange(1 << 20, dtype=np.uint64) * 2654435761 % 154880,
}
PAGE = GOLDEN["page_tokens"]
FMT = tiny_format()
NUM_PAGES = 14


def local(*pages: int) -> LocalPages:
    return LocalPages.checked(np.array(pages, np.int32), NUM_PAGES)


def letters(text: str) -> UInt32Array:
    """A page a letter."""
    return np.repeat(np.frombuffer(text.encode(), np.uint8), PAGE).astype(np.uint32)


# --- the public chain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda v: v["name"])
def test_ids_are_the_golden_ones(vector: dict[str, Any]) -> None:
    public = PublicChain(TOKENS[vector["tokens"]], page_tokens=PAGE, bigram=vector["bigram"])
    assert len(public) == vector["pages"]
    assert public.ids(0, len(public))[: len(vector["event_ids"])] == vector["event_ids"]


@pytest.mark.parametrize("bigram", [False, True])
@given(cuts=st.lists(st.integers(0, 6), max_size=5), grown=st.integers(0, 6 * PAGE), salt=st.sampled_from(["", "s"]))
def test_ids_in_pieces_are_the_ids_at_once(cuts: list[int], grown: int, salt: str, bigram: bool) -> None:
    tokens = np.arange(6 * PAGE + 5, dtype=np.uint32)
    whole = PublicChain(tokens, cache_salt=salt, bigram=bigram).ids(0, 6)
    pieces = PublicChain(tokens[:grown], cache_salt=salt, bigram=bigram)
    known = len(pieces)
    assert pieces.ids(0, known) == whole[:known]
    pieces.grow(tokens[grown:])
    assert len(pieces) == 6
    for stop in cuts:
        assert pieces.ids(max(stop - 2, 0), stop) == whole[max(stop - 2, 0) : stop]
    assert pieces.ids(0, 6) == whole


def test_a_salt_seeds_the_chain_as_sglang_does() -> None:
    tokens = np.arange(2 * PAGE, dtype=np.uint32)
    raw = tokens.tobytes()
    first = hashlib.sha256(hashlib.sha256(b"sglang-cache-salt-v1\0tenant-a").digest() + raw[: 4 * PAGE]).digest()
    second = hashlib.sha256(first + raw[4 * PAGE :]).digest()
    expected = [int.from_bytes(h[:8], "big", signed=True) for h in (first, second)]
    assert PublicChain(tokens, cache_salt="tenant-a").ids(0, 2) == expected
    assert public_seed("") is None
    assert not set(expected) & set(PublicChain(tokens).ids(0, 2))


# --- events ---------------------------------------------------------------------------------------------------------


def test_a_run_names_its_tokens_and_its_parent() -> None:
    pages, public = PublicPages(NUM_PAGES), PublicChain(letters("abcd"))
    first = pages.stored(public, 0, local(3, 1))
    then = pages.stored(public, 2, local(7))
    assert first is not None
    assert then is not None
    ids = public.ids(0, 3)
    assert (first.ids.tolist(), first.parent, first.page_tokens) == (ids[:2], None, PAGE)
    assert first.tokens.tolist() == letters("ab").tolist()
    assert (then.ids.tolist(), then.parent, then.tokens.tolist()) == ([ids[2]], ids[1], letters("c").tolist())
    assert pages.standing().tolist() == sorted(ids)
    gone = pages.removed(local(7, 1))
    assert gone is not None
    assert set(gone.ids.tolist()) == set(ids[1:])
    assert pages.standing().tolist() == ids[:1]
    assert pages.removed(local(7)) is None


def test_bigram_tokens_have_the_lookahead_of_the_last_page() -> None:
    tokens = np.arange(3 * PAGE + 1, dtype=np.uint32)
    event = PublicPages(NUM_PAGES).stored(PublicChain(tokens, bigram=True), 0, local(1, 2, 3))
    assert event is not None
    assert event.tokens.tolist() == tokens.tolist()
    halves = [part.tokens.tolist() for part in event.parts(2)]
    assert halves == [tokens[: 2 * PAGE + 1].tolist(), tokens[2 * PAGE :].tolist()]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_run_in_parts_says_the_same(size: int) -> None:
    public = PublicChain(letters("abcdefgh"))
    pages = PublicPages(NUM_PAGES)
    whole, inside = RouterIndex(), RouterIndex()
    for first, count in ((0, 3), (3, 5)):
        event = pages.stored(public, first, local(*range(first + 1, first + 1 + count)))
        assert event is not None
        apply(whole, event)
        parts = [*event.parts(size)]
        assert max(part.ids.size for part in parts) <= size
        for part in parts:
            apply(inside, part)
    assert whole == inside


def test_an_id_that_two_namespaces_share_stands_until_both_have_gone() -> None:
    pages = PublicPages(NUM_PAGES)
    plain, keyed = PublicChain(letters("ab")), PublicChain(letters("abc"))
    ids = keyed.ids(0, 3)
    assert pages.stored(plain, 0, local(1, 2)) is not None
    event = pages.stored(keyed, 0, local(3, 4, 5))
    assert event is not None
    assert (event.ids.tolist(), event.parent) == ([ids[2]], ids[1])
    assert pages.removed(local(1, 2)) is None
    gone = pages.removed(local(5, 4, 3))
    assert gone is not None
    assert sorted(gone.ids.tolist()) == sorted(ids)
    assert pages.standing().size == 0


def test_pages_past_the_known_tokens_are_not_told_of() -> None:
    pages, public = PublicPages(NUM_PAGES), PublicChain(letters("ab"))
    event = pages.stored(public, 1, local(4, 5))
    assert event is not None
    assert event.ids.tolist() == public.ids(1, 2)
    assert pages.stored(public, 2, local(6)) is None
    assert pages.removed(local(5, 6)) is None


# --- what is told adds up to the tree -------------------------------------------------------------------------------


def apply(index: RouterIndex, event: Event) -> None:
    match event:
        case PagesStored():
            index.stored(event.ids.tolist(), event.parent, event.tokens.tolist(), event.page_tokens)
        case PagesRemoved():
            index.removed(event.ids.tolist())
        case _:
            index.cleared()


@dataclass
class Recorder:
    """An observer that keeps what would be published."""

    pages: PublicPages = field(default_factory=lambda: PublicPages(NUM_PAGES))
    events: list[Event] = field(default_factory=list)

    def stored(self, public: PublicChain, first: int, pages: LocalPages) -> None:
        self._keep(self.pages.stored(public, first, pages))

    def removed(self, pages: LocalPages) -> None:
        self._keep(self.pages.removed(pages))

    def moved(self, source: LocalPages, target: LocalPages) -> None:
        self.pages.moved(source, target)

    def _keep(self, event: Event | None) -> None:
        if event is not None:
            self.events.append(event)


@dataclass(frozen=True)
class Request:
    prompt: str
    extra_key: str
    cache_salt: str
    answer: str


requests = st.builds(
    Request,
    prompt=st.text("ab", min_size=1, max_size=6),
    extra_key=st.sampled_from(["", "x"]),
    cache_salt=st.sampled_from(["", "s"]),
    answer=st.text("ab", max_size=2),
)


def serve(workload: list[Request]) -> tuple[CacheManager, Recorder, dict[bytes, int]]:
    """Every request from its reservation to its end; also the public id that each page hash stands for."""
    manager, recorder = CacheManager(SlotPool.create(FMT, NUM_PAGES)), Recorder()
    manager.observer = recorder
    verifier, meant = Verifier(manager.pool), dict[bytes, int]()
    for request in workload:
        seed = namespace_seed(bytes(32), request.extra_key, request.cache_salt)
        hashes = chain(letters(request.prompt + request.answer), seed=seed)
        ids = event_ids(chain(letters(request.prompt + request.answer), seed=public_seed(request.cache_salt)))
        meant |= {bytes(hash_): id_ for hash_, id_ in zip(hashes, ids, strict=True)}
        prompt = hashes.part(0, len(request.prompt))
        reservation = manager.reserve(prompt, len(hashes), max_hit_pages=len(prompt))
        reservation.public = PublicChain(letters(request.prompt), cache_salt=request.cache_salt)

        def commit(first: int, stop: int) -> None:
            pages = reservation.sequence[first:stop]  # noqa: B023
            part = hashes.part(first, stop)  # noqa: B023
            manager.commit(verifier.seal(reservation.id, first, pages, part))  # noqa: B023

        commit(len(reservation.hit), len(prompt))
        if request.answer:
            reservation.public.grow(letters(request.answer))
            manager.extend(reservation, hashes.part(len(prompt), len(hashes)))
            commit(len(prompt), len(hashes))
        manager.end(reservation)
    return manager, recorder, meant


def agrees(workload: list[Request], lose: Callable[[list[Event]], list[Event]]) -> bool:
    """Whether a router that hears what `lose` leaves of the events knows what the tree has."""
    manager, recorder, meant = serve(workload)
    index = RouterIndex()
    try:
        for event in lose(recorder.events):
            apply(index, event)
    except AssertionError:
        return False
    cached = np.flatnonzero(manager.tree.holds(np.arange(NUM_PAGES, dtype=np.int32))).astype(np.int32)
    there = {meant[row.tobytes()] for row in manager.tree.hashes(cached)}
    return index.ids == sorted(there) == recorder.pages.standing().tolist()


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(st.lists(requests, max_size=12))
@example([Request("ab", "x", "", ""), Request("abb", "", "", ""), Request("aaaaaa", "", "s", "bb")] * 2)
def test_a_router_knows_what_the_tree_has(workload: list[Request]) -> None:
    assert agrees(workload, lambda events: events)


@pytest.mark.parametrize("kind", [PagesStored, PagesRemoved])
def test_a_router_that_misses_an_event_does_not(kind: type[Event]) -> None:
    """Negative control: the last event of either kind is lost, and the check finds out."""

    def lose(events: list[Event]) -> list[Event]:
        last = max((i for i, event in enumerate(events) if isinstance(event, kind)), default=None)
        return events if last is None else events[:last] + events[last + 1 :]

    once = settings(QUICK, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
    found = find(st.lists(requests, max_size=12), lambda workload: not agrees(workload, lose), settings=once)
    assert found


def test_nobody_is_told_without_an_observer() -> None:
    manager = CacheManager(SlotPool.create(FMT, NUM_PAGES))
    reservation = manager.reserve(chain(letters("ab")), 2, max_hit_pages=2)
    assert manager.observer is None
    assert reservation.public is None
    pages = reservation.sequence
    manager.commit(Verifier(manager.pool).seal(reservation.id, 0, pages, reservation.hashes))
    assert pages == pages_of(manager.pool, *pages)
