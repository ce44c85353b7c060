"""Stands between gRPC and the services: decodes requests, bounds calls, turns every error into a status.

Guarantees: whatever bytes a request has and whatever a service raises, only that call ends, with a named status;
cancellation passes through untouched; a unary call ends within `UNARY_DEADLINE_S`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from pdkv.errors import PdkvError, ProtocolError
from pdkv.node.flow import deadline
from pdkv.rpc.errors import status_of

log = logging.getLogger(__name__)

OURS = "/pdkv."
UNARY_DEADLINE_S = 30.0

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Any], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """For pdkv's services only; health and reflection keep their own ways."""

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
            guarded = _guarded(inner.unary_stream, parse, method)
            return grpc.unary_stream_rpc_method_handler(guarded, response_serializer=inner.response_serializer)
        bounded = _bounded(inner.unary_unary, method)
        return grpc.unary_unary_rpc_method_handler(
            _guarded(bounded, parse, method), response_serializer=inner.response_serializer
        )


def _bounded(behaviour: Behaviour, method: str) -> Behaviour:
    async def call(request: Any, context: Any) -> Any:
        async with deadline(UNARY_DEADLINE_S, method):
            return await behaviour(request, context)

    return call


def _guarded(behaviour: Behaviour, parse: Callable[[bytes], Any], method: str) -> Any:
    """`behaviour` on raw bytes; a coroutine function, as gRPC would leave an async generator open on a cancel."""

    async def call(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(_parsed(raw, parse, method), context)
        except grpc.aio.AbortError:
            raise
        except PdkvError as error:
            log.warning("%s from %s ends with %s: %s", method, context.peer(), error.kind, error)
            await _abort(context, error)
        except Exception as error:
            log.exception("%s from %s failed", method, context.peer())
            await _abort(context, PdkvError(f"{method} failed with {type(error).__name__}; the node's log says more"))

    return call


def _parsed(raw: bytes, parse: Callable[[bytes], Any], method: str) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise ProtocolError(f"{method}: the request can't be decoded", method=method) from error


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PdkvError) -> NoReturn:
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
