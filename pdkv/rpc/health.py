"""Asking a service how it is, and waiting until it is ready.

Guarantees: what counts is the service's own word (gRPC's health service says SERVING), not a port that is open; the
wait has an end, and its error says what was seen last.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdkv.errors import DeadlineExceeded
from pdkv.node.flow import deadline
from pdkv.rpc.channels import Channels
from pdkv.rpc.errors import error_from
from pdkv.rpc.security import Security

READY = ""
"""What the health service calls the process as a whole: SERVING while it can serve."""
LIVE = "live"
"""The same of a process that answers at all: SERVING from its first call to its last, ready or not."""
_STATES = health_pb2.HealthCheckResponse.ServingStatus


async def state_of(address: str, security: Security, *, service: str = READY, node: str = "", within_s: float) -> str:
    """What `address` says: SERVING or NOT_SERVING. Under TLS its certificate has to name `node`, if that isn't empty.

    Raises `DeadlineExceeded`, `ConfigError` for an address or key files that can't be used, and what a call raises.
    """
    channels = Channels(security)
    try:
        async with deadline(within_s, f"asking {address} how it is"):
            with channels.to(address, node) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                try:
                    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                except grpc.aio.AioRpcError as error:
                    raise error_from(error, address=address, what="Check") from error
                return _STATES.Name(reply.status)
    finally:
        await channels.close()


async def until_serving(address: str, security: Security, *, within_s: float) -> None:
    """Return once `address` answers SERVING. Raises `DeadlineExceeded` with what it answered last, `ConfigError` for an
    address or key files that can't be used, and what a call raises to a service that has no health to tell."""
    channels = Channels(security)
    last = "nothing answered"
    try:
        async with deadline(within_s, f"waiting for {address} to serve"):
            while True:
                with channels.to(address) as channel:
                    try:
                        stub: Any = health_pb2_grpc.HealthStub(channel)
                        async for reply in stub.Watch(health_pb2.HealthCheckRequest()):
                            if reply.status == _STATES.Value("SERVING"):
                                return
                            last = f"it answers {_STATES.Name(reply.status)}"
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.UNAVAILABLE:
                            raise error_from(error, address=address, what="Watch") from error
                        last = str(error_from(error, address=address, what="Watch"))
                    # nobody there, or gone again: the channel tries anew by itself, at its own pace
                    await channel.wait_for_state_change(channel.get_state(try_to_connect=True))
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error}; {last}", address=address) from error
    finally:
        await channels.close()
