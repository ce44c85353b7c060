"""A completion over HTTP is in the trace that its client began, or begins one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import ClientSession

from pdkv.errors import PeerLost
from pdkv.node.messages import GenerateEvent, GenerateRequest
from pdkv.tracing.span import SILENT, Span, current, tracing_by
from tests.http.fronts import Service, body, fronted
from tests.rpc.test_tracing import Heard
from tests.tracing.test_span import Told


class Traced(Service):
    """Notes the span that each request is asked in."""

    def __init__(self, **of: Any) -> None:
        super().__init__("hello", **of)
        self.spans: list[Span] = []

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.spans.append(current())
        return super().generate(request)


async def asked(service: Traced, *headers: tuple[str, str], path: str = "/v1/completions") -> int:
    async with fronted(service) as (_, address), ClientSession() as session:
        if path != "/v1/completions":
            async with session.get(f"http://{address}{path}", headers=list(headers)) as answer:
                return answer.status
        async with session.post(f"http://{address}{path}", json=body([1, 2]), headers=list(headers)) as answer:
            return answer.status


def test_it_is_asked_in_the_span_of_its_request() -> None:
    heard, service = Heard(), Traced()
    with tracing_by(heard):
        assert asyncio.run(asked(service, ("traceparent", "00-1"), ("traceparent", "00-2"), ("X-Other", "a"))) == 200
    assert heard.begun == [("POST /v1/completions", {"traceparent": ["00-1", "00-2"]}, "server", True)]
    assert service.spans == [heard.made]
    assert heard.made.facts == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "client.address": "127.0.0.1",
    }
    assert heard.made.ended == 1


def test_what_fails_is_told_with_its_error() -> None:
    heard, error = Heard(), PeerLost("gone")
    with tracing_by(heard):
        assert asyncio.run(asked(Traced(fails=error))) == 503
    made = heard.made
    assert isinstance(made, Told)
    assert (made.failures, made.ended) == ([error], 1)


def test_without_a_tracer_and_for_other_paths_nothing_is_told() -> None:
    service = Traced()
    assert asyncio.run(asked(service)) == 200
    assert service.spans == [SILENT]
    heard = Heard()
    with tracing_by(heard):
        assert asyncio.run(asked(service, path="/v1/models")) == 200
    assert heard.begun == []
