"""The objects of an answer, whole or as a stream of events.

Guarantees: what OpenAI's own clients parse; the texts of a stream's objects, one after another, are that of the whole
answer. Pure.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdkv.errors import PeerLost
from pdkv.http.speech import Speech
from pdkv.node.messages import GenerateDone, GenerateEvent

LAST = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer:
    """Of one request, as far as it has come."""

    number: str
    model: str
    created: int
    prompt_tokens: int
    shows_ids: bool
    """Token ids stand beside the text."""
    tokens: int = 0
    reason: str | None = None
    done: GenerateDone | None = None
    """None also of an answer that a stop string ended, if the node couldn't be told: nobody has an account of it."""
    ids: list[int] = field(default_factory=list)
    """Those that were not said yet."""

    def take(self, token: int) -> None:
        self.tokens += 1
        if self.shows_ids:
            self.ids.append(token)

    def said(self, text: str, *, usage: bool | None = None) -> dict[str, Any]:
        """The answer's next part, or all of it; with its ids, which are said once. `usage`: True tells it, False says
        that it is told later, None says nothing of it."""
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": self.reason}
        if self.shows_ids:
            choice["token_ids"], self.ids = self.ids, []
        return self._object([choice], usage=usage)

    def usage_alone(self) -> dict[str, Any]:
        """A stream's last object, if it was asked for."""
        return self._object([], usage=True)

    def _object(self, choices: Sequence[dict[str, Any]], *, usage: bool | None) -> dict[str, Any]:
        made = {
            "id": self.number,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return made if usage is None else made | {"usage": self._usage() if usage else None}

    def _usage(self) -> dict[str, Any]:
        details = None
        if self.done is not None:
            starts = self.done.chunk_starts  # computing began with the first token that nobody had
            details = {"cached_tokens": starts[0] if starts else self.prompt_tokens}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": details,
        }


async def spoken(
    events: AsyncGenerator[GenerateEvent, None],
    speech: Speech,
    answer: Answer,
    finish: Callable[[int], Awaitable[GenerateDone | None]],
) -> AsyncGenerator[str, None]:
    """The text that each token adds, often none, and what is left at the end; `answer` is up to date with each.

    Ends at a stop string: `finish` is told after how many tokens, and brings the request behind `events` to its end
    before the last text is said, so a client that has all of it may hang up. Raises what they raise, and `PeerLost` for
    events without an end.
    """
    async for said in events:
        if isinstance(said, GenerateDone):
            answer.done = said
            continue
        answer.take(said.token)
        text = speech.push(said.token)
        if speech.stopped:
            answer.reason = "stop"
            answer.done = await finish(answer.tokens)
        yield text
        if speech.stopped:
            return
    if answer.done is None:
        raise PeerLost("the stream ended without a last word", request=answer.number)
    text = speech.flush()
    answer.reason = "stop" if speech.stopped else answer.done.finish_reason
    yield text


def event(said: dict[str, Any]) -> bytes:
    """As a server-sent event."""
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "pdkv"}
