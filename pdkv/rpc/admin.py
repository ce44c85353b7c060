"""An operator's calls, as served.

Guarantees: nothing but what `node.control.Control` does; a drain that outlasts the caller's patience goes on.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc

from pdkv.node.control import Control
from pdkv.v1 import admin_pb2, admin_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminServicer(admin_pb2_grpc.AdminServicer):
    def __init__(self, control: Control) -> None:
        self._control = control

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        await self._control.drain(end=request.end)
        return admin_pb2.DrainReply()

    async def Compact(self, request: admin_pb2.CompactRequest, context: Context) -> admin_pb2.CompactReply:
        return admin_pb2.CompactReply(moved_pages=await self._control.compact())
