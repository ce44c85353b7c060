"""What all bodies together may hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from multidict import CIMultiDict

from pdkv.errors import BodyTooLarge, FieldRefused, LimitReached, SlowClient
from pdkv.http.intake import BODIES, Intake


class Request:
    """As much of aiohttp's as is used."""

    def __init__(self, *parts: bytes, said: int | None = None, ends: bool = True, **headers: str) -> None:
        self.headers = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
        self.content_length = said
        self.content = self
        self._parts = parts
        self._ends = ends

    async def iter_any(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if not self._ends:
            await asyncio.Event().wait()


def read(intake: Intake, request: Any) -> bytes:
    async def body() -> bytes:
        async with intake.body(request) as raw:
            return raw

    return asyncio.run(body())


def test_a_body_in_parts() -> None:
    assert read(Intake(10, 5.0), Request(b"ab", b"cd")) == b"abcd"


@pytest.mark.parametrize("request_", [Request(b"x" * 11), Request(b"x" * 6, b"x" * 5), Request(said=11)])
def test_one_that_is_too_large(request_: Request) -> None:
    with pytest.raises(BodyTooLarge, match="11; allowed: at most 10"):
        read(Intake(10, 5.0), request_)


def test_one_that_does_not_come() -> None:
    with pytest.raises(SlowClient):
        read(Intake(10, 0.01), Request(b"x", ends=False))


def test_a_compressed_one_is_refused_unread() -> None:
    with pytest.raises(FieldRefused, match="Content-Encoding"):
        read(Intake(10, 5.0), Request(b"x", Content_Encoding="gzip"))


def test_all_together_hold_so_much_and_give_it_back() -> None:
    intake = Intake(10, 5.0)

    async def body() -> None:
        gone = asyncio.Event()

        async def held() -> None:
            async with intake.body(Request(b"x" * 10)):  # type: ignore[arg-type]
                await gone.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(BODIES):
                group.create_task(held())
            await asyncio.sleep(0)
            with pytest.raises(LimitReached):
                async with intake.body(Request(b"x")):  # type: ignore[arg-type]
                    pass
            gone.set()

    asyncio.run(body())
    assert read(intake, Request(b"x" * 10)) == b"x" * 10
