"""A prefill node and two decode nodes that are sources for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pdkv.contract import ContractFacts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.messages import GenerateDone, GenerateRequest, LendCall, LocateCall, Sampling
from pdkv.node.prompt import plan_prompt
from pdkv.node.source import Source
from tests.node.scene import answers, held, request, run, until
from tests.node.scene import rested as pair_rested
from tests.node.test_answer_pages import goes_on
from tests.node.test_pull_back import right
from tests.node.toy import OneByOne, Pair, make_pair, make_parts

PATIENT = DecodeSettings(("p0",), ("*",), source_addresses=("d0",), locate_s=5.0, allow_fault_injection=True)


class Between:
    """The source at an address, such that a test can change what it does."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.asked: list[str] = []

    def __getattr__(self, call: str) -> Any:
        async def called(argument: Any) -> Any:
            self.asked.append(call)
            return await getattr(self.source, call)(argument)

        return called


@dataclass
class Trio:
    """`pair` is prefill and the first decode node, which is the source "d0"; `second` borrows from it."""

    pair: Pair
    second: DecodeNode
    at: Between
    sources: OneByOne
    borrower: Pair = field(init=False)
    """Prefill and the second decode node."""

    def __post_init__(self) -> None:
        self.borrower = replace(self.pair, decode=self.second)

    @property
    def lender(self) -> DecodeNode:
        return self.pair.decode

    async def met(self) -> None:
        """The second decode node knows its source."""
        assert self.second.borrowing is not None
        await self.second.borrowing._sources.of("d0")

    async def rested(self) -> None:
        for pair in (self.pair, self.borrower):
            await until(lambda pair=pair: not any(held(node) for node in pair.nodes))  # type: ignore[misc]
            await pair_rested(pair)


def play(
    scenario: Callable[[Trio], Awaitable[None]],
    *,
    settings: DecodeSettings = PATIENT,
    pages: int = 64,
    both: dict[str, Any] | None = None,
    digest: str = "xxh3_64",
) -> None:
    pair = make_pair(both=both, digest=digest)
    facts = ContractFacts(**{"weights_id": "toy", **(both or {})})
    parts = make_parts("d1", facts, pair.net, pages=pages)

    async def main(_: Pair) -> None:
        between = Between(pair.decode.source)
        sources = OneByOne({"d0": between})
        second = DecodeNode(parts, pair.directory, settings, sources)
        await scenario(Trio(pair, second, between, sources))
        await asyncio.gather(*second.farewells)

    try:
        run(main, pair)
    finally:
        parts.close()


async def talked(trio: Trio, length: int = 100, answer: int = 150) -> GenerateRequest:
    """The second turn of a conversation whose first one was the first decode node's: it has 3 full pages, prefill 1."""
    asked = replace(request(length, name="talk"), sampling=Sampling(max_tokens=answer))
    said, _ = await answers(trio.lender.generate(asked))
    return replace(goes_on(asked, said), sampling=Sampling(max_tokens=8))


async def asked(trio: Trio, turn: GenerateRequest) -> GenerateDone:
    """Of the second decode node; the answer is right."""
    return await right(trio.borrower, turn)


def locate(trio: Trio, turn: GenerateRequest) -> LocateCall:
    node = trio.second.parts
    hashes = plan_prompt(turn.tokens, turn.namespace, node.contract).hashes
    return LocateCall(node.envelope(trio.lender.parts.name), hashes)


def lend(trio: Trio, turn: GenerateRequest, first: int = 0) -> LendCall:
    call = locate(trio, turn)
    return LendCall(call.envelope, call.hashes, first)
