"""One request as its service sees it, from its beginning to its end, and the line that the log has of it then.

Guarantees: a request has one outcome; what is told of it is what its own events said and when they came: nothing is
counted twice, nothing a page; no token and no text of a prompt or an answer is in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from pdkv.errors import PdkvError
from pdkv.ids import RequestId
from pdkv.logs import Fact, say
from pdkv.metrics.names import ABORTED, DONE
from pdkv.node.messages import GenerateDone, PrefillDone, Shipment, Token

log = logging.getLogger("pdkv.request")
WORDS = "request ended"
Event = TypeVar("Event")

BUG = PdkvError.__name__
"""The kind of what is no error of ours: as whoever made the call is told."""

OF_SHIPMENT = {
    "decode_node": "decode_node",
    "prefill_address": "prefill_address",
    "prefill_request": "prefill_request",
    "pages": "pages_total",
    "hit_pages": "pages_hit",
    "shipped_pages": "pages_shipped",
    "borrowed_pages": "pages_borrowed",
    "pulled_back_pages": "pages_pulled_back",
    "main_bytes": "bytes_main",
    "index_bytes": "bytes_index",
    "digests_verified": "digests_verified",
    "compute_s": "prefill_s",
    "transfer_s": "transfer_s",
}
"""Names of whoever served it, and facts of the account, units last, and the fields of a `Shipment` that they are."""


@dataclass(slots=True)
class Ending:
    """Filled by `watch`."""

    request: RequestId
    prompt_tokens: int
    began_s: float = field(default_factory=time.monotonic)
    outcome: str = ABORTED
    """`done`, `aborted`, or the kind of the error."""
    error: PdkvError | None = None
    done: GenerateDone | PrefillDone | None = None
    output_tokens: int = 0
    first_s: float | None = None
    """When its first token came, on the same clock as `began_s`."""
    second_s: float | None = None

    async def watch(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """The same events. What they raise is raised."""
        self.outcome = BUG
        try:
            async with aclosing(events):
                async for event in events:
                    self._note(event)
                    yield event
        except PdkvError as error:
            self.outcome, self.error = error.kind, error
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if self.done is None:
                self.outcome = ABORTED
            raise

    @property
    def ttft_s(self) -> float | None:
        """None without a token."""
        return None if self.first_s is None else self.first_s - self.began_s

    @property
    def first_step_s(self) -> float | None:
        """From the first token to the second one, which is the first that decode computed; None without."""
        return None if self.first_s is None or self.second_s is None else self.second_s - self.first_s

    def say(self, more: Mapping[str, Fact]) -> None:
        """To the log, with what only the service knows."""
        facts: dict[str, Fact] = {
            "request": self.request,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "total_s": time.monotonic() - self.began_s,
        }
        if self.error is not None:
            facts["error"] = str(self.error)
            if at := self.error.fields.get("accepted_by") or self.error.fields.get("address"):
                facts["failed_at"] = at
        for name, value in (("ttft_s", self.ttft_s), ("first_step_s", self.first_step_s)):
            if value is not None:
                facts[name] = value
        well = self.outcome in (DONE, ABORTED)
        say(log, logging.INFO if well else logging.WARNING, WORDS, {**facts, **more})

    def _note(self, event: object) -> None:
        if isinstance(event, Token):
            self.output_tokens += 1
            if event.index == 0:
                self.first_s = time.monotonic()
            elif event.index == 1:
                self.second_s = time.monotonic()
        elif isinstance(event, GenerateDone | PrefillDone):
            self.outcome, self.done = DONE, event


def cached_tokens(starts: tuple[int, ...], prompt_tokens: int) -> int:
    """Tokens of a prompt that nobody had to compute, from where its computing began."""
    return starts[0] if starts else prompt_tokens


def answer_facts(ending: Ending) -> dict[str, Fact]:
    """What a decode node or a router knows of a request beyond what all do."""
    facts: dict[str, Fact] = {"output_tokens": ending.output_tokens}
    done = ending.done
    if not isinstance(done, GenerateDone):
        return facts
    facts |= {
        "output_tokens": done.output_tokens,
        "finish_reason": done.finish_reason,
        "cached_tokens": cached_tokens(done.chunk_starts, done.shipment.prompt_tokens),
        **shipment_facts(done.shipment),
        "retries": done.retries,
        "recomputed_tokens": done.recomputed_tokens,
        "preemptions": done.preemptions,
    }
    if done.speculation is not None:
        facts |= {"drafted_tokens": done.speculation.drafted, "accepted_tokens": done.speculation.accepted}
    return facts


def shipment_facts(shipment: Shipment) -> dict[str, Fact]:
    return {name: getattr(shipment, of) for name, of in OF_SHIPMENT.items()}


def prefill_facts(ending: Ending) -> dict[str, Fact]:
    """What a prefill node knows beyond that."""
    done = ending.done
    if not isinstance(done, PrefillDone):
        return {}
    return {
        "cached_tokens": cached_tokens(done.chunk_starts, ending.prompt_tokens),
        "pages": done.account.pages,
        "pulled_back_pages": done.pages_pulled_back,
        "chunks": len(done.chunk_starts),
        "compute_s": done.prefill_s,
    }
