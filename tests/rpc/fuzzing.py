"""A live server of all services with real nodes behind it, and messages that no honest peer sends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_status import rpc_status
from hypothesis import strategies as st

from pdkv.ids import LeaseId, LocalPages, PageHashes, PeerName, RemotePages, RequestId, ReservationId
from pdkv.kvcache.verifier import Arrival
from pdkv.node.decode import DecodeNode, DecodeSettings
from pdkv.node.messages import GenerateRequest, LeaseCall, LendCall, LocateCall, PrefillRequest, Sampling
from pdkv.node.prefill import PrefillNode, PrefillSettings
from pdkv.node.prompt import plan_prompt
from pdkv.node.rank import Rank
from pdkv.node.ranks import Entry, Joining, NewPeer, Op, RankRead, RankStep, StepKind
from pdkv.router.registry import Registry
from pdkv.router.service import Router
from pdkv.rpc.client import ClientSettings, GrpcDirectory
from pdkv.rpc.convert import generate, intro, prefill, rank, source
from pdkv.rpc.security import Gate, PlainText
from pdkv.rpc.server import GrpcServer, Services
from pdkv.rpc.transport import Endpoint
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.engine import ReadOrder
from pdkv.v1 import common_pb2, prefill_pb2, rank_pb2
from tests.node.grouped import FACTS
from tests.node.scene import alone, answers, held, until
from tests.node.toy import CHUNK, OneByOne, Pair, make_parts
from tests.rpc.test_guard import METHODS

T = TypeVar("T")
LIMIT_S = 20.0
CALL_S = 5.0
"""What asks for more is cut off by its caller, as callers do."""
LEASE_TTL_S = 0.5
PAGES = 24


@dataclass(frozen=True, slots=True)
class Ending:
    """What a call ended with."""

    code: str
    words: str
    named: bool
    """By a status of pdkv's own making."""


class Live:
    """One process that is prefill, decode, router and rank; its loop runs in a thread, tests call from outside."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live", daemon=True)
        self._names = iter(range(1_000_000))
        self.asked = 0

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(body, LIMIT_S), self._loop).result()

    def open(self) -> None:
        self._thread.start()
        self.run(self._open())

    def close(self) -> None:
        self.channel.close()
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        net = LoopbackNet()
        self.directory = GrpcDirectory(PlainText(), ClientSettings(2.0, 2.0))
        node = PrefillNode(make_parts("p0", FACTS, net, pages=PAGES), PrefillSettings(CHUNK, lease_ttl_s=LEASE_TTL_S))
        self._watch = asyncio.create_task(node.watch_leases())
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        settings = DecodeSettings(prefill_addresses=(self.address,))
        decode = DecodeNode(make_parts("d0", FACTS, net, pages=PAGES), self.directory, settings)
        self.pair = Pair(node, decode, net, OneByOne({}))
        self.rank = Rank(make_parts("d1", FACTS, net, pages=PAGES))
        await self.rank.join(Joining(decode.parts.name, self.rank.parts.contract, PAGES))
        router = Router(Registry([self.address], [self.address]), self.directory)
        services = Services(node, decode, router, self.rank, node.source, visit=node.parts.intro)
        self.server = GrpcServer(Endpoint(self.address), services, PlainText(), Gate(calls_per_peer=64))
        await self.server.start()
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.max_send_message_length", -1)])
        await self._good()

    async def _close(self) -> None:
        self._watch.cancel()
        await self.directory.close()
        await self.server.stop(0)
        self.pair.close()
        self.rank.parts.close()

    # --- honest use ---

    def good(self) -> None:
        """The server still does what it is for, on all of its services that an honest peer can use."""
        self.run(self._good())

    async def _good(self) -> None:
        asked = GenerateRequest(
            RequestId(f"good-{next(self._names)}"), np.arange(100, dtype=np.uint32) % 251, Sampling(max_tokens=2)
        )
        for service in (self.directory.decode(self.address), self.directory.router(self.address)):
            tokens, _ = await answers(service.generate(asked))
            assert tuple(tokens) == alone(self.pair, asked)

    def rested(self) -> None:
        """Every page of every node is free or cache; nobody is left who waits for something."""
        self.run(self._rested())

    async def _rested(self) -> None:
        nodes = self.pair.nodes
        await until(lambda: not any(held(n) or n.status().requests or n.status().leases for n in nodes))
        await asyncio.gather(*self.pair.decode.farewells)
        for manager in (*(node.parts.manager for node in nodes), self.rank.parts.manager):
            manager.check()
            census = manager.census()
            if manager is not self.rank.parts.manager:  # what its leader reserves there is its leader's to give back
                assert census["free"] + census["cached"] == census["total"], census

    # --- dishonest use ---

    def call(self, path: str, raw: bytes, metadata: Sequence[tuple[str, str | bytes]] = ()) -> Ending:
        self.asked += 1
        try:
            if METHODS[path].server_streaming:
                for _ in self.channel.unary_stream(path)(raw, timeout=CALL_S, metadata=metadata):
                    pass
            else:
                self.channel.unary_unary(path)(raw, timeout=CALL_S, metadata=metadata)
        except grpc.RpcError as failure:
            error = cast(Any, failure)
            return Ending(error.code().name, error.details() or "", bool(rpc_status.from_call(error)))
        return Ending("OK", "", named=False)

    def examples(self) -> dict[str, Message]:
        """An honest request for every method, of a peer that is connected."""
        decode, node = self.pair.decode.parts, self.pair.prefill.parts
        tokens = np.arange(150, dtype=np.uint32)
        asked = GenerateRequest(RequestId("f"), tokens, Sampling(max_tokens=2), remaining_s=2.0)
        envelope = decode.envelope(node.name)
        wanted = PrefillRequest(envelope, RequestId("f"), tokens, asked.namespace, 0, asked.sampling, 2.0)
        lease = prefill.lease_call_to_pb(LeaseCall(envelope, LeaseId("f")))
        hashes = plan_prompt(np.arange(100, dtype=np.uint32) % 251, asked.namespace, node.contract).hashes
        made: dict[str, Message] = {
            "Prefill/Connect": intro.introduction_to_pb(decode.intro()),
            "Prefill/Prefill": prefill.prefill_request_to_pb(wanted),
            "Prefill/RenewLease": lease,
            "Prefill/ReleaseLease": lease,
            "Source/Connect": intro.introduction_to_pb(decode.intro()),
            "Source/Locate": source.locate_call_to_pb(LocateCall(envelope, hashes)),
            "Source/Lend": source.lend_call_to_pb(LendCall(envelope, hashes, 0)),
            "Source/ReleaseLease": lease,
            "Decode/Generate": generate.generate_request_to_pb(asked),
            "Decode/Finish": generate.finish_call_to_pb(asked.request_id, 1),
            "Router/Generate": generate.generate_request_to_pb(asked),
            **{f"Rank/{name}": message for name, message in self._for_a_rank(decode.name).items()},
        }
        status = common_pb2.StatusRequest()
        return {path: made.get(path.removeprefix("/pdkv.v1."), status) for path in METHODS}

    def _for_a_rank(self, leader: PeerName) -> dict[str, Message]:
        node, own = self.pair.prefill.parts.intro(), self.rank.parts
        pages, hashes = LocalPages.checked([1, 2], PAGES), PageHashes(bytes(64))
        peer = NewPeer(node.name, node.agent_metadata, node.metadata_checksum, node.pool)
        order = ReadOrder(
            node.name, pages, RemotePages.checked([1, 2], PAGES), np.zeros(2, np.uint64), hashes, deadline_s=0.2
        )
        arrival = Arrival(ReservationId(1), 0, pages, hashes, np.zeros((2, 2), np.uint64))
        entry = Entry(Op.RESERVE, ReservationId(1), pages.array, numbers=(2, 0, 0, 0))
        return {
            "Join": rank.joining_to_pb(Joining(leader, own.contract, PAGES)),
            "Apply": rank.entries_to_pb(leader, 0, [entry]),
            "AddPeer": rank.new_peer_to_pb(leader, peer),
            "RemovePeer": rank_pb2.RankPeer(leader=rank.peer_to_pb(leader), name=rank.peer_to_pb(node.name)),
            "Read": rank.read_to_pb(leader, RankRead(1, 0, order)),
            "CancelRead": rank_pb2.RankReadId(leader=rank.peer_to_pb(leader), read_id=1),
            "Settled": rank_pb2.RankReadId(leader=rank.peer_to_pb(leader), read_id=1),
            "Verify": rank.arrival_to_pb(leader, arrival, 0),
            "Step": rank.step_to_pb(
                leader, RankStep(StepKind.FORWARD, 0, np.arange(3, dtype=np.uint32), 0, pages.array)
            ),
        }


@contextmanager
def live() -> Iterator[Live]:
    made = Live()
    made.open()
    try:
        yield made
    finally:
        made.close()


# --- messages that nobody means ---------------------------------------------------------------------------------------

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_NEAR = (0, 1, 2, 31, 32, 63, 64, 65, 2**16, 2**22, 2**31 - 1)
_TEXTS = (
    "",
    "d0",
    "p0",
    "f",
    "none",
    "forward",
    "reserve",
    "end",
    "commit",
    "127.0.0.1:1",
    "a" * 300,
    "\0",
    "é\n",
    "../x",
)


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Of one entry of a field that is no message."""
    kind = field.cpp_type
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        return st.sampled_from([*_NEAR, low, high, high - 1]) | st.integers(low, high)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from([0.0, 0.5, -1.0, 1e300, float("nan"), float("inf")]) | st.floats(width=32)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=80) | st.integers(0, 600).map(lambda n: bytes(n * 4))
    return st.sampled_from(_TEXTS) | st.text(max_size=20)


@st.composite
def mutated(draw: st.DrawFn, message: Message) -> Message:
    """A copy with one to four of its fields, at any depth, cleared, set to anything, repeated or cut."""
    copy = type(message)()
    copy.CopyFrom(message)
    inner = prefill_pb2.IntroductionBody()
    if isinstance(copy, prefill_pb2.Introduction) and draw(st.booleans()):  # its body is bytes to protobuf
        inner.ParseFromString(copy.body)
    changed = inner if inner.ByteSize() else copy
    for _ in range(draw(st.integers(1, 4))):
        _mutate(draw, changed)
    if changed is inner:
        copy.body = inner.SerializeToString()
    return copy


def _mutate(draw: st.DrawFn, message: Message) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    values = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _mutate_map(draw, field, values)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and not (field.is_repeated and not len(values)):
        if draw(st.integers(0, 5)):
            _mutate(draw, draw(st.sampled_from(list(values))) if field.is_repeated else values)
        else:
            message.ClearField(field.name)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        values.add()
    elif field.is_repeated:
        _mutate_column(draw, field, values)
    else:
        setattr(message, field.name, draw(_value(field)))


def _mutate_map(draw: st.DrawFn, field: FieldDescriptor, values: Any) -> None:
    key, entry = draw(st.sampled_from([*values, *_TEXTS])), field.message_type.fields_by_name["value"]
    if draw(st.booleans()):
        values.pop(key, None)
    elif entry.message_type is None:
        values[key] = draw(_value(entry))
    else:
        _mutate(draw, values[key])


def _mutate_column(draw: st.DrawFn, field: FieldDescriptor, values: Any) -> None:
    where = draw(st.integers(0, max(len(values) - 1, 0)))
    match draw(st.sampled_from(["append", "cut", "set", "repeat", "grow"])):
        case "cut":
            del values[where:]
        case "set" if len(values):
            values[where] = draw(_value(field))
        case "repeat" if len(values):
            values.append(values[where])
        case "grow":
            values.extend([draw(_value(field))] * draw(st.integers(1, 5000)))
        case _:
            values.append(draw(_value(field)))


@st.composite
def spoiled(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes with bits turned, parts cut out, doubled or put in."""
    found = bytearray(raw)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(found)))
        length = draw(st.integers(0, 12))
        match draw(st.sampled_from(["flip", "cut", "double", "insert", "end"])):
            case "flip" if at < len(found):
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "double":
                found[at:at] = found[at : at + length]
            case "insert":
                found[at:at] = draw(st.binary(max_size=12))
            case "end":
                del found[at:]
            case _:
                del found[at : at + length]
    return bytes(found)
