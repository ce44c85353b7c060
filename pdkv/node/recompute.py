"""A prompt that no prefill node brought, computed by the decode node's own engine.

Guarantees: it goes on from the pages that are in the tree, in chunks, as a prefill node would, so its tokens are those
of one process alone; what becomes of it is a `PrefillDone` like any other, with this node's own first token, draft
hand-off and account. In a group every rank computes and commits before it returns.
"""

from __future__ import annotations

import asyncio

from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.computing import Computation
from pdkv.node.intake import Wanted
from pdkv.node.messages import PrefillDone
from pdkv.node.prompt import account_of
from pdkv.node.sampling import logits_digest
from pdkv.node.stages import Stage


async def recompute(parts: NodeParts, wanted: Wanted, reservation: Reservation, chunk_tokens: int) -> PrefillDone:
    """Every token after the pages that `reservation` hit, of which there is at least one, `chunk_tokens` at a time,
    taken as whole pages.

    Its tail page is private and unsealed: nobody else reads it. Raises what the engine raises, and `BadLogits`.
    """
    prompt, request, loop = wanted.prompt, wanted.request, asyncio.get_running_loop()
    began_s = loop.time()
    size = prompt.page_tokens
    steps = chunks(len(reservation.hit) * size, len(prompt.tokens), max(chunk_tokens // size, 1) * size)
    computation = Computation(parts, steps, prompt, reservation, request.sampling)
    parts.manager.take_private(reservation, reservation.sequence[prompt.recorded_pages : prompt.pages])
    logits = await computation.run(
        lambda: parts.at(Stage.RECOMPUTING, request.request_id),
        lambda first, standing: parts.at(Stage.COMMITTED, request.request_id),
    )
    if parts.barrier:
        await parts.barrier()
    first = await computation.first(logits)
    return PrefillDone(
        first_token=first.token,
        first_logprob=first.logprob,
        logits_digest=logits_digest(logits) if request.want_logits else 0,
        tail=None,
        account=account_of(prompt, parts.contract, computation.draft),
        chunk_starts=computation.starts,
        prefill_s=loop.time() - began_s,
        draft=computation.draft,
    )


def chunks(start: int, stop: int, tokens: int) -> list[slice]:
    """[start, stop) in steps of `tokens`."""
    return [slice(at, min(at + tokens, stop)) for at in range(start, stop, tokens)]
