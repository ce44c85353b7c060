"""Subscribers of KV events, with field layouts as their projects have them, in code of our own.

- SGLang up to 0.5.19: `srt/disaggregation/kv_events.py`, events by position (`array_like`)
- vLLM before its pull request 42892 (June 2026): `distributed/kv_events.py`, events by position
- vLLM since then, and SGLang since 0.5.20: events by name; `make sglang-interop` holds SGLang's to its own types
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, Union

import msgspec
import zmq

from tests.kvcache.router_index import RouterIndex
from tests.waiting import DEADLINE_S

_Field = tuple[str, Any] | tuple[str, Any, Any]

_VLLM_STORED: list[_Field] = [
    ("block_hashes", list[int | bytes]),
    ("parent_block_hash", int | bytes | None),
    ("token_ids", list[int]),
    ("block_size", int),
    ("lora_id", int | None),
    ("medium", str | None),
    ("lora_name", str | None),
    ("extra_keys", list[tuple[Any, ...] | None] | None, None),
]
_VLLM_REMOVED: list[_Field] = [
    ("block_hashes", list[int | bytes]),
    ("medium", str | None),
    ("group_idx", int | None, None),
]
_SGLANG_STORED: list[_Field] = [
    ("block_hashes", list[int]),
    ("parent_block_hash", int | None),
    # annotated list[int] there, but with EAGLE it sends pairs
    ("token_ids", list[int | tuple[int, int]]),
    ("block_size", int),
    ("lora_id", int | None),
    ("medium", str | None, None),
]
_SGLANG_NAMED: list[_Field] = [
    *_SGLANG_STORED,
    ("cache_salt", str | None, None),
    ("session_id", str | None, None),
    ("lora_name", str | None, None),
]
_SGLANG_REMOVED: list[_Field] = [("block_hashes", list[int]), ("medium", str | None, None)]


def _batch(stored: list[_Field], removed: list[_Field], *, array_like: bool) -> type[msgspec.Struct]:
    """The batch type of one project and time, over its three events."""
    tags = {"BlockStored": stored, "BlockRemoved": removed, "AllBlocksCleared": []}
    events = [msgspec.defstruct(n, f, array_like=array_like, omit_defaults=True, tag=True) for n, f in tags.items()]
    fields: list[_Field] = [
        ("ts", float),
        ("events", list[Union[tuple(events)]]),  # type: ignore[misc]  # noqa: UP007
        ("data_parallel_rank", int | None, None),
    ]
    return msgspec.defstruct("KVEventBatch", fields, array_like=True, omit_defaults=True)


LAYOUTS: dict[str, dict[str, type[msgspec.Struct]]] = {
    "array": {
        "sglang, positional": _batch(_SGLANG_STORED, _SGLANG_REMOVED, array_like=True),
        "vllm, positional": _batch(_VLLM_STORED, _VLLM_REMOVED, array_like=True),
    },
    "map": {
        "sglang, named": _batch(_SGLANG_NAMED, _SGLANG_REMOVED, array_like=False),
        "vllm, named": _batch(_VLLM_STORED, _VLLM_REMOVED, array_like=False),
    },
}
"""Encoding to reader to its batch type."""


class Subscriber:
    """Follows one publisher from its first batch on: sees gaps, asks for what it missed, keeps a router's index."""

    def __init__(self, live: str, replay: str, layout: type[msgspec.Struct], topic: str = "") -> None:
        self.index = RouterIndex()
        self.next = 0
        """The batch that is due."""
        self.replayed: list[int] = []
        self.missing: list[tuple[int, int]] = []
        """Batches [from, to) that nobody has any more."""
        self.events: list[Any] = []
        """All that was said, in order."""
        self._decoder = msgspec.msgpack.Decoder(layout)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.connect(live)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def waiting(self, wait_ms: int) -> bool:
        """Whether a live batch is there, or comes within that time."""
        return bool(self._live.poll(wait_ms))

    def take(self) -> int:
        """The next live batch, after any that were missed; its number."""
        assert self._live.poll(int(DEADLINE_S * 1000)), f"batch {self.next} did not come"
        _, number, payload = self._live.recv_multipart()
        sequence = int.from_bytes(number, "big")
        if sequence > self.next:
            self.catch_up()
        self._apply(sequence, payload)
        return sequence

    def take_all(self) -> None:
        """Whatever is there: ends with an answer that holds nothing new."""
        while self.waiting(0):
            self.take()
        self.catch_up()

    def catch_up(self) -> None:
        """Ask for everything from the batch that is due on."""
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(int(DEADLINE_S * 1000)), "no answer from the replay address"
            delimiter, *_, number, payload = self._replay.recv_multipart()
            assert delimiter == b""
            if not payload:
                assert number == b"\xff" * 8
                return
            sequence = int.from_bytes(number, "big")
            if sequence > self.next:
                self.missing.append((self.next, sequence))
                self.next = sequence
            self.replayed.append(sequence)
            self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        if sequence < self.next:
            return
        self.next = sequence + 1
        said_s, events, rank = msgspec.structs.astuple(self._decoder.decode(payload))
        assert said_s > 0
        assert rank == 0
        self.events += events
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    assert (event.lora_id, event.medium) == (None, "GPU")
                    self.index.stored(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size)
                case "BlockRemoved":
                    assert event.medium == "GPU"
                    self.index.removed(event.block_hashes)
                case _:
                    self.index.cleared()
