"""A node's introduction for a visitor, as served.

Guarantees: a visitor leaves nothing behind: it doesn't become a peer, so that its end is nobody's loss, and a node that
was only visited is as ready as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from pdkv.node.messages import NodeIntro
from pdkv.rpc.convert import checks, intro
from pdkv.v1 import common_pb2, prefill_pb2, visit_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class VisitServicer(visit_pb2_grpc.VisitServicer):
    def __init__(self, introduce: Callable[[], NodeIntro]) -> None:
        self._introduce = introduce

    async def Introduce(self, request: common_pb2.StatusRequest, context: Context) -> prefill_pb2.Introduction:
        reply = intro.introduction_to_pb(self._introduce())
        checks.require_sendable(reply, "Introduce")
        return reply
