"""The speculative part of the demo: a pair of nodes whose decode drafts with the model's own draft layer, and one whose
drafts come from an oracle, so that many are right.

Guarantees: every answer is compared with plain decoding in one process, token by token and logit by logit, and the
draft layer's drafts with those of one process that drafts as well; each loss of draft state is made and has to be
refused by its name; a check that was not made counts as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from pdkv.adapters.reference.monolith import MonolithAnswer
from pdkv.cli.demo.asks import CHUNK_TOKENS, text_tokens
from pdkv.cli.demo.fleet import NodeProcess
from pdkv.cli.demo.nursery import Nursery
from pdkv.cli.demo.reference import Reference
from pdkv.cli.demo.report import ControlRow
from pdkv.config import PrefillConfig
from pdkv.errors import AccountMismatch, DigestMismatch, PdkvError, PeerLost
from pdkv.ids import RequestId, UInt32Array
from pdkv.node.messages import GenerateDone, GenerateRequest, Sampling, Speculation, Token
from pdkv.rpc.client import GrpcDirectory

DRAFT_TOKENS = 2
OUTPUT_TOKENS = 32
MTP_FLAGS: Mapping[str, Any] = {"speculation": "mtp", "draft_tokens": DRAFT_TOKENS, "index_sharing": True}
ORACLE_FLAGS: Mapping[str, Any] = {"speculation": "oracle", "draft_tokens": DRAFT_TOKENS}
LOSSES: Mapping[str, tuple[type[PdkvError], str]] = {
    "drop-hidden": (AccountMismatch, "draft_digest"),
    "drop-seed": (AccountMismatch, "draft_digest"),
    "drop-draft-rows": (DigestMismatch, "both"),
}
"""Fault to the error that must name it: the account's field, or both caches of a page."""


@dataclass(frozen=True, slots=True)
class SpeculativeAsk:
    name: str
    drafter: str
    tokens: UInt32Array
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class SpeculativeRow:
    """One speculative request, compared with plain decoding and with drafting in one process."""

    name: str
    drafter: str
    output_tokens: int
    speculation: Speculation
    tokens_equal: bool
    logits_equal: bool
    drafts_equal: bool

    @property
    def ok(self) -> bool:
        return self.tokens_equal and self.logits_equal and self.drafts_equal

    def as_dict(self) -> dict[str, Any]:
        flat = {k: v for k, v in asdict(self).items() if k != "speculation"}
        length = self.speculation.mean_accepted_length
        return {**flat, **asdict(self.speculation), "mean_accepted_length": length}


def asks() -> list[SpeculativeAsk]:
    """Short: what is shown is that both drafters leave every token as it is. A draft layer whose weights were made from
    a seed is rarely right; here it sometimes is.
    """
    greedy, sampled = (Sampling(OUTPUT_TOKENS), Sampling(OUTPUT_TOKENS, temperature=0.8, top_p=0.95, seed=5003))
    text = text_tokens(5003, 150)
    return [
        SpeculativeAsk("mtp-greedy", "mtp", text, greedy),
        SpeculativeAsk("mtp-sampled", "mtp", text, sampled),
        SpeculativeAsk("oracle-greedy", "oracle", text_tokens(5000, 200), greedy),
    ]


class Speculative:
    """Starts its own pairs in `fleet`, with `flags` that all nodes of the demo have. `plain` answers without drafts."""

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
        config = {"model": flags["model"], "threads": flags["threads"], "chunk_tokens": CHUNK_TOKENS, **MTP_FLAGS}
        self._drafting = Reference(PrefillConfig.model_validate(config))
        self.rows: list[SpeculativeRow] = []
        self.controls: list[ControlRow] = []

    async def run(self) -> None:
        """Fills `rows` and `controls`."""
        self._say("starting a pair that drafts with the model's draft layer, and one with an oracle")
        try:
            (mtp, mtp_decode), (oracle, oracle_decode) = await asyncio.gather(
                self._pair("mtp", MTP_FLAGS), self._pair("oracle", ORACLE_FLAGS)
            )
            pairs = {"mtp": (mtp, mtp_decode), "oracle": (oracle, oracle_decode)}
            for ask in asks():
                self._say(f"{ask.name}: {len(ask.tokens)} tokens, at most {DRAFT_TOKENS} drafted a step")
                self.rows.append(await self._compared(ask, *pairs[ask.drafter]))
            for fault in LOSSES:
                self.controls.append(await self._lost(fault, mtp, mtp_decode))
        finally:
            self._drafting.close()

    async def _pair(self, name: str, flags: Mapping[str, Any]) -> tuple[NodeProcess, NodeProcess]:
        both = {**self._flags, **flags}
        prefill, decode = await asyncio.gather(
            self._fleet.start("prefill", f"{name}-prefill", {**both, "chunk_tokens": CHUNK_TOKENS}),
            self._fleet.start("decode", f"{name}-decode", {**both, "allow_fault_injection": True}),
        )
        return prefill, decode

    async def _compared(self, ask: SpeculativeAsk, prefill: NodeProcess, decode: NodeProcess) -> SpeculativeRow:
        plain = await self._plain.ask(ask.tokens, ask.sampling)
        drafting = await self._drafting.ask(ask.tokens, ask.sampling) if ask.drafter == "mtp" else None
        tokens, done = await self._served(decode, _request(ask.name, ask.tokens, ask.sampling, prefill))
        return row_of(ask, tokens, done, plain, drafting)

    async def _served(self, decode: NodeProcess, request: GenerateRequest) -> tuple[list[Token], GenerateDone]:
        tokens: list[Token] = []
        async with aclosing(self._nodes.decode(decode.address).generate(request)) as events:
            async for event in events:
                if isinstance(event, GenerateDone):
                    return tokens, event
                tokens.append(event)
        raise PeerLost(f"{decode.name} ended the stream without a last word", node=decode.name)

    async def _lost(self, fault: str, prefill: NodeProcess, decode: NodeProcess) -> ControlRow:
        """Draft state is lost on its way: no token would show it, so it must be refused before the first."""
        self._say(f"injecting {fault}")
        kind, named = LOSSES[fault]
        tokens = text_tokens(5100 + len(self.controls), 150)
        request = _request(f"control-{fault}", tokens, Sampling(OUTPUT_TOKENS), prefill, fault)
        try:
            said, _ = await self._served(decode, request)
        except PdkvError as error:
            return ControlRow(
                fault, named, f"{error.kind}: {error}", ok=isinstance(error, kind) and named in str(error)
            )
        return ControlRow(fault, named, f"nothing: {len(said)} tokens came out", ok=False)


def _request(
    name: str, tokens: UInt32Array, sampling: Sampling, prefill: NodeProcess, fault: str = ""
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        tokens=tokens,
        sampling=sampling,
        prefill_address=prefill.address,
        want_logits=True,
        fault=fault,
    )


def row_of(
    ask: SpeculativeAsk, tokens: list[Token], done: GenerateDone, plain: MonolithAnswer, drafting: MonolithAnswer | None
) -> SpeculativeRow:
    """`drafting` is None for a drafter that has no logits of its own."""
    drafts = tuple(token.draft_digests for token in tokens)
    return SpeculativeRow(
        name=ask.name,
        drafter=ask.drafter,
        output_tokens=len(tokens),
        speculation=done.speculation or Speculation(),
        tokens_equal=tuple(token.token for token in tokens) == plain.tokens,
        logits_equal=tuple(token.logits_digest for token in tokens) == plain.logits_digests,
        drafts_equal=not any(drafts) if drafting is None else any(drafts) and drafts == drafting.draft_digests,
    )


def checks_of(rows: list[SpeculativeRow], controls: list[ControlRow]) -> dict[str, bool]:
    """What the report is to say; True only if every row and control was made, and held."""
    by_name = {row.name: row for row in rows}
    whole = list(by_name) == [ask.name for ask in asks()]
    counts = {drafter: [row.speculation for row in rows if row.drafter == drafter] for drafter in ("mtp", "oracle")}
    used = all(sum(c.accepted for c in of) > 0 and sum(c.rolled_back_tokens for c in of) > 0 for of in counts.values())
    return {
        "speculation": whole and used and all(row.ok for row in rows),
        "draft_state": [row.fault for row in controls] == list(LOSSES) and all(row.ok for row in controls),
    }
