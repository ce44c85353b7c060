"""An admitted request, token by token, whatever happens to its pages in between.

Guarantees: a page that was sealed as the prompt's tail is void before a token of the answer is written to it; between
two steps, and only there, the request gives way if it was asked to; however it ends, its pages are given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdkv.kvcache.manager import Reservation
from pdkv.node.answer import Answer
from pdkv.node.base import NodeParts
from pdkv.node.messages import GenerateDone, GenerateEvent, GenerateRequest, PrefillDone, Shipment, Token
from pdkv.node.preemption import Preemption, Runner
from pdkv.node.prompt import Prompt
from pdkv.node.queue import Ask
from pdkv.node.speculation import Decoder


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request whose prompt is on this node."""

    request: GenerateRequest
    prompt: Prompt
    ask: Ask
    reservation: Reservation
    done: PrefillDone
    shipment: Shipment


async def decode(
    parts: NodeParts, preemption: Preemption, arrived: Arrived, emit: Callable[[GenerateEvent], None]
) -> None:
    """From the first token, which prefill drew, to the end. All of a step runs in the engine's thread."""
    request, prompt, reservation, done = arrived.request, arrived.prompt, arrived.reservation, arrived.done
    first = Token(0, done.first_token, done.first_logprob, done.logits_digest)
    emit(first)
    parts.manager.take_private(reservation, reservation.sequence[prompt.pages :])
    # The tail page gets this node's own tokens from here on: nobody may take it for what was sealed.
    parts.manager.reopen_private(reservation, reservation.sequence[prompt.recorded_pages : prompt.pages])
    answer = Answer(
        first, len(prompt.tokens), request.sampling, pages=reservation.sequence, want_logits=request.want_logits
    )
    decoder = Decoder(parts.engine, parts.drafter, parts.pool, parts.contract.draft_tokens, done.draft)
    runner = Runner(prompt, arrived.ask, reservation, answer, done.chunk_starts, [first.token])
    with preemption.running(runner):
        while not answer.over:
            if runner.asked:
                await preemption.give_way(runner)
            for token in await parts.steps.run(decoder.step, answer):
                runner.said.append(token.token)
                emit(token)
    speculation = decoder.report(answer.made)
    emit(
        GenerateDone(
            answer.reason, answer.made, arrived.shipment, done.chunk_starts, speculation, preemptions=runner.preempted
        )
    )
