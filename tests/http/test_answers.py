"""Objects of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from pdkv.errors import PeerLost
from pdkv.http.answers import Answer, event, models, spoken
from pdkv.http.speech import Speech
from pdkv.http.tokenizer import ByteTokenizer
from pdkv.node.messages import GenerateDone, GenerateEvent, Shipment, Token

DONE = GenerateDone("length", 3, Shipment(), (128,))


async def told(*events: GenerateEvent) -> AsyncGenerator[GenerateEvent, None]:
    for each in events:
        yield each


def heard(text: str, stop: tuple[str, ...] = (), *, ends: bool = True) -> tuple[list[str], Answer]:
    answer = Answer("c", "tiny", 5, 200, shows_ids=True)
    tokens = [Token(n, token, 0.0) for n, token in enumerate(text.encode())]

    async def finish(tokens: int) -> GenerateDone:
        return replace(DONE, finish_reason="stop", output_tokens=tokens)

    async def body() -> list[str]:
        speech = Speech(ByteTokenizer().decoder(), stop)
        return [part async for part in spoken(told(*tokens, *([DONE] if ends else [])), speech, answer, finish)]

    return asyncio.run(body()), answer


def test_an_answer_with_its_account() -> None:
    parts, answer = heard("abc")
    assert parts == ["a", "b", "c", ""]
    choice = {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "token_ids": [97, 98, 99]}
    assert answer.said("abc", usage=True) == {
        "id": "c",
        "object": "text_completion",
        "created": 5,
        "model": "tiny",
        "choices": [choice],
        "usage": {
            "prompt_tokens": 200,
            "completion_tokens": 3,
            "total_tokens": 203,
            "prompt_tokens_details": {"cached_tokens": 128},
        },
    }
    assert answer.said("")["choices"][0]["token_ids"] == []
    assert answer.said("", usage=False)["usage"] is None
    assert answer.usage_alone()["choices"] == []


def test_an_answer_that_a_stop_string_ends_has_the_account_of_its_finish() -> None:
    parts, answer = heard("abc", ("b",))
    assert (parts, answer.reason, answer.tokens) == (["a", ""], "stop", 2)
    assert answer.done == replace(DONE, finish_reason="stop", output_tokens=2)
    assert answer.usage_alone()["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}


def test_events_without_an_end_are_no_answer() -> None:
    with pytest.raises(PeerLost, match="without a last word"):
        heard("abc", ends=False)


def test_an_event_is_one_line() -> None:
    assert event({"text": "a\n\nb"}) == b'data: {"text": "a\\n\\nb"}\n\n'


def test_models() -> None:
    assert [model["id"] for model in models(["a", "b"], 5)["data"]] == ["a", "b"]
