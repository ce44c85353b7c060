"""Nodes that differ in what may differ: placement of pages, topology, caches, tenants, random draws."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pdkv.contract import Topology
from pdkv.errors import ContractMismatch
from pdkv.ids import LocalPages, RequestId
from pdkv.kvcache.page_digest import digest_pages
from pdkv.node.decode import DecodeSettings
from pdkv.node.messages import GenerateRequest, Namespace, Sampling
from pdkv.node.prompt import plan_prompt
from tests.node.scene import alone, answers, recovered, request, rested, run
from tests.node.toy import PAGE, Pair, make_pair

PLACEMENTS = ("page_major", "layer_major")
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "bigram": {"speculation": "eagle", "eagle_rule": "bigram", "rollback_tokens": 4, "draft_tokens": 3},
    "drop_page": {"speculation": "eagle", "eagle_rule": "drop_page", "rollback_tokens": 1},
}


def named(asked: GenerateRequest, name: str, **more: Any) -> GenerateRequest:
    return replace(asked, request_id=RequestId(name), **more)


async def equal_pages(pair: Pair, asked: GenerateRequest) -> None:
    """Both trees have the prompt's pages, equal in every byte of both caches, wherever they lie."""
    digests = []
    for node in pair.nodes:
        parts = node.parts
        prompt = plan_prompt(asked.tokens, asked.namespace, parts.contract)
        reservation = parts.manager.reserve(prompt.hashes, max(prompt.recorded_pages, 1), max_hit_pages=10**6)
        assert len(reservation.hit) == prompt.recorded_pages
        digests.append(digest_pages(parts.pool, reservation.hit))
        parts.manager.end(reservation)
    np.testing.assert_array_equal(*digests)


@pytest.mark.parametrize(("prefill", "decode"), [*product(PLACEMENTS, PLACEMENTS)])
@pytest.mark.parametrize("rule", RULES)
def test_pages_travel_between_any_two_placements(prefill: str, decode: str, rule: str) -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(300)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        assert done.shipment.bytes_backend == 5 * pair.decode.parts.pool.fmt.page_bytes
        await equal_pages(pair, asked)
        again, done = await answers(pair.decode.generate(named(asked, "r1")))
        assert again == tokens
        assert done.shipment.pages_hit == (3 if rule == "drop_page" else 4)
        # prefill gives a page back as well, and computes it again
        assert done.chunk_starts == ((192,) if rule == "drop_page" else (256,))
        await recovered(pair)

    run(scenario, make_pair(both={"placement": prefill, **RULES[rule]}, placement=decode))


UNEQUAL = [
    (Topology(tp=8), Topology(tp=2, dp=4)),
    (Topology(tp=1), Topology(tp=16)),
    (Topology(tp=4, dp=2), Topology(dp=8)),
]


@pytest.mark.parametrize(("prefill", "decode"), UNEQUAL)
def test_unequal_topologies_of_replicated_caches_ship_pages(prefill: Topology, decode: Topology) -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(300)
        tokens, done = await answers(pair.decode.generate(asked))
        assert tuple(tokens) == alone(pair, asked)
        assert done.shipment.pages_shipped == 5
        await equal_pages(pair, asked)
        await recovered(pair)

    run(scenario, make_pair(both={"topology": prefill}, topology=decode))


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (Topology(tp=4, dcp=2, main="sharded"), Topology(tp=4, dcp=4, main="sharded"), "equal dcp"),
        (Topology(tp=2, dcp=2, main="sharded"), Topology(), "equal dcp and interleave"),
        (Topology(2, dcp=2, main="sharded"), Topology(2, dcp=2, main="sharded", interleave=64), "and interleave"),
        (Topology(pp=2), Topology(), "equal pp"),
    ],
)
def test_topologies_that_cannot_pair_are_refused_before_a_page_moves(
    prefill: Topology, decode: Topology, words: str
) -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(ContractMismatch, match=words):
            await answers(pair.decode.generate(request(300)))
        await rested(pair)
        assert pair.prefill.parts.manager.census()["cached"] == 0

    run(scenario, make_pair(both={"topology": prefill}, topology=decode))


# --- prompts that share pages -----------------------------------------------------------------------------------------

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 192, 193)


@pytest.mark.parametrize("rule", RULES)
def test_prompts_of_every_edge_length_again_and_again(rule: str) -> None:
    """All are prefixes of one another, so each finds what the ones before it left."""

    async def scenario(pair: Pair) -> None:
        long = request(200)
        for turn, length in enumerate((*LENGTHS, *reversed(LENGTHS))):
            asked = named(long, f"r{turn}", tokens=long.tokens[:length].copy())
            asked = replace(asked, sampling=Sampling(max_tokens=3))
            tokens, done = await answers(pair.decode.generate(asked))
            assert tuple(tokens) == alone(pair, asked), length
            prompt = plan_prompt(asked.tokens, asked.namespace, pair.decode.parts.contract)
            if turn >= len(LENGTHS):
                expected = max(min(prompt.recorded_pages, prompt.decode_hit_pages) - prompt.drop_pages, 0)
                assert done.shipment.pages_hit == expected, length
        await recovered(pair)

    run(scenario, make_pair(both=RULES[rule]))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_pages_of_an_answer_are_hit_by_what_goes_on_from_it_if_they_are_kept(rule: str, *, cached: bool) -> None:
    """A request decodes over a page edge; the page that began as its tail is found by the same tokens as a prompt."""

    async def scenario(pair: Pair) -> None:
        first = replace(request(120), sampling=Sampling(max_tokens=20))
        tokens, _ = await answers(pair.decode.generate(first))
        longer = named(first, "r1", tokens=np.append(first.tokens, np.array(tokens, np.uint32)))
        tokens, done = await answers(pair.decode.generate(longer))
        assert tuple(tokens) == alone(pair, longer)
        assert done.shipment.pages_hit == 1 + cached - (rule == "drop_page")
        await recovered(pair)

    run(scenario, make_pair(both=RULES[rule], settings=DecodeSettings(("p0",), cache_answers=cached)))


def test_a_tail_page_is_unsealed_before_decode_writes_into_it() -> None:
    async def scenario(pair: Pair) -> None:
        parts = pair.decode.parts
        sealed: list[bool] = []
        forward = parts.engine.forward

        def looking(tokens: Any, start: int, pages: LocalPages) -> Any:
            sealed.extend(parts.pool.table.sealed(pages[start // PAGE : start // PAGE + 1]).tolist())
            return forward(tokens, start, pages)

        parts.engine.forward = looking  # type: ignore[method-assign]
        await answers(pair.decode.generate(request(100)))
        assert sealed == [False] * 7

    run(scenario, make_pair())


def test_only_equal_namespaces_share_pages() -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(320)
        tenants = [Namespace("", ""), Namespace("", "a"), Namespace("a", ""), Namespace("", "b"), Namespace("a", "a")]
        for turn, namespace in enumerate((*tenants, *tenants)):
            tokens, done = await answers(pair.decode.generate(named(asked, f"r{turn}", namespace=namespace)))
            assert tuple(tokens) == alone(pair, asked)
            hit = 0 if turn < len(tenants) else 5
            assert done.shipment.pages_hit == hit
            # at prefill, the same: all of the prompt is computed for a new tenant, only its last page for a known one
            assert done.chunk_starts == ((0, 128, 256) if not hit else (256,))
        await recovered(pair)

    run(scenario, make_pair())


# --- random draws -----------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_tokens_on_one_node_and_on_two_cached_or_not() -> None:
    async def scenario(pair: Pair) -> None:
        drawn = set()
        for seed in range(4):
            sampling = Sampling(max_tokens=8, temperature=0.9, top_p=0.95, seed=seed)
            asked = replace(request(200), sampling=sampling)
            for turn in range(2):
                tokens, _ = await answers(pair.decode.generate(named(asked, f"r{seed}-{turn}")))
                assert tuple(tokens) == alone(pair, asked)
            drawn.add(tuple(tokens))
        assert len(drawn) == 4
        await recovered(pair)

    run(scenario, make_pair())


def test_a_stop_token_ends_it_also_as_the_first() -> None:
    async def scenario(pair: Pair) -> None:
        asked = request(200)
        whole = alone(pair, asked)
        for stop in (whole[0], whole[3]):
            sampling = Sampling(max_tokens=8, stop_tokens=(stop,))
            tokens, done = await answers(pair.decode.generate(replace(asked, sampling=sampling)))
            assert tuple(tokens) == whole[: whole.index(stop) + 1]
            assert (done.finish_reason, done.output_tokens) == ("stop", len(tokens))
        tokens, done = await answers(pair.decode.generate(replace(asked, sampling=Sampling(max_tokens=1))))
        assert (tuple(tokens), done.finish_reason) == (whole[:1], "length")
        await recovered(pair)

    run(scenario, make_pair())


def test_two_prefill_nodes_are_used_in_turn() -> None:
    async def scenario(pair: Pair) -> None:
        called = []
        for address in ("a", "b"):
            pair.directory.peers[address] = pair.prefill
        original = pair.directory.peer
        pair.directory.peer = lambda address: (called.append(address), original(address))[1]  # type: ignore[method-assign]
        pair.decode.links.replace_own(("a", "b"))
        await asyncio.gather(*(answers(pair.decode.generate(request(100, name=f"r{i}"))) for i in range(4)))
        assert sorted(called) == ["a", "b"]
        await recovered(pair)

    run(scenario, make_pair())
