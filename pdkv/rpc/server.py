"""The gRPC server of a node or router.

Guarantees: a malformed message or a failing call ends that call, never the server; when a client cancels, its deadline
passes or it goes away, the event stream behind the call is closed before the call ends; `remaining_s` bounds a stream
even if the client set no deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdkv.errors import PdkvError
from pdkv.ids import RequestId
from pdkv.node.control import Control
from pdkv.node.flow import deadline
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
from pdkv.rpc.admin import AdminServicer
from pdkv.rpc.bench import BenchService, BenchServicer
from pdkv.rpc.convert import common, generate, intro, prefill, routing, source
from pdkv.rpc.convert.checks import MAX_DURATION_S, STREAM_SLACK_S, require_sendable
from pdkv.rpc.guard import Guard
from pdkv.rpc.health import LIVE, READY
from pdkv.rpc.interceptors import CallInterceptor
from pdkv.rpc.rank import RankServicer
from pdkv.rpc.security import Gate, PlainText, Security
from pdkv.rpc.transport import Endpoint, advertised, make_server, open_port
from pdkv.rpc.visit import VisitServicer
from pdkv.tracing.span import tracer
from pdkv.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    bench_pb2,
    bench_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    rank_pb2,
    rank_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    source_pb2,
    source_pb2_grpc,
    visit_pb2,
    visit_pb2_grpc,
)

if TYPE_CHECKING:
    from pdkv.node.rank import Rank  # it has tensors, and what a router imports has none

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class SourceService(Protocol):
    """`pdkv.node.source.Source`, as served."""

    async def connect(self, intro: NodeIntro) -> NodeIntro: ...
    async def locate(self, call: LocateCall) -> int: ...
    async def lend(self, call: LendCall) -> Loan: ...
    async def release_lease(self, call: LeaseCall) -> None: ...


class PrefillService(Protocol):
    """`pdkv.node.prefill.PrefillNode`, as served."""

    async def connect(self, intro: NodeIntro) -> NodeIntro: ...
    def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]: ...
    async def renew_lease(self, call: LeaseCall) -> float: ...
    async def release_lease(self, call: LeaseCall) -> None: ...
    def status(self) -> NodeStatus: ...
    def estimate(self, call: EstimateCall) -> Estimate: ...


class GenerateService(Protocol):
    """What a decode node and a router have in common."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]: ...


class DecodeService(GenerateService, Protocol):
    """`pdkv.node.decode.DecodeNode`, as served."""

    async def finish(self, request: RequestId, output_tokens: int) -> None: ...
    def status(self) -> NodeStatus: ...
    def estimate(self, call: EstimateCall) -> Estimate: ...


class RouterService(GenerateService, Protocol):
    """`pdkv.router.service.Router`, as served."""

    def status(self) -> RouterStatus: ...


# Streams are coroutines that write: gRPC would leave an async generator open when its call is cancelled in a write.


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, node: PrefillService) -> None:
        self._node = node

    async def Connect(self, request: prefill_pb2.Introduction, context: Context) -> prefill_pb2.Introduction:
        return await _connect(self._node, request)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        asked = prefill.prefill_request_from_pb(request)
        envelope = common.reply_envelope(asked.envelope)
        limit_s = asked.remaining_s + STREAM_SLACK_S
        async with deadline(limit_s, "Prefill"), aclosing(self._node.prefill(asked)) as events:
            async for event in events:
                await _write(context, prefill.prefill_event_to_pb(event, envelope))

    async def RenewLease(self, request: prefill_pb2.LeaseCall, context: Context) -> prefill_pb2.LeaseReply:
        call = prefill.lease_call_from_pb(request)
        ttl_s = await self._node.renew_lease(call)
        return prefill.lease_reply_to_pb(common.reply_envelope(call.envelope), ttl_s)

    async def ReleaseLease(self, request: prefill_pb2.LeaseCall, context: Context) -> prefill_pb2.LeaseReply:
        return await _release(self._node, request)

    async def Status(self, request: common_pb2.StatusRequest, context: Context) -> common_pb2.NodeStatus:
        return common.status_to_pb(self._node.status())

    async def Estimate(self, request: common_pb2.EstimateCall, context: Context) -> common_pb2.NodeEstimate:
        return routing.estimate_to_pb(self._node.estimate(routing.estimate_call_from_pb(request)))


class SourceServicer(source_pb2_grpc.SourceServicer):
    def __init__(self, source: SourceService) -> None:
        self._source = source

    async def Connect(self, request: prefill_pb2.Introduction, context: Context) -> prefill_pb2.Introduction:
        return await _connect(self._source, request)

    async def Locate(self, request: source_pb2.LocateCall, context: Context) -> source_pb2.LocateReply:
        call = source.locate_call_from_pb(request)
        return source.locate_reply_to_pb(common.reply_envelope(call.envelope), await self._source.locate(call))

    async def Lend(self, request: source_pb2.LendCall, context: Context) -> source_pb2.Loan:
        call = source.lend_call_from_pb(request)
        loan = source.loan_to_pb(await self._source.lend(call), common.reply_envelope(call.envelope))
        require_sendable(loan, "Lend")
        return loan

    async def ReleaseLease(self, request: prefill_pb2.LeaseCall, context: Context) -> prefill_pb2.LeaseReply:
        return await _release(self._source, request)


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, node: DecodeService) -> None:
        self._node = node

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        await _generate(self._node, request, context)

    async def Finish(self, request: decode_pb2.FinishCall, context: Context) -> decode_pb2.FinishReply:
        await self._node.finish(*generate.finish_call_from_pb(request))
        return decode_pb2.FinishReply()

    async def Status(self, request: common_pb2.StatusRequest, context: Context) -> common_pb2.NodeStatus:
        return common.status_to_pb(self._node.status())

    async def Estimate(self, request: common_pb2.EstimateCall, context: Context) -> common_pb2.NodeEstimate:
        return routing.estimate_to_pb(self._node.estimate(routing.estimate_call_from_pb(request)))


class RouterServicer(router_pb2_grpc.RouterServicer):
    def __init__(self, router: RouterService) -> None:
        self._router = router

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        await _generate(self._router, request, context)

    async def Status(self, request: common_pb2.StatusRequest, context: Context) -> router_pb2.RouterStatus:
        return routing.router_status_to_pb(self._router.status())


async def _connect(node: PrefillService | SourceService, request: prefill_pb2.Introduction) -> prefill_pb2.Introduction:
    reply = intro.introduction_to_pb(await node.connect(intro.introduction_from_pb(request)))
    require_sendable(reply, "Connect")
    return reply


async def _release(node: PrefillService | SourceService, request: prefill_pb2.LeaseCall) -> prefill_pb2.LeaseReply:
    call = prefill.lease_call_from_pb(request)
    await node.release_lease(call)
    return prefill.lease_reply_to_pb(common.reply_envelope(call.envelope), 0.0)


async def _generate(node: GenerateService, request: decode_pb2.GenerateRequest, context: Context) -> None:
    asked = generate.generate_request_from_pb(request)
    async with deadline(asked.remaining_s + STREAM_SLACK_S, "Generate"), aclosing(node.generate(asked)) as events:
        async for event in events:
            await _write(context, generate.generate_event_to_pb(event))


async def _write(context: Context, event: prefill_pb2.PrefillEvent | decode_pb2.GenerateEvent) -> None:
    require_sendable(event, type(event).__name__)
    await context.write(event)


@dataclass(frozen=True, slots=True)
class Services:
    """What a process serves: one of them, or several in tests and small deployments."""

    prefill: PrefillService | None = None
    decode: DecodeService | None = None
    router: RouterService | None = None
    rank: Rank | None = None
    source: SourceService | None = None
    """Of a node with a pool."""
    admin: Control | None = None
    visit: Callable[[], NodeIntro] | None = None
    """Introduces a node with a pool to a visitor."""
    bench: BenchService | None = None


class GrpcServer:
    """Listens from `start` to `stop`; SERVING by its own health service unless told otherwise."""

    def __init__(self, endpoint: Endpoint, services: Services, security: Security, gate: Gate | None = None) -> None:
        """Call it in the loop that will serve. Raises `ConfigError` if the address can't be bound, if what would be
        advertised is a wildcard, or for key files that can't be used."""
        advertised(endpoint, 0)
        gate = gate or Gate()
        self._security = security
        self._calls = CallInterceptor(Guard(security, gate), tracer())
        self._server = make_server([self._calls], gate, security)
        self._hanging_up: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = self._add(services)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = open_port(self._server, endpoint.bind, security)
        self.address = advertised(endpoint, self.port)
        """host:port for others."""

    def _add(self, services: Services) -> list[str]:
        names = []
        if services.prefill is not None:
            prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(services.prefill), self._server)
            names.append(prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name)
        if services.decode is not None:
            decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(services.decode), self._server)
            names.append(decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name)
        if services.router is not None:
            router_pb2_grpc.add_RouterServicer_to_server(RouterServicer(services.router), self._server)
            names.append(router_pb2.DESCRIPTOR.services_by_name["Router"].full_name)
        if services.rank is not None:
            rank_pb2_grpc.add_RankServicer_to_server(RankServicer(services.rank), self._server)
            names.append(rank_pb2.DESCRIPTOR.services_by_name["Rank"].full_name)
        if services.source is not None:
            source_pb2_grpc.add_SourceServicer_to_server(SourceServicer(services.source), self._server)
            names.append(source_pb2.DESCRIPTOR.services_by_name["Source"].full_name)
        if services.admin is not None:
            admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(services.admin), self._server)
            names.append(admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name)
        if services.visit is not None:
            visit_pb2_grpc.add_VisitServicer_to_server(VisitServicer(services.visit), self._server)
            names.append(visit_pb2.DESCRIPTOR.services_by_name["Visit"].full_name)
        if services.bench is not None:
            bench_pb2_grpc.add_BenchServicer_to_server(BenchServicer(services.bench), self._server)
            names.append(bench_pb2.DESCRIPTOR.services_by_name["Bench"].full_name)
        return names

    async def start(self) -> str:
        """Returns the advertised address once the server listens."""
        if isinstance(self._security, PlainText):
            log.warning("plain text on %s: whoever reaches it may use it and may say it is any node", self.address)
        await self._server.start()
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(serving=True)
        return self.address

    async def set_serving(self, *, serving: bool) -> None:
        """What the health service answers, for the whole server and for each of its services; `LIVE` it is anyway."""
        states = health_pb2.HealthCheckResponse
        for name in (READY, *self._names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def calls_ended(self) -> None:
        """Returns when no call runs: all that was said has been written."""
        await self._calls.ended()

    async def end_calls(self, error: PdkvError) -> None:
        """Calls that run end now, with `error`, as do new ones. What is cancelled by `stop` ends without a reason."""
        await self._calls.end(error)

    def hang_up(self) -> None:
        """Clients are told at once to connect to somebody else (HTTP/2's GOAWAY): connections end as soon as their
        calls have, and none is taken any more. To be followed by `stop`."""
        self._hanging_up = asyncio.create_task(self._server.stop(MAX_DURATION_S))

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING at once, no new calls; running ones have `grace_s` to end and are then cancelled."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        if self._hanging_up is not None:
            await self._hanging_up
