"""A router whose requests are observed. It has no tensors, so neither does what is imported here.

Guarantees: each request counts once, and has one line in the log, by how it ended; observing changes nothing of what is
served, and what a stream raises is raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from pdkv.discovery.finder import Finder
from pdkv.metrics.counts import count, count_answer
from pdkv.metrics.ending import Ending, answer_facts
from pdkv.metrics.names import Metrics
from pdkv.metrics.traced import tell
from pdkv.node.messages import GenerateEvent, GenerateRequest
from pdkv.node.routing import RouterStatus
from pdkv.router.service import Router
from pdkv.tracing.span import current


class MeteredRouter(Router):
    """Made like a `Router`; both are set before it serves."""

    metrics: Metrics
    finder: Finder | None = None

    def status(self) -> RouterStatus:
        return replace(super().status(), discovery=self.finder.status() if self.finder else {})

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        ending = Ending(request.request_id, len(request.tokens))
        try:
            async with aclosing(ending.watch(super().generate(request))) as events:
                async for event in events:
                    yield event
        finally:
            count(self.metrics, ending)
            count_answer(self.metrics, ending)
            tell(current(), ending, {})
            ending.say(answer_facts(ending))
