"""Nodes without engines behind a real server on this machine's loopback address."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pdkv.errors import PdkvError, UnknownRequest
from pdkv.ids import RequestId
from pdkv.node.messages import (
    GenerateEvent,
    GenerateRequest,
    LeaseCall,
    LendCall,
    Loan,
    LocateCall,
    NodeIntro,
    NodeStatus,
    PrefillEvent,
    PrefillRequest,
)
from pdkv.node.routing import Estimate, EstimateCall, RouterStatus
from pdkv.rpc.client import ClientSettings, GrpcDirectory
from pdkv.rpc.security import PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from tests.rpc import samples

T = TypeVar("T")
LIMIT_S = 30.0


def run(body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """One loop a test; a hang ends as an error."""
    return asyncio.run(asyncio.wait_for(body(), LIMIT_S))


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), LIMIT_S)


class Stream:
    """An event stream that says when it has begun and when, and by what, it was ended."""

    def __init__(self, *events: Any, error: BaseException | None = None, hangs: bool = False) -> None:
        self.events = events
        self.error = error
        self.hangs = hangs
        self.waiting = asyncio.Event()
        """All events are out; a hanging stream waits here."""
        self.ended = asyncio.Event()
        self.end: str = ""
        self.opened: list[AsyncGenerator[Any, None]] = []
        """Kept, so that only a caller that closes them ends them, not the garbage collector."""

    def __call__(self, request: Any) -> AsyncGenerator[Any, None]:
        self.request = request
        self.opened.append(self._run())
        return self.opened[-1]

    async def _run(self) -> AsyncGenerator[Any, None]:
        try:
            for event in self.events:
                yield event
            self.waiting.set()
            if self.hangs:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
            self.end = "done"
        except BaseException as error:
            self.end = type(error).__name__
            raise
        finally:
            self.ended.set()


class FakePrefill:
    """`PrefillService` by script."""

    def __init__(self, stream: Stream | None = None, error: Exception | None = None) -> None:
        self.stream = stream or Stream()
        self.error = error
        self.calls: list[Any] = []

    async def connect(self, intro: NodeIntro) -> NodeIntro:
        self._note(intro)
        return samples.intro()

    def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        return self.stream(request)

    async def renew_lease(self, call: LeaseCall) -> float:
        self._note(call)
        return 30.0

    async def release_lease(self, call: LeaseCall) -> None:
        self._note(call)

    def status(self) -> NodeStatus:
        self._note(None)
        return samples.status("prefill")

    def estimate(self, call: EstimateCall) -> Estimate:
        self._note(call)
        return Estimate(samples.P, len(call.hashes), 640, 12)

    def _note(self, call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error


class FakeSource(FakePrefill):
    """`SourceService` by script."""

    async def locate(self, call: LocateCall) -> int:
        self._note(call)
        return 2

    async def lend(self, call: LendCall) -> Loan:
        self._note(call)
        return samples.LOAN


class FakeDecode:
    """`DecodeService` by script."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream or Stream()
        self.finished: list[tuple[RequestId, int]] = []

    async def finish(self, request: RequestId, output_tokens: int) -> None:
        if request != samples.generate_request().request_id:
            raise UnknownRequest(f"no request {request} runs here", request=request)
        self.finished.append((request, output_tokens))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        return self.stream(request)

    def status(self) -> NodeStatus:
        return samples.status("decode", samples.D)

    def estimate(self, call: EstimateCall) -> Estimate:
        return Estimate(samples.D, len(call.hashes), 0, 12)


class FakeRouter(FakeDecode):
    """`RouterService` by script."""

    def status(self) -> RouterStatus:  # type: ignore[override]
        return RouterStatus({"a:1": "up"}, {"b:2": "up"}, 4)


@asynccontextmanager
async def serving(
    prefill: FakePrefill | None = None, decode: FakeDecode | None = None, router: FakeRouter | None = None
) -> AsyncIterator[tuple[GrpcServer, GrpcDirectory]]:
    server = GrpcServer(Endpoint("127.0.0.1:0"), Services(prefill, decode, router), PlainText())
    await server.start()
    directory = GrpcDirectory(PlainText(), ClientSettings(LIMIT_S, LIMIT_S))
    try:
        yield server, directory
    finally:
        await directory.close()
        await server.stop(0)


async def collect(events: AsyncGenerator[T, None]) -> list[T]:
    return [event async for event in events]


async def failure(events: AsyncGenerator[Any, None]) -> tuple[list[Any], PdkvError]:
    """What came before the error that must come."""
    seen = []
    try:
        async for event in events:
            seen.append(event)
    except PdkvError as error:
        return seen, error
    raise AssertionError(f"ended well after {len(seen)} events")
