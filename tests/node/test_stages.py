"""A request passes the stages of its life in their order, and a hook that raises fails it there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pdkv.ids import RequestId
from pdkv.node.decode import DecodeSettings
from pdkv.node.prefill import PrefillNode
from pdkv.node.stages import Stage, no_hook
from tests.node.scene import answers, gated, request, rested, run, until
from tests.node.toy import Pair, make_pair


def test_each_stage_is_named_after_its_node() -> None:
    assert {stage.partition(".")[0] for stage in Stage} == {"decode", "prefill"}


def test_without_a_hook_nothing_is_done() -> None:
    no_hook(Stage.ASKED, RequestId("r"))


def test_prefill_hears_of_its_leases_by_the_requests_id() -> None:
    seen: list[tuple[Stage, str]] = []

    async def scenario(pair: Pair) -> None:
        parts = replace(pair.prefill.parts, at=lambda stage, request: seen.append((stage, request)))
        pair.prefill = pair.directory.peers["p0"] = PrefillNode(parts, pair.prefill.settings)
        gate = gated(pair.prefill.parts.engine, "forward", at=2)
        asking = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await gate.reached()
        await until(lambda: seen[-1][0] is Stage.RENEWED)
        gate.open()
        await asking
        await rested(pair)

    run(scenario, make_pair(settings=DecodeSettings(prefill_addresses=("p0",), silence_s=3.0)))  # renewed each second
    stages = [stage for stage, _ in seen]
    assert stages[:2] == [Stage.LEASED, Stage.COMPUTING]
    assert stages[-2:] == [Stage.DONE, Stage.RELEASED]
    assert {asked for _, asked in seen} == {"d0-0"}
