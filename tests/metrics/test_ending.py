"""The line that the log has of a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from typing import Any

import pytest

from pdkv.errors import PeerLost
from pdkv.ids import RequestId
from pdkv.metrics.ending import OF_SHIPMENT, WORDS, Ending, answer_facts, cached_tokens
from pdkv.node.messages import GenerateDone, GenerateEvent, Shipment, Speculation, Token
from tests.metrics.test_served import metered
from tests.node.scene import answers, request, run
from tests.node.toy import Pair, make_pair

R = RequestId("r")
SHIPMENT = Shipment(**{of: n for n, of in enumerate(OF_SHIPMENT.values(), 1)}, prompt_tokens=300)
DONE = GenerateDone("stop", 2, SHIPMENT, (128,), Speculation(3, 9, 5), 1, 2, 44)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [{**record.facts, "level": record.levelname} for record in caplog.records if record.message == WORDS]  # type: ignore[attr-defined]


async def told(*events: GenerateEvent, then: BaseException | None = None) -> AsyncGenerator[GenerateEvent, None]:
    for event in events:
        yield event
    if then is not None:
        raise then


def ending_of(*events: GenerateEvent, then: BaseException | None = None) -> Ending:
    ending = Ending(R, 300)

    async def body(pair: Pair) -> None:
        ends = pytest.raises(type(then)) if then else nullcontext()
        with ends:
            async with aclosing(ending.watch(told(*events, then=then))) as seen:
                assert [event async for event in seen] == list(events)

    run(body, make_pair())
    return ending


def test_an_answer_has_its_account() -> None:
    ending = ending_of(Token(0, 5, 0.0), Token(1, 6, 0.0), DONE)
    facts = answer_facts(ending)
    assert (ending.outcome, facts["output_tokens"], facts["finish_reason"]) == ("done", 2, "stop")
    assert [facts[name] for name in OF_SHIPMENT] == list(range(1, len(OF_SHIPMENT) + 1))
    assert (facts["cached_tokens"], facts["drafted_tokens"], facts["accepted_tokens"]) == (128, 9, 5)
    assert (facts["preemptions"], facts["retries"], facts["recomputed_tokens"]) == (1, 2, 44)
    assert ending.ttft_s is not None
    assert ending.first_step_s is not None


def test_of_an_error_its_kind_words_and_place(caplog: pytest.LogCaptureFixture) -> None:
    ending = ending_of(Token(0, 5, 0.0), then=PeerLost("gone", address="a:1", accepted_by="b:2"))
    with caplog.at_level("INFO"):
        ending.say(answer_facts(ending))
    (line,) = lines(caplog)
    assert line.pop("total_s") >= line.pop("ttft_s") >= 0
    assert line == {
        "request": R,
        "outcome": "PeerLost",
        "error": "gone",
        "failed_at": "b:2",
        "prompt_tokens": 300,
        "output_tokens": 1,
        "level": "WARNING",
    }


@pytest.mark.parametrize(
    ("error", "outcome", "level"),
    [
        (ZeroDivisionError(), "PdkvError", "WARNING"),
        (asyncio.CancelledError(), "aborted", "INFO"),
        (GeneratorExit(), "aborted", "INFO"),
    ],
)
@pytest.mark.parametrize("last", [(), (DONE,)])
def test_a_bug_is_no_abort(
    error: BaseException, outcome: str, level: str, last: tuple[GenerateDone, ...], caplog: pytest.LogCaptureFixture
) -> None:
    ending = ending_of(Token(0, 5, 0.0), *last, then=error)
    with caplog.at_level("INFO"):
        ending.say({})
    (line,) = lines(caplog)
    assert (line["outcome"], line["level"]) == (("done", "INFO") if last else (outcome, level))


@pytest.mark.parametrize(("starts", "due"), [((), 300), ((0, 128), 0), ((192,), 192)])
def test_cached_tokens_are_those_before_the_first_that_was_computed(starts: tuple[int, ...], due: int) -> None:
    assert cached_tokens(starts, 300) == due


def test_two_nodes_say_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    async def body(pair: Pair) -> None:
        metered(pair)
        for name in ("a", "b"):
            await answers(pair.decode.generate(request(300, name=name)))
        async with aclosing(pair.decode.generate(request(300, name="c"))) as events:
            await anext(events)

    with caplog.at_level(logging.INFO):
        run(body, make_pair())
    by_decode = [line for line in lines(caplog) if "peer" not in line]
    by_prefill = [line for line in lines(caplog) if "peer" in line]
    assert [line["outcome"] for line in by_decode] == ["done", "done", "aborted"]
    assert len(by_prefill) == 3
    first, second, cut = by_decode
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 256)
    assert first["shipped_pages"] == first["digests_verified"] == 5
    parts = sum(first[f"{stage}_s"] for stage in ("queue", "prefill", "exposed_transfer", "verify"))
    assert parts == pytest.approx(first["ttft_s"], abs=0.2)
    assert [line["prefill_request"] for line in (first, second)] == [line["request"] for line in by_prefill[:2]]
    assert first["decode_node"] == by_prefill[0]["peer"]
    assert cut["output_tokens"] >= 1
    assert "main_bytes" not in cut
    assert by_prefill[1]["cached_tokens"] == 256
