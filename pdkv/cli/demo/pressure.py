"""The demo's part on pools that are too small: a request that gives its pages to another and comes back, and a prefix
that is evicted and shipped again.

Guarantees: every answer is compared with one process that has room for all, token by token, and the one that came back
from host memory logit by logit; that it did give way, and that pages did go and come again, is read from the accounts
of the nodes; a check that was not made counts as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.demo.asks import CHUNK_TOKENS, OUTPUT_TOKENS, text_tokens
from pdkv.cli.demo.fleet import NodeProcess
from pdkv.cli.demo.nursery import Nursery
from pdkv.cli.demo.reference import Reference
from pdkv.errors import PeerLost
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling, Token
from pdkv.rpc.client import GrpcDirectory

POOL_PAGES = 15
"""With the write sink: room for one of the requests below, not for two."""
PROMPT_TOKENS = 600
LONG_OUTPUT_TOKENS = 48
"""Of the request that has to give way: it is still at it when the next one comes."""
POLICIES = ("offload", "recompute")
AGAIN = ("cold", "again", "other", "evicted")
"""One prefix four times, but for the third: it has to be hit whole, and then shipped again."""


@dataclass(frozen=True, slots=True)
class PressureRow:
    """One request on a small pool, compared with one process."""

    name: str
    output_tokens: int
    preemptions: int
    pages_total: int
    pages_hit: int
    pages_shipped: int
    tokens_equal: bool
    logits_equal: bool | None
    """None where prefill hit pages that the one process computed: other shapes give close logits, not equal ones."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Pressure:
    """Starts its own nodes in `fleet`, with `flags` that all nodes of the demo have. `plain` has room enough."""

    def __init__(
        self,
        fleet: Nursery,
        nodes: GrpcDirectory,
        plain: Reference,
        flags: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._nodes = nodes
        self._plain = plain
        self._flags = dict(flags)
        self._say = say
        self.rows: list[PressureRow] = []

    async def run(self) -> None:
        """Fills `rows`."""
        self._say(f"starting decode nodes with {POOL_PAGES} pages")
        small = {**self._flags, "pool_pages": POOL_PAGES}
        prefill, *decodes = await asyncio.gather(
            self._fleet.start("prefill", "pressed-prefill", {**self._flags, "chunk_tokens": CHUNK_TOKENS}),
            *(self._fleet.start("decode", f"pressed-{policy}", {**small, "preempt": policy}) for policy in POLICIES),
        )
        for number, (policy, decode) in enumerate(zip(POLICIES, decodes, strict=True)):
            self._say(f"a request gives way to another: {policy}")
            await self._preempted(policy, number, prefill, decode)
        self._say("a prefix is evicted and shipped again")
        await self._shipped_again(prefill, decodes[0])

    async def _preempted(self, policy: str, number: int, prefill: NodeProcess, decode: NodeProcess) -> None:
        """The second comes when the first has said a token; there is no room for both."""
        sampling = Sampling(LONG_OUTPUT_TOKENS, temperature=0.8, top_p=0.95, seed=number)
        first, second = (text_tokens(6000 + 2 * number + i, PROMPT_TOKENS) for i in range(2))
        begun = asyncio.Event()
        running = asyncio.create_task(self._served(decode, f"{policy}-first", first, sampling, prefill, begun))
        try:
            began = asyncio.create_task(begun.wait())
            await asyncio.wait((running, began), return_when=asyncio.FIRST_COMPLETED)
            began.cancel()
            greedy = Sampling(OUTPUT_TOKENS)
            after = await self._served(decode, f"{policy}-second", second, greedy, prefill)
            before = await running
        finally:
            running.cancel()
        for name, served, asked in (
            (f"{policy}-first", before, (first, sampling)),
            (f"{policy}-second", after, (second, greedy)),
        ):
            self.rows.append(row_of(name, *served, await self._plain.ask(*asked)))

    async def _shipped_again(self, prefill: NodeProcess, decode: NodeProcess) -> None:
        prompt, other = (text_tokens(6100 + i, PROMPT_TOKENS) for i in range(2))
        sampling = Sampling(OUTPUT_TOKENS)
        answer = await self._plain.ask(prompt, sampling)
        for name in AGAIN:
            tokens = other if name == "other" else prompt
            served = await self._served(decode, name, tokens, sampling, prefill)
            expected = await self._plain.ask(other, sampling) if name == "other" else answer
            self.rows.append(row_of(name, *served, expected))

    async def _served(
        self,
        decode: NodeProcess,
        name: str,
        tokens: UInt32Array,
        sampling: Sampling,
        prefill: NodeProcess,
        begun: asyncio.Event | None = None,
    ) -> tuple[list[Token], GenerateDone]:
        request = GenerateRequest(
            request_id=RequestId(name),
            tokens=tokens,
            sampling=sampling,
            prefill_address=prefill.address,
            want_logits=True,
        )
        said: list[Token] = []
        async with aclosing(self._nodes.decode(decode.address).generate(request)) as events:
            async for event in events:
                if isinstance(event, GenerateDone):
                    return said, event
                said.append(event)
                if begun is not None:
                    begun.set()
        raise PeerLost(f"{decode.name} ended the stream without a last word", node=decode.name)


def row_of(name: str, said: list[Token], done: GenerateDone, answer: MonolithAnswer) -> PressureRow:
    return PressureRow(
        name=name,
        output_tokens=len(said),
        preemptions=done.preemptions,
        pages_total=done.shipment.pages_total,
        pages_hit=done.shipment.pages_hit,
        pages_shipped=done.shipment.pages_shipped,
        tokens_equal=tuple(token.token for token in said) == answer.tokens,
        logits_equal=tuple(token.logits_digest for token in said) == answer.logits_digests
        if done.chunk_starts == answer.chunk_starts
        else None,
    )


def pressure_checks(rows: list[PressureRow]) -> dict[str, bool]:
    """What the report is to say; True only if every request was made, and held."""
    by_name = {row.name: row for row in rows}
    names = [f"{policy}-{which}" for policy in POLICIES for which in ("first", "second")]
    if list(by_name) != [*names, *AGAIN]:
        return {"preempted": False, "shipped_again": False}
    gave_way = all(by_name[f"{policy}-first"].preemptions > 0 for policy in POLICIES)
    cold, again, _, evicted = (by_name[name] for name in AGAIN)
    known = cold.pages_total - 1  # the tail page always travels
    return {
        "preempted": gave_way
        and all(by_name[name].tokens_equal for name in names)
        and by_name["offload-first"].logits_equal is True,
        "shipped_again": all(by_name[name].tokens_equal for name in AGAIN)
        and (cold.pages_hit, cold.pages_shipped) == (0, cold.pages_total)
        and (again.pages_hit, again.pages_shipped) == (known, 1)
        and evicted.pages_hit < known
        and evicted.pages_hit + evicted.pages_shipped == evicted.pages_total,
    }
