"""Metrics of processes that serve."""

from __future__ import annotations

import asyncio
import re
import urllib.request

from tests.e2e.world import World, free_address
from tests.test_docs_metrics import exported, written


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def families(text: str) -> set[str]:
    """Names of all that is exported, of counters that have counted nothing too."""
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_both_nodes_and_the_router_say_what_a_request_took(world: World) -> None:
    names = exported()

    async def body() -> None:
        at = {role: free_address() for role in ("prefill", "decode", "router")}
        prefill = await world.start("prefill", "metered-p", metrics_bind=at["prefill"])
        decode = await world.start("decode", "metered-d", prefill_addresses=prefill.address, metrics_bind=at["decode"])
        router = await world.start_router("metered-r", prefill, decode, metrics_bind=at["router"])
        try:
            asked = world.request(60, 700)
            await world.ask(type(asked)(asked.request_id, asked.tokens, sampling=asked.sampling), router)
            said = {role: await asyncio.to_thread(scraped, address) for role, address in at.items()}
        finally:
            for node in (router, decode, prefill):
                await node.stop()
        for role, text in said.items():
            assert families(text) <= names, "docs, alerts and dashboard are held against these names"
            assert written(role) <= families(text)
        seen = {role: values(text) for role, text in said.items()}
        for role in at:
            assert seen[role]['pdkv_requests_total{outcome="done"}'] == 1, role
            assert seen[role]["pdkv_ready"] == 1, role
        assert seen["decode"]["pdkv_request_bytes_count"] == 1
        assert seen["decode"]['pdkv_prompt_pages_total{source="shipped"}'] == 11
        assert seen["decode"]['pdkv_pages{class="cached"}'] >= 10
        assert seen["prefill"]["pdkv_prefill_seconds_sum"] > 0
        assert seen["router"]['pdkv_router_nodes{role="prefill",state="up"}'] == 1

    world.run(body())
