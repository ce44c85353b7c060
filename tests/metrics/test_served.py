"""What is counted of requests, on two nodes in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from pdkv.errors import ContractMismatch, PdkvError
from pdkv.metrics.names import FIRST_STEP, TTFT_STAGES, Metrics
from pdkv.metrics.served import MeteredDecodeNode, MeteredPrefillNode
from pdkv.metrics.timeline import Timeline
from pdkv.node.messages import GenerateRequest
from tests.node.scene import answers, request, run
from tests.node.toy import Pair, make_pair


def metered(pair: Pair) -> tuple[Metrics, Metrics]:
    """The pair's own nodes, counted from now on: (prefill's, decode's)."""
    of_prefill, of_decode = Metrics(), Metrics()
    prefill: Any = pair.prefill
    prefill.__class__, prefill.metrics = MeteredPrefillNode, of_prefill
    decode: Any = pair.decode
    decode.__class__, decode.metrics, decode.timeline = MeteredDecodeNode, of_decode, Timeline()
    # the parts are frozen, and held by all that was made of them
    object.__setattr__(decode.parts, "at", decode.timeline.hook)
    return of_prefill, of_decode


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    return 0.0 if found is None else found


def counted(body: Callable[[Pair], Awaitable[None]], pair: Pair) -> tuple[Metrics, Metrics]:
    both: list[tuple[Metrics, Metrics]] = []

    async def scenario(pair: Pair) -> None:
        both.append(metered(pair))
        await body(pair)

    run(scenario, pair)
    return both[0]


def test_a_request_is_counted_with_its_account() -> None:
    async def body(pair: Pair) -> None:
        for name in ("a", "b"):
            await answers(pair.decode.generate(request(300, name=name)))

    prefill, decode = counted(body, make_pair())
    assert value(decode, "pdkv_requests_total", outcome="done") == 2
    assert value(prefill, "pdkv_requests_total", outcome="done") == 2
    assert value(decode, "pdkv_ttft_seconds_count") == 2
    assert value(decode, "pdkv_prompt_pages_total", source="hit") >= 4
    assert value(decode, "pdkv_prompt_pages_total", source="shipped") >= 5
    assert value(decode, "pdkv_verified_pages_total") == value(decode, "pdkv_prompt_pages_total", source="shipped")
    assert value(decode, "pdkv_transferred_bytes_total", cache="main") > 0
    assert value(decode, "pdkv_transferred_bytes_total", cache="index") > 0
    assert (
        value(decode, "pdkv_tokens_total", kind="prompt") == value(prefill, "pdkv_tokens_total", kind="prompt") == 600
    )
    assert value(decode, "pdkv_tokens_total", kind="output") == 16
    for stage in (*TTFT_STAGES, FIRST_STEP):
        assert value(decode, "pdkv_stage_seconds_count", stage=stage) == 2, stage
    parts = sum(value(decode, "pdkv_stage_seconds_sum", stage=stage) for stage in TTFT_STAGES)
    assert parts == pytest.approx(value(decode, "pdkv_ttft_seconds_sum"), abs=0.2)
    assert value(prefill, "pdkv_prefill_seconds_count") == 2
    assert value(prefill, "pdkv_hit_pages_count") == 2


def test_a_client_that_goes_away_aborts() -> None:
    async def body(pair: Pair) -> None:
        async with aclosing(pair.decode.generate(request(300))) as events:
            await anext(events)

    _, decode = counted(body, make_pair())
    assert value(decode, "pdkv_requests_total", outcome="aborted") == 1
    assert value(decode, "pdkv_requests_total", outcome="done") == 0


def test_a_client_that_has_enough_is_done(caplog: pytest.LogCaptureFixture) -> None:
    async def body(pair: Pair) -> None:
        asked = request(300)
        async with aclosing(pair.decode.generate(asked)) as events:
            await anext(events)
            await pair.decode.finish(asked.request_id, 1)
            async for _ in events:
                pass

    caplog.set_level("INFO", "pdkv.request")
    _, decode = counted(body, make_pair())
    assert value(decode, "pdkv_requests_total", outcome="done") == 1
    assert value(decode, "pdkv_requests_total", outcome="aborted") == 0
    assert value(decode, "pdkv_tokens_total", kind="output") == 1
    facts = [record.facts for record in caplog.records if "output_tokens" in getattr(record, "facts", {})]  # type: ignore[attr-defined]
    assert [(of["finish_reason"], of["output_tokens"]) for of in facts] == [("stop", 1)]


async def refused(pair: Pair, asked: GenerateRequest) -> PdkvError:
    with pytest.raises(PdkvError) as error:
        await answers(pair.decode.generate(asked))
    return error.value


def test_damage_is_counted_by_its_name() -> None:
    async def body(pair: Pair) -> None:
        await refused(pair, request(300, fault="flip-bit"))

    _, decode = counted(body, make_pair())
    assert value(decode, "pdkv_requests_total", outcome="DigestMismatch") == 1
    assert value(decode, "pdkv_digest_failures_total") == 1


def test_refusals_are_counted_by_field() -> None:
    async def body(pair: Pair) -> None:
        assert isinstance(await refused(pair, request(300)), ContractMismatch)

    prefill, decode = counted(body, make_pair(weights_id="others"))
    assert value(decode, "pdkv_requests_total", outcome="ContractMismatch") == 1
    assert value(decode, "pdkv_refusals_total", field="weights_id") == 1
    assert value(prefill, "pdkv_refusals_total", field="weights_id") == 1


def test_a_second_request_of_an_id_takes_nothing_from_the_first() -> None:
    async def body(pair: Pair) -> None:
        first = asyncio.create_task(answers(pair.decode.generate(request(300))))
        await asyncio.sleep(0)
        await refused(pair, request(300))
        await first

    _, decode = counted(body, make_pair())
    assert value(decode, "pdkv_requests_total", outcome="DuplicateRequest") == 1
    assert value(decode, "pdkv_stage_seconds_count", stage="queue") == 1
