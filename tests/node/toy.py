"""Two nodes in one process: real pool, tree, transfer engine and state machines; a toy model and a loopback wire."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdkv.contract import ContractFacts, build_contract
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
from pdkv.node.ports import Logits, PrefillPeer
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.engine import TransferEngine
from pdkv.transfer.orders import TransferSettings

VOCAB = 257
PAGE = 64
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
        for segment in self.pool.fmt.segments:
            mark = ((tokens * 31 + positions * 7 + segment.layer * 3) % 255 + 1).astype(np.uint8)[:, None]
            for rows in self._rows(segment):
                rows[at, slots] = mark
        return self.change(self._logits(stop, pages))

    def _rows(self, segment: Segment) -> list[np.ndarray]:
        """Views [pages, tokens, bytes]."""
        if segment.group is Group.MAIN:
            return [self.pool.main_view(segment.layer).numpy()]
        return [self.pool.index_keys(segment.layer).numpy(), self.pool.index_scales(segment.layer).numpy()]

    def _logits(self, stop: int, pages: LocalPages) -> Logits:
        seen = 0
        whole, part = divmod(stop, PAGE)
        for page in pages.array[:whole].tolist():
            for group in Group:
                for segment in self.pool.group_bytes(page, group):
                    seen = zlib.crc32(segment, seen)
        if part:
            for segment in self.pool.fmt.segments:
                for rows in self._rows(segment):
                    seen = zlib.crc32(np.ascontiguousarray(rows[pages.array[whole], :part]), seen)
        return np.random.default_rng([seen, stop]).standard_normal(VOCAB).astype(np.float32)


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

    def peer(self, address: str) -> PrefillPeer:
        found: Any = AtAddress(self.peers, address)
        return found


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
    shape = model_shape(load_config("tiny"))
    fmt = page_format(shape)
    pool = SlotPool.create(fmt, pages, placement=facts.placement)  # type: ignore[arg-type]
    peer = PeerName(NodeId(name), new_incarnation())
    return NodeParts(
        name=peer,
        contract=build_contract(shape, fmt, identity=facts),
        pool=pool,
        manager=CacheManager(pool),
        verifier=Verifier(pool, digest),
        transfer=TransferEngine(net.backend, peer, pool.map(), settings=settings),
        engine=ToyEngine(pool),
        steps=Worker("engine"),
        digests=Worker("digests"),
    )


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
        settings or DecodeSettings(prefill_addresses=("p0",), allow_fault_injection=True),
    )
    return Pair(prefill, decode, net, directory)
