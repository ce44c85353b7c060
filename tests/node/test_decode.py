"""Two nodes joined without a socket: what one process would give, and what happens when something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from pdkv.errors import (
    AccountMismatch,
    BoundsError,
    CapacityError,
    ConfigError,
    ContractMismatch,
    DeadlineExceeded,
    DigestMismatch,
    DuplicateRequest,
    NeverFits,
    PeerLost,
    ProtocolError,
    StalePages,
)
from pdkv.ids import RequestId
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.node.decode import DecodeSettings
from pdkv.node.messages import (
    GenerateDone,
    GenerateEvent,
    GenerateRequest,
    PagesSealed,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    Token,
)
from pdkv.adapters.reference.monolith import Monolith
from tests.node.toy import OneByOne, Pair, ToyEngine, make_pair

CHUNK = 128


def request(length: int, *, seed: int = 0, name: str = "r0", **more: object) -> GenerateRequest:
    tokens = np.random.default_rng(seed).integers(0, 256, length).astype(np.uint32)
    return GenerateRequest(RequestId(name), tokens, Sampling(max_tokens=8), remaining_s=30.0, **more)  # type: ignore[arg-type]


async def answers(events: AsyncGenerator[GenerateEvent, None]) -> tuple[list[int], GenerateDone]:
    tokens: list[int] = []
    async with aclosing(events) as stream:
        async for event in stream:
            if isinstance(event, GenerateDone):
                return tokens, event
            assert isinstance(event, Token)
            assert event.index == len(tokens)
            tokens.append(event.token)
    raise AssertionError("the stream ended without GenerateDone")


async def rested(pair: Pair) -> None:
    """Both nodes have given everything back: nothing but cache is left."""
    await asyncio.gather(*pair.decode.farewells)
    for node in (pair.prefill, pair.decode):
        node.parts.manager.check()
        census = node.parts.manager.census()
        assert (census["reserved"], census["private"], census["quarantined"]) == (0, 0, 0), census
    assert len(pair.prefill.leases) == 0


def run(scenario: object, pair: Pair) -> None:
    try:
        asyncio.run(scenario(pair))  # type: ignore[operator]
    finally:
        pair.close()


def alone(pair: Pair, asked: GenerateRequest) -> tuple[int, ...]:
    """What one process answers, with a pool of its own."""
    fmt = pair.decode.parts.pool.fmt
    pool = SlotPool.create(fmt, 64)
    return Monolith(ToyEngine(pool), pool, pair.prefill.parts.contract, CHUNK).generate(asked.tokens, asked.sampling).tokens


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 500, 512])
def test_two_nodes_give_what_one_process_gives(length: int) -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(length)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        ship, fmt = done.shipment, pair.decode.parts.pool.fmt
        assert ship.pages_total == ship.pages_shipped == ship.digests_verified == -(-length // 64)
        assert ship.bytes_main == ship.pages_shipped * fmt.main_bytes
        assert ship.bytes_index == ship.pages_shipped * fmt.index_bytes
        assert ship.bytes_backend == ship.bytes_main + ship.bytes_index
        assert ship.bytes_tail == (fmt.page_bytes if length % 64 else 0)
        assert done.chunk_starts == tuple(range(0, length, CHUNK))
        await rested(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("rule", ["none", "bigram", "drop_page"])
def test_a_shared_prefix_ships_only_what_is_missing(rule: str) -> None:
    facts = {} if rule == "none" else {"speculation": "eagle", "eagle_rule": rule, "rollback_tokens": 4}

    async def scenario(pair: Pair) -> None:
        first = request(500)
        await answers(pair.decode.generate(first))
        longer = replace(first, request_id=RequestId("r1"), tokens=np.append(first.tokens, np.uint32(7)))
        tokens, done = await answers(pair.decode.generate(longer))
        assert tuple(tokens) == alone(pair, longer)
        assert done.shipment.pages_hit == (6 if rule == "drop_page" else 7)
        assert done.shipment.pages_hit + done.shipment.pages_shipped == 8
        await rested(pair)

    run(scenario, make_pair(both=facts))


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    async def scenario(pair: Pair) -> None:
        asked = [request(200 + 10 * i, seed=i, name=f"r{i}") for i in range(4)]
        got = await asyncio.gather(*(answers(pair.decode.generate(a)) for a in asked))
        assert [tuple(tokens) for tokens, _ in got] == [alone(pair, a) for a in asked]
        await rested(pair)

    run(scenario, make_pair())


def test_the_same_prompt_at_once_leaves_one_copy_in_the_tree() -> None:
    async def scenario(pair: Pair) -> None:
        asked = [request(320, name=f"r{i}") for i in range(3)]
        got = await asyncio.gather(*(answers(pair.decode.generate(a)) for a in asked))
        assert {tuple(tokens) for tokens, _ in got} == {alone(pair, asked[0])}
        await rested(pair)
        for node in (pair.prefill, pair.decode):
            assert node.parts.manager.census()["cached"] == 5

    run(scenario, make_pair())


FAULTS = {
    "drop-index": ("prompt page 0", "index"),
    "zero-page": ("prompt page 1", "both"),
    "swap-pages": ("prompt page 0", "both"),
    "flip-bit": ("prompt page 1", "main"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_before_the_first_token(fault: str) -> None:
    async def scenario(pair: Pair) -> None:
        page, cache = FAULTS[fault]
        with pytest.raises(DigestMismatch) as caught:
            await answers(pair.decode.generate(request(300, fault=fault)))
        named = next(bad for bad in caught.value.bad if f"prompt page {bad.index}" == page)
        assert named.cache == cache
        await rested(pair)

    run(scenario, make_pair())


@pytest.mark.parametrize("fault", FAULTS)
def test_without_digests_each_fault_changes_the_tokens(fault: str) -> None:
    """The negative control of the controls: what the digests catch does matter."""

    async def scenario(pair: Pair) -> None:
        asked = request(300, fault=fault)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) != alone(pair, asked)
        assert done.shipment.digests_verified == 0

    run(scenario, make_pair(digest="none"))


def test_a_fault_needs_a_node_that_allows_it() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(ConfigError, match="allow-fault-injection"):
            await answers(pair.decode.generate(request(100, fault="flip-bit")))
        await rested(pair)

    run(scenario, make_pair(settings=DecodeSettings(prefill_addresses=("p0",))))


def test_unequal_contracts_are_refused_with_every_field_and_both_values() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(ContractMismatch) as refused:
            await answers(pair.decode.generate(request(100)))
        assert [(d.field, d.mine, d.theirs) for d in refused.value.differences] == [
            ("weights_id", "other", "toy"),
            ("rollback_tokens", "4", "0"),
        ]
        await rested(pair)
        assert pair.prefill.parts.manager.census()["cached"] == 0

    run(scenario, make_pair(rollback_tokens=4, weights_id="other"))


def test_a_request_that_cannot_fit_leaves_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(NeverFits):
            await answers(pair.decode.generate(request(64 * 64)))
        with pytest.raises(BoundsError, match="vocabulary"):
            await answers(pair.decode.generate(replace(request(64), tokens=np.array([257], np.uint32))))
        with pytest.raises(BoundsError, match="at least 1"):
            await answers(pair.decode.generate(replace(request(64), tokens=np.array([], np.uint32))))
        await rested(pair)

    run(scenario, make_pair())


def test_prefill_refuses_when_decode_has_room_but_prefill_has_none() -> None:
    async def scenario(pair: Pair) -> None:
        manager = pair.prefill.parts.manager
        from pdkv.ids import PageHashes

        held = manager.reserve(PageHashes(), 60, max_hit_pages=0)
        with pytest.raises(CapacityError):
            await answers(pair.decode.generate(request(640)))
        manager.end(held)
        await rested(pair)

    run(scenario, make_pair())


def test_one_id_at_a_time() -> None:
    async def scenario(pair: Pair) -> None:
        async with aclosing(pair.decode.generate(request(300))) as first:
            await anext(first)
            with pytest.raises(DuplicateRequest):
                await answers(pair.decode.generate(request(300)))
        await answers(pair.decode.generate(request(300)))
        await rested(pair)

    run(scenario, make_pair())


def test_a_client_that_goes_away_frees_everything_on_both_sides() -> None:
    async def scenario(pair: Pair) -> None:
        stream = pair.decode.generate(request(300))
        await anext(stream)
        await stream.aclose()
        await rested(pair)

    run(scenario, make_pair())


def test_a_deadline_ends_the_request_and_says_so() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(DeadlineExceeded):
            await answers(pair.decode.generate(replace(request(1000), remaining_s=0.001)))
        await rested(pair)

    run(scenario, make_pair())


class Meddler:
    """A prefill node between: changes what it says, as a faulty or hostile peer would."""

    def __init__(self, pair: Pair, change: object) -> None:
        self._node = pair.prefill
        self._change = change
        self.connect = pair.prefill.connect
        self.renew_lease = pair.prefill.renew_lease
        self.release_lease = pair.prefill.release_lease

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        async with aclosing(self._node.prefill(request)) as events:
            async for event in events:
                for changed in self._change(event):  # type: ignore[operator]
                    yield changed


def sealed(**changes: object) -> object:
    def change(event: PrefillEvent) -> list[PrefillEvent]:
        if not isinstance(event, PagesSealed):
            return [event]
        values = {k: v(event) if callable(v) else v for k, v in changes.items()}
        return [replace(event, **values)]  # type: ignore[arg-type]

    return change


def drop(kind: type) -> object:
    return lambda event: [] if isinstance(event, kind) else [event]


def account(**changes: object) -> object:
    def change(event: PrefillEvent) -> list[PrefillEvent]:
        if not isinstance(event, PrefillDone):
            return [event]
        return [replace(event, account=replace(event.account, **changes))]  # type: ignore[arg-type]

    return change


MEDDLING = {
    "page out of the pool": (sealed(page_ids=lambda e: e.page_ids + 1000), BoundsError, "page id"),
    "the write sink": (sealed(page_ids=lambda e: e.page_ids * 0), BoundsError, "page id"),
    "one generation too few": (sealed(generations=lambda e: e.generations[1:]), BoundsError, "columns"),
    "pages skipped": (sealed(first_index=lambda e: e.first_index + 1), ProtocolError, "announced"),
    "hashes of another prompt": (
        sealed(hashes=lambda e: type(e.hashes)(bytes(len(e.hashes.raw)))),
        ProtocolError,
        "hashes",
    ),
    "an old generation": (sealed(generations=lambda e: e.generations - np.uint64(1)), StalePages, "reused"),
    "digests of other bytes": (sealed(digests=lambda e: e.digests + np.uint64(1)), DigestMismatch, "both"),
    "a page never announced": (drop(PagesSealed), ProtocolError, "not announced"),
    "no end": (drop(PrefillDone), PeerLost, "without PrefillDone"),
    "everything twice": (lambda event: [event, event], ProtocolError, "out of order"),
    "an event after the end": (
        lambda event: [event, event] if isinstance(event, PrefillDone) else [event],
        ProtocolError,
        "out of order",
    ),
    "no tail": (
        lambda event: [replace(event, tail=None)] if isinstance(event, PrefillDone) else [event],
        ProtocolError,
        "tail",
    ),
    "another layer list": (account(indexer_types=("full",)), AccountMismatch, "indexer_types"),
    "another rollback": (account(rollback_tokens=9), AccountMismatch, "rollback_tokens"),
    "another recorded length": (account(recorded_tokens=0), AccountMismatch, "recorded_tokens"),
    "another resume length": (account(resume_tokens=64), AccountMismatch, "resume_tokens"),
    "another last hash": (account(last_page_hash=bytes(32)), AccountMismatch, "last_page_hash"),
    "another token count": (account(prompt_tokens=1), AccountMismatch, "prompt_tokens"),
    "another page count": (account(pages=1), AccountMismatch, "pages"),
}


@pytest.mark.parametrize("what", MEDDLING)
def test_a_peer_that_says_otherwise_is_not_believed(what: str) -> None:
    change, kind, words = MEDDLING[what]

    async def scenario(pair: Pair) -> None:
        pair.decode._directory = OneByOne({"p0": Meddler(pair, change)})  # type: ignore[dict-item]
        got: list[GenerateEvent] = []
        with pytest.raises(kind, match=words):
            async with aclosing(pair.decode.generate(request(300))) as events:
                async for event in events:
                    got.append(event)
        assert got == []
        # The meddler may have kept a lease that decode never heard of: that one ends by its own expiry.
        pair.decode.parts.manager.check()
        assert pair.decode.parts.manager.census()["reserved"] == 0

    run(scenario, make_pair())


def test_untouched_words_are_believed() -> None:
    async def scenario(pair: Pair) -> None:
        pair.decode._directory = OneByOne({"p0": Meddler(pair, lambda event: [event])})  # type: ignore[dict-item]
        asked = request(300)
        tokens, _ = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)

    run(scenario, make_pair())
