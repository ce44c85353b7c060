"""Who is at an address that a client was given, and why it doesn't serve.

Guarantees: asking changes nothing; what was wrong is said as it was, with what this adds; where nothing can be added,
alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdkv.cli.status import status_of
from pdkv.errors import ConfigError, DeadlineExceeded, PdkvError, RemoteError

if TYPE_CHECKING:
    from pdkv.node.messages import NodeStatus
    from pdkv.node.routing import RouterStatus
    from pdkv.rpc.client import GrpcDirectory
    from pdkv.rpc.security import Security

FLAGS = {"decode": "--decode", "router": "--router"}
"""Roles that generate."""


async def wait_for(directory: GrpcDirectory, address: str, security: Security, within_s: float) -> None:
    """Return once it serves. Raises `DeadlineExceeded` with what it says of itself and of the nodes that it knows, and
    as `until_serving`."""
    from pdkv.rpc.health import until_serving

    try:
        await until_serving(address, security, within_s=within_s)
    except DeadlineExceeded as error:
        try:
            found = await status_of(directory, address)
        except PdkvError:
            raise error from None
        raise DeadlineExceeded(f"{error}: {why_not(found)}", **error.fields) from error


@asynccontextmanager
async def known_as(directory: GrpcDirectory, address: str, flag: str) -> AsyncIterator[None]:
    """Around a call to a service of `address`, which came by `flag`. Raises `ConfigError` if another one is there."""
    try:
        yield
    except RemoteError as error:
        if error.fields.get("code") != "UNIMPLEMENTED":
            raise
        role = role_of(await status_of(directory, address))
        way = f"; {FLAGS[role]} is for it" if role in FLAGS else ", which is asked over a decode node or a router"
        raise ConfigError(flag, address, f"a {flag.strip('-')}; a {role} node answers there{way}") from error


def role_of(found: NodeStatus | RouterStatus) -> str:
    return getattr(found, "role", "router")


def why_not(found: NodeStatus | RouterStatus) -> str:
    """What a service that doesn't serve says of that."""
    nodes = {role: getattr(found, role, None) for role in ("prefill", "decode")}
    if role_of(found) != "router":
        return str(getattr(found, "unready", "")) or "it is ready by now"
    said = [f"{role} {at} is {why}" for role, known in nodes.items() for at, why in (known or {}).items()]
    missing = [f"no {role} node" for role, known in nodes.items() if not known]
    return "; ".join(["it knows " + ", ".join(said or ["nobody"]), *(missing if said else [])])
