"""The benchmark of routing: simulated nodes that compute, and what a policy makes of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing import BLOCK_TOKENS, ONE_POOL, Simulation, arrivals, contract, measure, request_of
from pdkv.node.messages import GenerateRequest
from pdkv.node.prompt import plan_prompt
from pdkv.replay.trace import TraceRequest
from pdkv.router.weights import REQUEST_TOKENS

TRACE = Path(__file__).resolve().parents[1] / "replay" / "conversation_300.jsonl"
TOKEN_S = 1e-4


def traced(*blocks: int) -> TraceRequest:
    return TraceRequest(0.0, len(blocks) * BLOCK_TOKENS - 100, 10, blocks)


def families(count: int, members: int, apart_s: float) -> list[tuple[float, GenerateRequest]]:
    """One after the other, the next family each time; four blocks are shared and one is a member's own."""
    asked = []
    for n in range(count * members):
        family = n % count
        shared = [100 * family + block for block in range(4)]
        asked.append((n * apart_s, request_of(traced(*shared, 10_000 + n), n)))
    return asked


def test_prompts_are_equal_as_far_as_their_blocks_are() -> None:
    one, other = (request_of(traced(*blocks), 0) for blocks in ((1, 2, 3), (1, 2, 4)))
    hashes = [plan_prompt(each.tokens, each.namespace, contract()).hashes for each in (one, other)]
    equal = int((hashes[0].rows() == hashes[1].rows()).all(axis=1).sum())
    assert equal == 2 * BLOCK_TOKENS // 64
    assert np.array_equal(one.tokens, request_of(traced(1, 2, 3), 7).tokens)


@pytest.mark.parametrize("policy", ["round-robin", "load", "prefix"])
def test_a_node_computes_one_prompt_after_the_other(policy: str) -> None:
    requests = [(0.0, request_of(traced(n), n)) for n in range(3)]
    figures = asyncio.run(Simulation(policy, 1, 100, TOKEN_S).run(requests))
    each_s = (BLOCK_TOKENS - 100 + REQUEST_TOKENS) * TOKEN_S
    assert figures.ttft_mean_s == pytest.approx(2 * each_s)
    assert (figures.hit_rate, figures.refused, figures.busiest) == (0.0, 0, 1.0)


def test_families_stay_together_by_prefix_and_are_torn_apart_in_turn() -> None:
    """Three families over two nodes in turn: each comes to both nodes."""
    found = measure(families(3, 20, apart_s=1.0), [2], 2000, TOKEN_S)[2]
    shared = 4 * BLOCK_TOKENS / (5 * BLOCK_TOKENS - 100)
    assert found["prefix"].hit_rate == pytest.approx(shared * 19 / 20, rel=0.01) == found[ONE_POOL].hit_rate
    assert found["round-robin"].hit_rate == pytest.approx(shared * 18 / 20, rel=0.01)


def test_a_hot_prefix_does_not_pile_up_on_one_node() -> None:
    """All at once: as much as one node would compute anew goes to the others."""
    figures = asyncio.run(Simulation("prefix", 4, 4000, TOKEN_S).run(families(1, 80, apart_s=0.01)))
    assert figures.busiest < 1.5


def test_a_request_that_fits_nowhere_is_counted() -> None:
    figures = asyncio.run(
        Simulation("prefix", 2, 4, TOKEN_S).run([(0.0, request_of(traced(0), 0)), *families(1, 1, 1.0)])
    )
    assert figures.refused == 2


def test_a_real_trace_twice_is_the_same_twice() -> None:
    requests = arrivals(TRACE, 120, 1.0)
    first, again = (measure(requests, [2], 4000, TOKEN_S) for _ in range(2))
    assert first == again
    assert first[2]["prefix"].hit_rate >= first[2]["load"].hit_rate
