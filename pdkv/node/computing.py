"""A prompt on its way through this node's own engine: on a prefill node, or on a decode node that was let down by one.

Guarantees: chunks are computed in order, one at a time, and the pages of one are digested while the next one computes;
a page is in the tree only after the step that filled it has completed with finite logits; where another request was
faster, its page stands. However it ends, no step that writes into the reservation's pages is running any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdkv.ids import LocalPages
from pdkv.kvcache.manager import Reservation
from pdkv.node.base import NodeParts
from pdkv.node.flow import together
from pdkv.node.messages import DraftHandoff, Sampling
from pdkv.node.ports import Logits
from pdkv.node.prompt import Prompt
from pdkv.node.sampling import SampledToken, require_finite, sample
from pdkv.node.speculation import drafted_chunk


class Computation:
    """From the last page that the reservation hit to the prompt's last token."""

    def __init__(
        self, parts: NodeParts, steps: list[slice], prompt: Prompt, reservation: Reservation, sampling: Sampling
    ) -> None:
        """`steps` are the chunks: one after the other, from the first token that is not in a page that was hit."""
        self._parts = parts
        self._steps = steps
        self._prompt = prompt
        self._reservation = reservation
        self._sampling = sampling
        self.sealed = len(reservation.hit)
        """Pages of the prompt that are committed so far."""
        self.draft: DraftHandoff | None = None
        """After the last chunk so far, where the model has a draft layer."""

    @property
    def starts(self) -> tuple[int, ...]:
        """First token of each chunk."""
        return tuple(span.start for span in self._steps)

    async def run(self, before: Callable[[], None], sealed: Callable[[int, LocalPages], None]) -> Logits:
        """float32 [vocab] logits of the last token. `before` is called before each chunk, `sealed` when pages of the
        prompt came into the tree: with the index of the first, and the pages that stand there and can be announced.

        Raises what the engine raises, and `BadLogits` for logits that are not finite.
        """
        parts = self._parts
        async with together() as group:
            sealing: asyncio.Task[None] | None = None
            for span in self._steps:
                before()
                logits = await parts.steps.run(self._chunk, span)
                if sealing:
                    await sealing
                sealing = group.create_task(self._seal_until(span.stop, sealed))
        return logits

    async def first(self, logits: Logits) -> SampledToken:
        """The answer's first token. Drawn in the engine's thread: a large vocabulary takes milliseconds to sort, and
        the loop has other requests to serve."""
        return await self._parts.steps.run(self._drawn, logits)

    def _drawn(self, logits: Logits) -> SampledToken:
        """The same however often it is drawn."""
        return sample(logits, self._sampling, len(self._prompt.tokens))

    def _chunk(self, span: slice) -> Logits:
        """Compute it, with its draft rows where the pages have some. Runs in the engine's thread."""
        tokens, engine, drafter = self._prompt.tokens, self._parts.engine, self._parts.drafter
        pages = self._reservation.sequence
        if drafter is None or not self._parts.contract.draft_layers:
            logits = engine.forward(tokens[span], span.start, pages)
        else:
            logits, self.draft = drafted_chunk(
                engine, drafter, tokens, span, pages, lambda logits: self._drawn(logits).token
            )
        # What made such logits may stand in the pages, and the tree would serve it to everybody.
        require_finite(logits, span.stop)
        return logits

    async def _seal_until(self, stop: int, sealed: Callable[[int, LocalPages], None]) -> None:
        """Seal every recorded page that is full of computed tokens."""
        first, last = self.sealed, min(stop, self._prompt.recorded_tokens) // self._prompt.page_tokens
        if last <= first:
            return
        verified = await self._parts.digests.run(
            self._parts.verifier.seal,
            self._reservation.id,
            first,
            self._reservation.sequence[first:last],
            self._prompt.hashes.part(first, last),
        )
        # Where another request was faster, its page stands in the tree: that one is announced.
        standing = self._parts.manager.commit(verified)
        self.sealed = last
        sealed(first, standing)
