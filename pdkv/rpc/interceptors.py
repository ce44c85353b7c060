"""Stands between gRPC and the services: lets calls in, decodes requests, bounds calls, turns every error into a status.

Guarantees: whatever bytes a request has and whatever a service raises, only that call ends, with a named status;
cancellation passes through untouched; a unary call ends within its deadline; a server that ends says so in each call;
no service hears a caller that the guard refuses, or a message of a node that the caller is not; what ends alike again
and again has a line a minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from pdkv.errors import PdkvError, ProtocolError
from pdkv.node.flow import deadline
from pdkv.rpc.convert.checks import ADMIN_DEADLINE_S, BENCH_DEADLINE_S, RANK_DEADLINE_S, UNARY_DEADLINE_S
from pdkv.rpc.errors import status_of
from pdkv.rpc.guard import Guard
from pdkv.rpc.repeats import Repeats
from pdkv.rpc.tracing import serving
from pdkv.tracing.span import Tracer

log = logging.getLogger(__name__)

OURS = "/pdkv."
DEADLINES_S = {
    "/pdkv.v1.Rank/": RANK_DEADLINE_S,
    "/pdkv.v1.Admin/": ADMIN_DEADLINE_S,
    "/pdkv.v1.Bench/": BENCH_DEADLINE_S,
}
"""Of unary calls, by the beginning of their method; others have `UNARY_DEADLINE_S`."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Any], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """For pdkv's services only; health and reflection keep their own ways."""

    def __init__(self, guard: Guard, tracer: Tracer | None = None) -> None:
        self._guard = guard
        self._tracer = tracer
        self._repeats = Repeats()
        """A node that is refused dials again every few seconds."""
        self._running: set[asyncio.Task[Any]] = set()
        self._last_word: PdkvError | None = None

    async def ended(self) -> None:
        """Returns when no call runs: what a node has finished may still be on its way to the caller."""
        while running := set(self._running):
            await asyncio.wait(running)

    async def end(self, error: PdkvError) -> None:
        """Calls that run end now, with `error`, as do those that still come. Returns when the former have ended."""
        self._last_word = error
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OURS):
            return handler
        inner: Any = handler
        parse = inner.request_deserializer
        if inner.response_streaming:
            guarded = self._guarded(inner.unary_stream, parse, method)
            return grpc.unary_stream_rpc_method_handler(guarded, response_serializer=inner.response_serializer)
        guarded = self._guarded(_bounded(inner.unary_unary, method), parse, method)
        return grpc.unary_unary_rpc_method_handler(guarded, response_serializer=inner.response_serializer)

    def _guarded(self, behaviour: Behaviour, parse: Callable[[bytes], Any], method: str) -> Any:
        """`behaviour` on raw bytes; a coroutine function, as gRPC would leave an async generator open on a cancel."""

        async def call(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                with (
                    self._guard.let_in(context, method) as caller,
                    self._counted(),
                    serving(self._tracer, method, context),
                ):
                    request = _parsed(raw, parse, method)
                    caller.require_speaks(request)
                    return await behaviour(request, context)
            except grpc.aio.AbortError:
                raise
            except PdkvError as error:
                if line := self._repeats.line(f"{method} from {_host(context)} ends with {error.kind}: {error}"):
                    log.warning("%s", line)
                await _abort(context, error)
            except Exception as error:
                log.exception("%s from %s failed", method, context.peer())
                words = f"{method} failed with {type(error).__name__}; the node's log says more"
                await _abort(context, PdkvError(words))

        return call

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Raises the server's last word, if it has said it, in place of the cancellation that came with it."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("calls run inside a task")
        if self._last_word is not None:
            raise self._last_word
        self._running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._last_word is None:
                raise
            task.uncancel()
            raise self._last_word from None
        finally:
            self._running.discard(task)


def _host(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Of the caller, without the port: each of its connections has another one."""
    return context.peer().rpartition(":")[0]


def deadline_s(method: str) -> float:
    """Of a unary call."""
    return next((limit_s for start, limit_s in DEADLINES_S.items() if method.startswith(start)), UNARY_DEADLINE_S)


def _bounded(behaviour: Behaviour, method: str) -> Behaviour:
    limit_s = deadline_s(method)

    async def call(request: Any, context: Any) -> Any:
        async with deadline(limit_s, method):
            return await behaviour(request, context)

    return call


def _parsed(raw: bytes, parse: Callable[[bytes], Any], method: str) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise ProtocolError(f"{method}: the request can't be decoded", method=method) from error


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PdkvError) -> NoReturn:
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
