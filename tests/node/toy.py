"""Two nodes in one process: real pool, tree, transfer engine and state machines; a toy model and a loopback wire."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdkv.contract import Contract, ContractFacts, build_contract
from pdkv.errors import BoundsError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import Group, Segment, page_format
from pdkv.ids import LocalPages, NodeId, PageHashes, PeerName, UInt32Array, new_incarnation
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import Worker
from pdkv.node.messages import DraftHandoff
from pdkv.node.oracle import Oracle
from pdkv.node.ports import Computed, DraftAsk, Drafter, Drafts, Logits, PrefillPeer
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.sampling import logits_digest
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.engine import TransferEngine
from pdkv.transfer.orders import TransferSettings

VOCAB = 257
PAGE = 64
USED = 0xAA
"""A byte of pages that no request has written: of another one, once."""
CHUNK = 2 * PAGE


class ToyEngine:
    """Writes rows that follow from (token, position, layer); its logits follow from every byte written so far.

    So a lost, swapped or changed page, of either cache, changes the next token.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.steps: list[tuple[int, int]] = []
        self.change: Callable[[Logits], Logits] = lambda logits: logits
        """What becomes of the logits, to script an engine that fails."""

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        stop = start + len(tokens)
        if stop > len(pages) * PAGE:
            raise BoundsError("positions", stop, f"at most {len(pages) * PAGE}")
        self.steps.append((start, stop))
        positions = np.arange(start, stop)
        at, slots = pages.array[positions // PAGE], positions % PAGE
        for segment in self._segments:
            mark = ((tokens * 31 + positions * 7 + segment.layer * 3) % 255 + 1).astype(np.uint8)[:, None]
            for rows in self._rows(segment):
                rows[at, slots] = mark
        return self.change(self._logits(stop, pages))

    def chunk(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        logits = self.forward(tokens, start, pages)
        positions = np.arange(start, start + len(tokens))
        hidden = np.stack((tokens % 251, positions % 241), axis=1).astype(np.float32)
        return Computed(logits[None], hidden)

    def verify(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        rows = [self.chunk(tokens[i : i + 1], start + i, pages) for i in range(len(tokens))]
        return Computed(np.concatenate([r.logits for r in rows]), np.concatenate([r.hidden for r in rows]))

    @property
    def _segments(self) -> list[Segment]:
        """Those of the model itself: a draft layer's rows are a drafter's."""
        return [segment for segment in self.pool.fmt.segments if not segment.name.startswith("draft_")]

    def _rows(self, segment: Segment) -> list[np.ndarray]:
        return rows_of(self.pool, segment)

    def _logits(self, stop: int, pages: LocalPages) -> Logits:
        seen = 0
        whole, part = divmod(stop, PAGE)
        for page in pages.array[:whole].tolist():
            for group in Group:
                segments = [segment for segment in self.pool.fmt.segments if segment.group is group]
                for segment, raw in zip(segments, self.pool.group_bytes(page, group), strict=True):
                    if segment in self._segments:
                        seen = zlib.crc32(raw, seen)
        if part:
            for segment in self._segments:
                for rows in self._rows(segment):
                    seen = zlib.crc32(np.ascontiguousarray(rows[pages.array[whole], :part]), seen)
        return np.random.default_rng([seen, stop]).standard_normal(VOCAB).astype(np.float32)


def rows_of(pool: SlotPool, segment: Segment) -> list[np.ndarray]:
    """Views [pages, tokens, bytes]."""
    if segment.group is Group.MAIN:
        return [pool.main_view(segment.layer).numpy()]
    return [pool.index_keys(segment.layer).numpy(), pool.index_scales(segment.layer).numpy()]


class ToyDrafter:
    """A draft layer as an MTP head has it: its row at a position follows from the hidden state there and the token
    after it; what it drafts follows from its state and from all of its rows. It is hardly ever right.
    """

    hidden_width = 2

    def __init__(self, pool: SlotPool, topk: int, seed_length: int) -> None:
        self._pool = pool
        self._topk = topk
        self._seed_length = seed_length
        self._segments = [segment for segment in pool.fmt.segments if segment.name.startswith("draft_")]

    def extend(self, hidden: np.ndarray, after: UInt32Array, start: int, pages: LocalPages) -> DraftHandoff:
        positions = np.arange(start, start + len(after))
        mark = ((hidden.sum(axis=1) * 3 + after * 31 + positions) % 255 + 1).astype(np.uint8)[:, None]
        for segment in self._segments:
            for rows in rows_of(self._pool, segment):
                rows[pages.array[positions // PAGE], positions % PAGE] = mark
        seed = np.full(self._seed_length, -1, np.int32)
        chosen = range(max(0, start + len(after) - 5), start + len(after)) if self._seed_length else ()
        seed[: len(chosen)] = chosen
        return self._state(hidden[-1], seed, start + len(after), pages)

    def propose(self, ask: DraftAsk, pages: LocalPages) -> Drafts:
        state = ask.state
        assert state is not None
        tokens, digests = [int(state.tokens[0])], [state.logits_digest]
        for step in range(1, ask.count):
            hidden = state.hidden + np.float32(tokens[-1])
            self.extend(hidden[None], np.array(tokens[-1:], np.uint32), ask.place + step - 1, pages)
            state = self._state(hidden, state.index_seed, ask.place + step, pages)
            tokens.append(int(state.tokens[0]))
            digests.append(state.logits_digest)
        return Drafts(np.array(tokens, np.uint32), tuple(digests))

    def _state(self, hidden: np.ndarray, seed: np.ndarray, stop: int, pages: LocalPages) -> DraftHandoff:
        positions = np.arange(stop)
        seen = zlib.crc32(seed.tobytes(), zlib.crc32(hidden.astype(np.float32).tobytes()))
        for segment in self._segments:
            for rows in rows_of(self._pool, segment):
                seen = zlib.crc32(np.ascontiguousarray(rows[pages.array[positions // PAGE], positions % PAGE]), seen)
        logits = np.random.default_rng(seen).standard_normal(VOCAB).astype(np.float32)
        best = np.argsort(-logits)[: self._topk].astype(np.uint32)
        probabilities = np.exp(logits) / np.exp(logits).sum()
        return DraftHandoff(hidden.astype(np.float32), best, probabilities[best], seed, logits_digest(logits))


class AtAddress:
    """Whoever is at the address when a call is made, as over a socket."""

    def __init__(self, peers: dict[str, Any], address: str) -> None:
        self._peers = peers
        self._address = address

    def __getattr__(self, call: str) -> Any:
        return getattr(self._peers[self._address], call)


class OneByOne:
    """A directory of prefill nodes in this process."""

    def __init__(self, peers: dict[str, Any]) -> None:
        self.peers = peers
        self.dropped: list[str] = []

    def peer(self, address: str) -> PrefillPeer:
        found: Any = AtAddress(self.peers, address)
        return found

    def drop(self, address: str) -> None:
        self.dropped.append(address)


@dataclass
class Pair:
    prefill: PrefillNode
    decode: DecodeNode
    net: LoopbackNet
    directory: OneByOne
    """Address "p0" is the prefill node."""

    @property
    def nodes(self) -> tuple[PrefillNode | DecodeNode, ...]:
        return self.prefill, self.decode

    def restart_prefill(self, **changes: Any) -> None:
        """The prefill process ends and another begins at its address, with an empty pool."""
        old = self.prefill
        old.parts.close()
        facts = {f: getattr(old.parts.contract, f) for f in ContractFacts.__dataclass_fields__}
        parts = make_parts("p0", ContractFacts(**{**facts, **changes}), self.net, pages=old.parts.pool.num_pages)
        self.prefill = self.directory.peers["p0"] = PrefillNode(parts, old.settings)

    def forget_decode(self) -> None:
        """The decode node's tree loses all it has."""
        manager = self.decode.parts.manager
        manager.end(manager.reserve(PageHashes(), manager.census()["total"], max_hit_pages=0))

    def close(self) -> None:
        self.prefill.parts.close()
        self.decode.parts.close()


def make_parts(
    name: str,
    facts: ContractFacts,
    net: LoopbackNet,
    *,
    pages: int = 64,
    digest: str = "xxh3_64",
    settings: TransferSettings | None = None,
) -> NodeParts:
    shape = model_shape(load_config("tiny"), draft_layers=int(facts.speculation == "mtp"))
    fmt = page_format(shape)
    pool = SlotPool.create(fmt, pages, placement=facts.placement)  # type: ignore[arg-type]
    for buffer in pool.memory.buffers:
        buffer.fill_(USED)
    contract = build_contract(shape, fmt, identity=facts)
    engine = ToyEngine(pool)
    peer = PeerName(NodeId(name), new_incarnation())
    return NodeParts(
        name=peer,
        contract=contract,
        pool=pool,
        manager=CacheManager(pool),
        verifier=Verifier(pool, digest),
        transfer=TransferEngine(net.backend, peer, pool.map(), settings=settings),
        engine=engine,
        steps=Worker("engine"),
        digests=Worker("digests"),
        drafter=toy_drafter(engine, contract),
    )


def toy_drafter(engine: ToyEngine, contract: Contract, *, acceptance: float = 0.7) -> Drafter | None:
    """What a node with this contract drafts with."""
    if contract.speculation == "oracle":
        return Oracle(engine, VOCAB, acceptance=acceptance, seed=7)
    if contract.speculation == "mtp":
        seed = contract.index_topk + contract.index_kpool - 1 if contract.index_sharing else 0
        return ToyDrafter(engine.pool, contract.draft_topk, seed)
    return None


def make_pair(
    *,
    pages: int = 64,
    prefill_pages: int = 0,
    ttl_s: float = 30.0,
    settings: DecodeSettings | None = None,
    digest: str = "xxh3_64",
    both: dict[str, Any] | None = None,
    **decode_facts: Any,
) -> Pair:
    """`both` are contract facts of the two nodes, the other keywords of the decode node alone."""
    facts = ContractFacts(**{"weights_id": "toy", **(both or {})})
    net = LoopbackNet()
    parts = make_parts("p0", facts, net, pages=prefill_pages or pages)
    prefill = PrefillNode(parts, PrefillSettings(chunk_tokens=CHUNK, lease_ttl_s=ttl_s))
    directory = OneByOne({"p0": prefill})
    decode = DecodeNode(
        make_parts("d0", replace(facts, **decode_facts), net, pages=pages, digest=digest),
        directory,
        settings or DecodeSettings(("p0",), ("*",), allow_fault_injection=True),
    )
    return Pair(prefill, decode, net, directory)
