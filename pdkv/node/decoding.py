"""An admitted request, token by token, whatever happens to its pages in between.

Guarantees: a page that was sealed as the prompt's tail is void before a token of the answer is written to it; between
two steps, and only there, the request gives way if it was asked to, or waits for the pages of the next step if it
hasn't got all from the start; however it ends, its pages are given back. Of an answer that came to its end, and of no
other, the full pages are in the tree before its end is said; one that whoever asked has enough of ends between two
steps, or amid a wait for pages, and then there may be none to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdkv.kvcache.manager import Reservation
from pdkv.node.answer import Answer, Enough
from pdkv.node.base import NodeParts
from pdkv.node.messages import GenerateDone, GenerateEvent, GenerateRequest, PrefillDone, Shipment, Token
from pdkv.node.preemption import Preemption, Runner
from pdkv.node.prompt import Prompt, answer_hashes
from pdkv.node.queue import AdmissionQueue, Ask
from pdkv.node.speculation import Decoder
from pdkv.node.stages import Stage

ANSWER_AHEAD = 4
"""Pages of an answer that are taken ahead of its need: an answer may end long before its limit."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request whose prompt is on this node."""

    queue: AdmissionQueue
    request: GenerateRequest
    prompt: Prompt
    ask: Ask
    reservation: Reservation
    done: PrefillDone
    shipment: Shipment
    enough: Enough
    cache_answer: bool = True
    retries: int = 0
    recomputed_tokens: int = 0


async def decode(
    parts: NodeParts, preemption: Preemption, arrived: Arrived, emit: Callable[[GenerateEvent], None]
) -> None:
    """From the first token, which prefill drew, to the end. All of a step runs in the engine's thread."""
    request, prompt, reservation, done = arrived.request, arrived.prompt, arrived.reservation, arrived.done
    enough = arrived.enough
    by = arrived.shipment.prefill_address or str(parts.name)
    instead = "" if by == request.prefill_address or not request.prefill_address else by
    first = Token(0, done.first_token, done.first_logprob, done.logits_digest, instead=instead)
    emit(first)
    enough.told += 1
    parts.manager.take_private(reservation, reservation.sequence[prompt.pages :])
    # The tail page gets this node's own tokens from here on: nobody may take it for what was sealed.
    parts.manager.reopen_private(reservation, reservation.sequence[prompt.recorded_pages : prompt.pages])
    answer = Answer(
        first, len(prompt.tokens), request.sampling, pages=reservation.sequence, want_logits=request.want_logits
    )
    decoder = Decoder(parts.engine, parts.drafter, parts.pool, parts.contract.draft_tokens, done.draft)
    runner = Runner(prompt, arrived.ask, reservation, answer, done.chunk_starts, [first.token])
    with preemption.running(runner):
        while not answer.over and await _may_go_on(parts, preemption, arrived, runner):
            parts.at(Stage.DECODING, request.request_id)
            for token in await parts.steps.run(decoder.step, answer):
                if enough.tokens is None:
                    runner.said.append(token.token)
                    emit(token)
                    enough.told += 1
        enough.over = True
        reason = "stop" if enough.tokens else answer.reason
        del runner.said[enough.tokens or len(runner.said) :]
        if arrived.cache_answer and preemption.holds(runner):
            await _cache_answer(parts, runner)
    speculation = decoder.report(answer.made)
    emit(
        GenerateDone(
            reason,
            len(runner.said),
            arrived.shipment,
            done.chunk_starts,
            speculation,
            preemptions=runner.preempted,
            retries=arrived.retries,
            recomputed_tokens=arrived.recomputed_tokens,
        )
    )


async def _may_go_on(parts: NodeParts, preemption: Preemption, arrived: Arrived, runner: Runner) -> bool:
    """The request has what its next step needs. False if that step isn't wanted."""
    if arrived.enough.tokens is None:
        async with arrived.enough.ends_waiting():
            if runner.asked:
                await preemption.give_way(runner)
            await _places(parts, arrived.queue, runner)
    return arrived.enough.tokens is None


async def _places(parts: NodeParts, queue: AdmissionQueue, runner: Runner) -> None:
    """The request has the pages that its next step writes to, drafts included."""
    answer, reservation = runner.answer, runner.reservation
    have = len(reservation.sequence)
    pages = -(-(answer.place + 1 + parts.contract.draft_tokens) // runner.prompt.page_tokens)
    if pages <= have:
        return
    await queue.started.reach(reservation, pages, until=min(pages + ANSWER_AHEAD, reservation.total_pages))
    parts.manager.take_private(reservation, reservation.sequence[have:])
    answer.pages = reservation.sequence


async def _cache_answer(parts: NodeParts, runner: Runner) -> None:
    """The full pages after the prompt's recorded ones go into the tree, where the conversation's next turn finds them.

    Their rows are those of accepted tokens, all of them final, the draft layer's too; the tail of the prompt is the
    first, once the answer has filled it. A hash names tokens and not bits: rows that were computed token by token are
    rounded otherwise than those of prefill's chunks. Either may stand for the other, as chunks of two sizes may; which
    of them a page has, its digest says. In a group each rank proves its own bytes, and the log has the order: nobody
    waits here for the other ranks to commit, for whoever reserves these pages comes later in the log.

    Raises as `Verifier.seal`; nothing is cached then.
    """
    prompt, reservation = runner.prompt, runner.reservation
    said = np.array(runner.said, np.uint32)
    hashes, first = answer_hashes(prompt, said, parts.contract), prompt.recorded_pages
    if not len(hashes):
        return
    if reservation.public is not None:
        reservation.public.grow(said)
    parts.manager.extend(reservation, hashes)
    pages = reservation.sequence[first : first + len(hashes)]
    parts.manager.commit(await parts.digests.run(parts.verifier.seal, reservation.id, first, pages, hashes))
