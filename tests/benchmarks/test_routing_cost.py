"""The benchmark of what routing costs: a process of nodes that have half of each prompt, and what is made of rounds."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.routing import contract
from benchmarks.routing_cost import NOTHING, Rows, Tree, asked, measure
from pdkv.node.prompt import plan_prompt
from pdkv.node.routing import EstimateCall


def test_a_node_has_half_of_each_prompt() -> None:
    tree = Tree("p0", [100, 6400])
    for tokens, due in ((100, 0), (6400, 50), (6464, 0)):
        hashes = plan_prompt(asked(tokens).tokens, asked(tokens).namespace, contract()).hashes
        assert tree.estimate(EstimateCall(hashes)).pages == due
    assert tree.estimate(NOTHING).pages == 0


def test_medians_in_milliseconds() -> None:
    figures = Rows([0.003, 0.001, 0.002], [0.001] * 3, [0.004, 0.0, 0.005]).figures()
    assert (figures.wait_ms, figures.router_cpu_ms, figures.nodes_cpu_ms) == pytest.approx((2.0, 1.0, 4.0))
    assert figures.wait_p95_ms == pytest.approx(2.0)


def test_nodes_in_another_process_answer() -> None:
    found = asyncio.run(measure(2, [640], 3))
    assert set(found[640]) == {"ask", "call", "hashes"}
    assert found[640]["ask"].wait_ms > found[640]["hashes"].wait_ms > 0
