"""Two nodes in one process: real pool, tree, transfer engine and state machines; a toy model and a loopback wire."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdkv.contract import ContractFacts, build_contract
from pdkv.errors import BoundsError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import Group, page_format
from pdkv.ids import LocalPages, NodeId, PeerName, UInt32Array, new_incarnation
from pdkv.kvcache.manager import CacheManager
from pdkv.kvcache.pool import SlotPool
from pdkv.kvcache.verifier import Verifier
from pdkv.node.base import NodeParts
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.flow import Worker
from pdkv.node.ports import Logits, PrefillPeer
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.transfer.backends import backend_factory
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
        positions = np.arange(start, stop)
        at, slots = pages.array[positions // page_tokens], positions % page_tokens
        for segment in self.pool.fmt.segments:
            mark = ((tokens * 31 + positions * 7 + segment.layer * 3) % 255 + 1).astype(np.uint8)[:, None]
            if segment.group is Group.MAIN:
                self.pool.main_view(segment.layer).numpy()[at, slots] = mark
            else:
                self.pool.index_keys(segment.layer).numpy()[at, slots] = mark
                self.pool.index_scales(segment.layer).numpy()[at, slots] = mark
        return self._logits(stop, pages)

    def _logits(self, stop: int, pages: LocalPages) -> Logits:
        seen = 0
        for page in pages.array[: -(-stop // self.pool.fmt.page_tokens)].tolist():
            for group in Group:
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


def make_parts(name: str, facts: ContractFacts, *, pages: int = 64, digest: str = "xxh3_64") -> NodeParts:
    shape = model_shape(load_config("tiny"))
    fmt = page_format(shape)
    pool = SlotPool.create(fmt, pages)
    peer = PeerName(NodeId(name), new_incarnation())
    return NodeParts(
        name=peer,
        contract=build_contract(shape, fmt, identity=facts),
        pool=pool,
        manager=CacheManager(pool),
        verifier=Verifier(pool, digest),
        transfer=TransferEngine(backend_factory("loopback"), peer, pool.map()),
        engine=ToyEngine(pool),
        steps=Worker("engine"),
        digests=Worker("digests"),
    )


def make_pair(
    *,
    pages: int = 64,
    settings: DecodeSettings | None = None,
    digest: str = "xxh3_64",
    both: dict[str, Any] | None = None,
    **decode_facts: Any,
) -> Pair:
    """`both` are contract facts of the two nodes, the other keywords of the decode node alone."""
    facts = ContractFacts(**{"weights_id": "toy", **(both or {})})
    prefill = PrefillNode(make_parts("p0", facts, pages=pages), PrefillSettings(chunk_tokens=128))
    decode = DecodeNode(
        make_parts("d0", replace(facts, **decode_facts), pages=pages, digest=digest),
        OneByOne({"p0": prefill}),
        settings or DecodeSettings(prefill_addresses=("p0",), allow_fault_injection=True),
    )
    return Pair(prefill, decode)
