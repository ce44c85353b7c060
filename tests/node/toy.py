"""Two nodes in one process: real pool, tree, transfer engine and state machines; a toy model and a loopback wire."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

from pdkv.contract import ContractFacts, build_contract
from pdkv.errors import BoundsError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.ids import LocalPages, NodeId, PeerName, UInt32Array, new_incarnation
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import Worker
from pdkv.node.ports import Logits, PrefillPeer
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.transfer.backends.loopback import LoopbackBackend
from pdkv.transfer.engine import TransferEngine

VOCAB = 257


class ToyEngine:
    """Writes rows that follow from (token, position, layer); its logits follow from every byte written so far.

    So a lost, swapped or changed page, of either cache, changes the next token.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.steps: list[tuple[int, int]] = []

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        page_tokens = self.pool.fmt.page_tokens
        stop = start + len(tokens)
        if stop > len(pages) * page_tokens:
            raise BoundsError("positions", stop, f"at most {len(pages) * page_tokens}")
        self.steps.append((start, stop))
        for segment in self.pool.fmt.segments:
            view = self.pool.segment_view(segment.name).numpy()
            for position, token in zip(range(start, stop), tokens.tolist(), strict=True):
                page, slot = int(pages.array[position // page_tokens]), position % page_tokens
                mark = (token * 31 + position * 7 + segment.layer * 3 + len(segment.name)) % 255 + 1
                if segment.group == "main":
                    row = segment.length // page_tokens
                    view[page, slot * row : (slot + 1) * row] = mark
                else:
                    view[page, slot * 128 : (slot + 1) * 128] = mark
                    view[page, 8192 + slot * 4 : 8192 + slot * 4 + 4] = mark
        return self._logits(stop, pages)

    def _logits(self, stop: int, pages: LocalPages) -> Logits:
        seen = 0
        for page in pages.array[: -(-stop // self.pool.fmt.page_tokens)].tolist():
            for group in ("main", "index"):
                for part in self.pool.group_bytes(page, group):
                    seen = zlib.crc32(part, seen)
        return np.random.default_rng([seen, stop]).standard_normal(VOCAB).astype(np.float32)


class OneByOne:
    """A directory of prefill nodes in this process."""

    def __init__(self, peers: dict[str, PrefillPeer]) -> None:
        self.peers = peers

    def peer(self, address: str) -> PrefillPeer:
        return self.peers[address]


@dataclass
class Pair:
    prefill: PrefillNode
    decode: DecodeNode

    def close(self) -> None:
        self.prefill.parts.close()
        self.decode.parts.close()


def make_parts(name: str, *, pages: int = 64, facts: ContractFacts | None = None, digest: str = "xxh3_64") -> NodeParts:
    shape = model_shape(load_config("tiny"))
    fmt = page_format(shape)
    pool = SlotPool.create(fmt, pages)
    facts = facts or ContractFacts(weights_id="toy")
    peer = PeerName(NodeId(name), new_incarnation())
    transfer = TransferEngine(LoopbackBackend, peer, pool.map())
    return NodeParts(
        name=peer,
        contract=build_contract(shape, fmt, identity=facts),
        pool=pool,
        manager=CacheManager(pool),
        verifier=Verifier(pool, digest),
        transfer=transfer,
        engine=ToyEngine(pool),
        steps=Worker("engine"),
        digests=Worker("digests"),
    )


def make_pair(*, pages: int = 64, settings: DecodeSettings | None = None, **decode_facts: object) -> Pair:
    facts = ContractFacts(weights_id="toy")
    prefill = PrefillNode(make_parts("p0", pages=pages, facts=facts), PrefillSettings(chunk_tokens=128))
    decode = DecodeNode(
        make_parts("d0", pages=pages, facts=replace(facts, **decode_facts)),
        OneByOne({"p0": prefill}),
        settings or DecodeSettings(prefill_addresses=("p0",), allow_fault_injection=True),
    )
    return Pair(prefill, decode)
