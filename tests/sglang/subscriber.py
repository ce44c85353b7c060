"""SGLang's own subscriber at a pdkv publisher, and pdkv's tests' subscriber at SGLang's own publisher.

SGLang has one subscriber, UMBP's, which tells a master what it hears; there is none that asks for missed batches. The
master's client is of AMD's `mori`, a library for their GPUs: a recorder stands here in its place.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import zmq
from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch, KVEventsConfig
from sglang.srt.mem_cache.storage.umbp import umbp_store

from tests.adapters.events.consumers import LAYOUTS, Subscriber
from tests.checks import Checks
from tests.sglang.sides import ANYWHERE, PAGE, TOPIC, Known, Ours, Theirs
from tests.sglang.trees import of
from tests.waiting import DEADLINE_S

PROMPTS = (of("abcdef"), of("abcxyz"), of("abc", salt="tenant-a"), of("k"))


class Master(logging.Handler):
    """What the subscriber calls, and what it logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.held: dict[str, set[int]] = {"HBM": set(), "DRAM": set()}
        self.calls = 0
        self.refusals: list[str] = []
        self._changed = threading.Condition()

    def report_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        return self._told(tier, lambda held: held | set(map(int, hashes)))

    def revoke_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        return self._told(tier, lambda held: held - set(map(int, hashes)))

    def revoke_all_external_kv_blocks_at_tier(self, tier: str) -> bool:
        return self._told(tier, lambda held: set())

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.refusals.append(str(record.exc_info[1]) if record.exc_info else record.getMessage())
            self._changed.notify_all()

    def wait(self, holds: Callable[[], object], deadline_s: float = DEADLINE_S) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(holds, deadline_s))

    def _told(self, tier: str, change: Callable[[set[int]], set[int]]) -> bool:
        with self._changed:
            self.held[tier] = change(self.held[tier])
            self.calls += 1
            self._changed.notify_all()
        return True


def run(checks: Checks) -> dict[str, Any]:
    mori, umbp = ModuleType("mori"), ModuleType("mori.umbp")
    mori.umbp, umbp.UMBPTierType = umbp, SimpleNamespace(HBM="HBM", DRAM="DRAM")  # type: ignore[attr-defined]
    sys.modules |= {"mori": mori, "mori.umbp": umbp}
    return {"told_the_master": _follows(checks), "refused": _refuses(checks), **_publisher(checks)}


def _at(node: Ours, master: Master, heard: Callable[[], object]) -> Any:
    """SGLang's subscriber, once it hears the node."""
    logger = logging.getLogger(umbp_store.__name__)
    logger.addHandler(master)
    found = umbp_store.KVEventsSubscriber(master, node.publisher.address, TOPIC, dp_rank=0)
    found.start()
    ends_s = time.monotonic() + DEADLINE_S
    while not heard():
        if time.monotonic() > ends_s:
            raise AssertionError("SGLang's subscriber hears nothing")
        node.mark()
        master.wait(heard, 0.05)
    return found


def _follows(checks: Checks) -> int:
    master = Master()
    with Ours() as node:
        subscriber = _at(node, master, lambda: master.calls)
        for prompt in PROMPTS:
            node.serve(prompt)
        due = set(node.known().standing)
        checks.that(master.wait(lambda: master.held["HBM"] == due), f"subscriber: its master has all {len(due)} pages")
        node.evict(3)
        left = set(node.known().standing)
        checks.that(master.wait(lambda: master.held["HBM"] == left < due), f"subscriber: and of {len(left)}, evicted 3")
        checks.that(not master.held["DRAM"], "subscriber: all of them on the GPU")
        subscriber.stop()
        checks.that(not master.refusals, f"subscriber: it has refused nothing {master.refusals or ''}".rstrip())
        _ranks(checks, node.reader.events, left)
        logging.getLogger(umbp_store.__name__).removeHandler(master)
    return master.calls


def _ranks(checks: Checks, events: list[Any], due: set[int]) -> None:
    """It passes over the events of other ranks; a pdkv node is rank 0."""
    for rank in (0, 1):
        master = Master()
        subscriber = umbp_store.KVEventsSubscriber(master, dp_rank=rank)
        for event in events:
            subscriber.on_event(event, 0.0, 0)
        holds = master.held["HBM"] == due if rank == 0 else not master.calls
        checks.that(holds, f"subscriber: for rank {rank} it takes {'all' if rank == 0 else 'nothing'}")


def _refuses(checks: Checks) -> str:
    master = Master()
    with Ours(encoding="array", layout=LAYOUTS["array"]["sglang, positional"]) as node:
        subscriber = _at(node, master, lambda: master.refusals)
        subscriber.stop()
        logging.getLogger(umbp_store.__name__).removeHandler(master)
    checks.that(not master.calls, f"subscriber: fields by position it refuses: {master.refusals[0]}")
    return master.refusals[0]


def _publisher(checks: Checks) -> dict[str, Any]:
    """What SGLang's publisher answers to who asks again, and pdkv's: the same frames."""
    config = KVEventsConfig(publisher="zmq", endpoint=ANYWHERE, replay_endpoint=ANYWHERE, topic=TOPIC)
    publisher = EventPublisherFactory.create(config.model_dump_json())
    source = publisher.describe_local_source(PAGE)
    assert source is not None, "it is bound"
    tree = Theirs("UnifiedRadixCache, core in Rust")
    with Subscriber(source["endpoint"], source["replay_endpoint"], KVEventBatch, TOPIC) as reader:
        for prompt in PROMPTS:
            tree.serve(prompt)
            said = len(tree.events)
            tree.known()
            publisher.publish(KVEventBatch(ts=time.time(), events=tree.events[said:]))
        due, ends_s = sorted(tree.known().standing), time.monotonic() + DEADLINE_S
        while reader.index.ids != due and time.monotonic() < ends_s:
            reader.catch_up()
        same = not Known().hear(reader.events).unlike(tree.known())
        checks.that(same, f"subscriber: the tests' own follows SGLang's publisher, {len(due)} pages")
    theirs = _frames(source["replay_endpoint"])
    publisher.shutdown()
    shapes = {}
    for encoding, layout in (("map", KVEventBatch), ("array", LAYOUTS["array"]["sglang, positional"])):
        with Ours(encoding=encoding, layout=layout) as node:  # type: ignore[arg-type]
            node.serve(PROMPTS[0])
            node.heard()
            shapes[encoding] = _frames(node.publisher.replay_address)
    checks.that(shapes["map"] == theirs, f"subscriber: pdkv's replay has the frames of SGLang's {sorted(theirs)}")
    checks.that(shapes["array"] != theirs, "subscriber: and by position, as before 0.5.20, others")
    return {"replay_frames": sorted(map(list, theirs))}


def _frames(replay: str) -> set[tuple[str, ...]]:
    """What the frames of its answers are, and of the last one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    names = {b"": "empty", TOPIC.encode(): "topic", b"\xff" * 8: "-1"}
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(replay)
        dealer.send_multipart([b"", bytes(8)])
        found: set[tuple[str, ...]] = set()
        while not any("-1" in shape for shape in found):
            assert dealer.poll(int(DEADLINE_S * 1000)), "no answer"
            frames = dealer.recv_multipart()
            found.add(tuple(names.get(each, "sequence" if len(each) == 8 else "payload") for each in frames))
        return found
    finally:
        context.destroy(linger=0)
