"""Whatever arrives, every call ends with a status, the server lives, and no page is lost.

A few hundred examples in the suite; `pytest --hypothesis-profile=fuzz -o faulthandler_timeout=0 tests/rpc/test_fuzz.py`
takes some ten thousand.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import DeadlineExceeded, PdkvError
from pdkv.ids import PageHashes
from pdkv.rpc.convert import common, generate, intro, prefill, rank
from tests.node import scene
from tests.rpc import samples
from tests.rpc.fuzzing import CALL_S, Live, live, mutated, spoiled
from tests.rpc.test_guard import METHODS

PATHS = sorted(METHODS)
HONEST_EVERY = 100
"""Calls, after which one is made that must be answered as ever."""


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    log = logging.getLogger("pdkv")
    level = log.level
    log.setLevel(logging.CRITICAL)  # refusals by the thousand
    try:
        with live() as made:
            yield made
            made.good()
            made.rested()
    finally:
        log.setLevel(level)


def ends_well(server: Live, path: str, raw: bytes, metadata: list[tuple[str, Any]] | None = None) -> None:
    """With a status, and never that of a bug. (A leader's own log may contradict itself: that is IntegrityError.)"""
    ending = server.call(path, raw, metadata or [])
    if not server.asked % HONEST_EVERY:
        server.good()
    assert "failed with" not in ending.words, (path, raw, ending)
    assert ending.code not in ("UNKNOWN", "CANCELLED"), (path, raw, ending)
    assert ending.code not in ("INTERNAL", "UNAVAILABLE") or ending.named, (path, raw, ending)


def test_a_bug_and_a_lost_page_would_be_noticed(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the honest request after it is what it says: it fails with a server that answers nothing."""
    node = server.pair.prefill

    def status() -> Any:
        raise KeyError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(node, "status", status)
        with pytest.raises(AssertionError, match="failed with KeyError"):
            ends_well(server, "/pdkv.v1.Prefill/Status", b"")
    with monkeypatch.context() as broken:
        broken.setattr(scene, "LIMIT_S", 0.2)
        reserved = node.parts.manager.reserve(PageHashes(), 3, max_hit_pages=0)
        with pytest.raises(DeadlineExceeded):
            server.rested()
        node.parts.manager.end(reserved)
    with monkeypatch.context() as broken:
        broken.setattr(server.pair.decode, "generate", server.pair.prefill.prefill)
        with pytest.raises(PdkvError):
            server.good()
    ends_well(server, "/pdkv.v1.Prefill/Status", b"")


@given(data=st.data())
def test_any_bytes(server: Live, data: st.DataObject) -> None:
    for path in data.draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4)):
        ends_well(server, path, data.draw(st.binary(max_size=300)))


@given(data=st.data())
def test_messages_that_nobody_means(server: Live, data: st.DataObject) -> None:
    examples = server.examples()
    for path in data.draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3)):
        ends_well(server, path, data.draw(mutated(examples[path])).SerializeToString())


@given(data=st.data())
def test_messages_that_were_damaged(server: Live, data: st.DataObject) -> None:
    examples = server.examples()
    for path in data.draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3)):
        ends_well(server, path, data.draw(spoiled(examples[path].SerializeToString())))


KEYS = st.from_regex(r"[a-z][a-z0-9_.-]{0,20}", fullmatch=True).filter(lambda k: not k.startswith("grpc-"))
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=60)


@given(data=st.data())
def test_headers_that_nobody_means(server: Live, data: st.DataObject) -> None:
    text = st.tuples(KEYS.filter(lambda k: not k.endswith("-bin")), PRINTABLE)
    binary = st.tuples(KEYS.map(lambda k: f"{k}-bin"), st.binary(max_size=60))
    long = st.tuples(st.just("x-long"), st.integers(1, 200_000).map(lambda n: "a" * n))
    metadata = data.draw(st.lists(text | binary | long, max_size=5))
    path = data.draw(st.sampled_from(PATHS))
    ending = server.call(path, server.examples()[path].SerializeToString(), metadata)
    assert "failed with" not in ending.words, (path, metadata, ending)


# --- below gRPC -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(server: Live) -> bytes:
    """What an honest client's connection says, from its first byte: a status, and a prompt to compute."""
    import grpc

    host, port = server.address.split(":")
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def between() -> None:
            mine, _ = listener.accept()
            theirs = socket.create_connection((host, int(port)))

            def pump(source: socket.socket, sink: socket.socket, keep: bytearray | None) -> None:
                while part := source.recv(65536):
                    if keep is not None:
                        keep.extend(part)
                    sink.sendall(part)
                sink.shutdown(socket.SHUT_WR)

            back = threading.Thread(target=pump, args=(theirs, mine, None))
            back.start()
            pump(mine, theirs, heard)
            back.join()
            mine.close()
            theirs.close()

        thread = threading.Thread(target=between)
        thread.start()
        with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            channel.unary_unary("/pdkv.v1.Prefill/Status")(b"", timeout=CALL_S)
            path = "/pdkv.v1.Prefill/Prefill"
            list(channel.unary_stream(path)(server.examples()[path].SerializeToString(), timeout=CALL_S))
        thread.join()
    assert heard.startswith(b"PRI * HTTP/2.0")
    return bytes(heard)


@given(data=st.data())
def test_connections_that_are_cut_or_speak_no_http(server: Live, spoken: bytes, data: st.DataObject) -> None:
    """The server may answer what it likes; it hangs up in the end, or hears that it was hung up on."""
    cut = st.integers(0, len(spoken)).map(lambda n: spoken[:n])
    raw = data.draw(
        cut | spoiled(spoken) | st.binary(max_size=200) | st.binary(max_size=100).map(lambda b: spoken[:60] + b)
    )
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=CALL_S) as connection:
        try:
            connection.sendall(raw)
            if data.draw(st.booleans()):
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        except (ConnectionResetError, BrokenPipeError):
            pass
    ends_well(server, "/pdkv.v1.Prefill/Status", b"")


# --- the converters, without a server ---------------------------------------------------------------------------------

Convert = Callable[[Any], object]


def _answers() -> list[tuple[Message, Convert]]:
    """What a node may be told by a peer that it called."""
    events = [samples.ACCEPTED, samples.pages(3, 1), samples.prefill_done(samples.pages(1, 3))]
    made: list[tuple[Message, Convert]] = [
        (prefill.prefill_event_to_pb(event, samples.ENVELOPE), prefill.prefill_event_from_pb) for event in events
    ]
    drafted = replace(samples.prefill_done(), draft=samples.handoff())
    made.append((prefill.prefill_event_to_pb(drafted, samples.ENVELOPE), prefill.prefill_event_from_pb))
    for event in (samples.TOKEN, samples.TOKEN_INSTEAD, samples.GENERATE_DONE):
        made.append((generate.generate_event_to_pb(event), generate.generate_event_from_pb))
    made.append((common.status_to_pb(samples.status("decode")), common.status_from_pb))
    made.append((intro.introduction_to_pb(samples.intro()), intro.introduction_from_pb))
    made.append((intro.pool_to_pb(samples.intro().pool), intro.pool_from_pb))
    made.append((common.contract_to_pb(samples.contract()), common.contract_from_pb))
    outcome = rank.rank_pb2.RankOutcome(status="done", stale=[1, 2], reason="x")
    made.append((outcome, lambda message: rank.outcome_from_pb(message, 4)))
    return made


ANSWERS = _answers()


@given(data=st.data())
def test_answers_that_nobody_means_are_named_errors(data: st.DataObject) -> None:
    message, convert = data.draw(st.sampled_from(ANSWERS))
    if data.draw(st.booleans()):
        changed = data.draw(mutated(message))
    else:
        changed = type(message)()
        try:
            changed.ParseFromString(data.draw(spoiled(message.SerializeToString())))
        except DecodeError:
            return
    with suppress(PdkvError):
        convert(changed)


@pytest.mark.parametrize(("message", "convert"), ANSWERS, ids=lambda v: type(v).__name__)
def test_untouched_they_are_taken(message: Message, convert: Convert) -> None:
    convert(message)
