"""Waiting for a service to be ready.

Guarantees: what is waited for is the service's own word (gRPC's health service says SERVING), not a port that is open;
the wait has an end, and its error says what was seen last.
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

_STATES = health_pb2.HealthCheckResponse.ServingStatus


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
