"""Two nodes at work, and routers that listen: what they were told is what each node has."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from pdkv.adapters.events import EventSettings, event_publisher
from pdkv.node.messages import GenerateRequest, Namespace, Sampling
from pdkv.node.prompt import plan_prompt
from tests.adapters.events.consumers import LAYOUTS, Subscriber
from tests.node.scene import answers, request, rested, run
from tests.node.toy import Pair, make_pair
from tests.waiting import DEADLINE_S

NAMESPACES = (Namespace("", ""), Namespace("", "salt"), Namespace("adapter", ""))


def workload() -> list[GenerateRequest]:
    """Prompts that share prefixes, in three namespaces, some asked for again; more than a pool holds."""
    asked = []
    for turn in range(12):
        length, seed = (130, 200, 260, 330)[turn % 4], turn % 3
        made = request(length, seed=seed, name=f"r{turn}", namespace=NAMESPACES[turn // 2 % 3])
        asked.append(replace(made, sampling=Sampling(max_tokens=2)))
    return asked


def ids_of(node: object, asked: list[GenerateRequest]) -> list[int]:
    """Public ids of all pages that its tree has."""
    found: set[int] = set()
    for each in asked:
        prompt = plan_prompt(each.tokens, each.namespace, node.parts.contract)  # type: ignore[attr-defined]
        have = node.parts.manager.tree.match(prompt.hashes).pages.size  # type: ignore[attr-defined]
        found |= set(prompt.public.ids(0, have))
    return sorted(found)


@pytest.mark.parametrize("rule", ["none", "bigram"])
def test_a_router_knows_what_each_node_has(rule: str) -> None:
    asked = workload()

    async def scenario(pair: Pair) -> None:
        with ExitStack() as stack:
            routers = []
            for node in pair.nodes:
                anywhere = "tcp://127.0.0.1:*"
                of = event_publisher(EventSettings(anywhere, anywhere, "kv@n@m"), node.parts.pool.num_pages)
                stack.callback(of.close)
                node.parts.manager.observer = of
                layout = LAYOUTS["array"]["sglang, positional"]
                routers.append(stack.enter_context(Subscriber(of.address, of.replay_address, layout)))
            for each in asked:
                await answers(pair.decode.generate(each))
            await rested(pair)
            for node, router in zip(pair.nodes, routers, strict=True):
                assert node.parts.manager.evicted_pages > 0
                expected = ids_of(node, asked)
                until = time.monotonic() + DEADLINE_S
                while router.index.ids != expected and time.monotonic() < until:
                    router.catch_up()
                assert router.index.ids == expected
                assert expected

    facts = {"eagle_rule": rule, "speculation": "eagle" if rule != "none" else "none"}
    run(scenario, make_pair(pages=12, both=facts))
