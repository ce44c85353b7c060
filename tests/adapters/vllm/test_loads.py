"""Loads that must not pass: damage at the source, reuse during the read; and what shadow mode makes of them."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import pytest
import torch

from pdkv.adapters.vllm import loads
from pdkv.kvcache.verifier import Verifier
from pdkv.node.messages import LendCall, Loan
from pdkv.rpc.client import GrpcSource
from pdkv.transfer.orders import ReadOrder, ReadOutcome, ReadStatus
from tests.adapters.vllm.engines import TOKENS, free_port, pair, prompt

T = TypeVar("T")


@pytest.fixture
def sealed_then_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is made of the bytes as they were, then the engine writes to the block: what must never happen."""
    seal = Verifier.seal

    def sealing(self: Verifier, *args: object) -> object:
        proved = seal(self, *args)  # type: ignore[arg-type]
        piece = self.pool.pieces(self.pool.fmt.segments[1].group)[1]
        self.pool.piece_view(piece)[2, 0] ^= torch.tensor(1, dtype=torch.uint8)
        return proved

    monkeypatch.setattr(Verifier, "seal", sealing)


@pytest.mark.usefixtures("sealed_then_changed")
def test_one_bit_is_found_and_the_blocks_from_there_on_are_bad() -> None:
    with pair() as (p, d):
        p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
        d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
        done = d.until(lambda r: r.received)
        assert done.failed == {"r"}
        assert done.bad_blocks == {11, 12, 13}
        counts = d.side.tally.take()
        assert (counts["proofs_failed"], counts["loads_failed/DigestMismatch"]) == (1, 1)
        assert counts["bytes_loaded"] == 2 * 3 * len(p.bytes_of(1)), "read once more before it was given up"
        assert p.until(lambda r: r.sent).sent == {"r"}, "the other engine gets its blocks back all the same"


@pytest.mark.usefixtures("sealed_then_changed")
def test_in_shadow_mode_it_is_counted_and_goes_through() -> None:
    with pair(shadow=True) as (p, d):
        p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
        d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
        done = d.until(lambda r: r.received)
        assert (done.failed, done.bad_blocks) == (set(), set())
        counts = d.side.tally.take()
        assert (counts["proofs_failed"], counts["pages_loaded"]) == (1, 3)


def test_without_damage_nothing_is_counted_in_either_mode() -> None:
    for shadow in (False, True):
        with pair(shadow=shadow) as (p, d):
            p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
            d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
            assert d.until(lambda r: r.received).failed == set()
            assert "proofs_failed" not in d.side.tally.take()


def test_a_lease_without_an_end_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read waits for as long."""
    lend = GrpcSource.lend

    async def lending(self: GrpcSource, call: LendCall) -> Loan:
        loan = await lend(self, call)
        return replace(loan, lease=replace(loan.lease, ttl_s=1e9))

    monkeypatch.setattr(GrpcSource, "lend", lending)
    with pair() as (p, d):
        p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
        d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
        assert d.until(lambda r: r.received).bad_blocks == {11, 12, 13}
        assert d.side.tally.take()["loads_failed/ProtocolError"] == 1


class Reads:
    """In place of a transfer engine's `read`: what the test says becomes of it."""

    def __init__(self, outcome: ReadOutcome) -> None:
        self.outcome, self.asked = outcome, threading.Event()

    def __call__(self, order: ReadOrder) -> Future[ReadOutcome]:
        self.asked.set()
        return done(replace(self.outcome, stale=np.resize(self.outcome.stale, len(order))))


def done(value: T) -> Future[T]:
    made: Future[T] = Future()
    made.set_result(value)
    return made


def ended(status: ReadStatus, *, stale: bool = False, settled: Future[None] | None = None) -> ReadOutcome:
    return ReadOutcome(status, np.array([stale]), 0, 0, 0, 0.0, 0.0, "said the test", settled)


def test_blocks_under_a_read_without_a_proven_end_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (p, d):
        settled: Future[None] = Future()
        reads = Reads(ended(ReadStatus.UNSETTLED, settled=settled))
        monkeypatch.setattr(d.side.station.transfer, "read", reads)
        p.hold("r", prompt(TOKENS), 4)
        d.load("r", prompt(TOKENS), p, 3)
        assert reads.asked.wait(20)
        nobody = replace(p, settings=replace(p.settings, port=free_port()))
        d.load("later", prompt(TOKENS), nobody, 5)
        assert d.until(lambda r: r.received).received == {"later"}, (
            "which was asked for after the read had been given up"
        )
        settled.set_result(None)
        assert d.until(lambda r: r.received).bad_blocks == {3}


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (ended(ReadStatus.FAILED), "TransferError"),
        (ended(ReadStatus.DONE, stale=True), "StalePages"),
    ],
)
def test_a_read_that_failed_or_is_void_is_no_load(
    monkeypatch: pytest.MonkeyPatch, outcome: ReadOutcome, kind: str
) -> None:
    with pair() as (p, d):
        monkeypatch.setattr(d.side.station.transfer, "read", Reads(outcome))
        p.hold("r", prompt(2 * TOKENS), 4, 5)
        d.load("r", prompt(2 * TOKENS), p, 3, 6)
        done = d.until(lambda r: r.received)
        assert done.bad_blocks == {3, 6}
        assert d.side.tally.take()[f"loads_failed/{kind}"] == 1


class Line:
    """In place of a transfer engine's `read`: its reads as they are, but nobody hears of the first one's end before
    `arrives` is called."""

    def __init__(self, read: Callable[[ReadOrder], Future[ReadOutcome]]) -> None:
        self._read, self._first = read, Future[None]()
        self.asked: SimpleQueue[tuple[ReadOrder, float]] = SimpleQueue()
        """With the time at which it was."""

    def __call__(self, order: ReadOrder) -> Future[ReadOutcome]:
        self.asked.put((order, time.monotonic()))
        told: Future[ReadOutcome] = Future()
        read = self._read(order)
        self._first.add_done_callback(lambda _: read.add_done_callback(lambda done: told.set_result(done.result())))
        return told

    def arrives(self, *, late: bool) -> None:
        """`late`: after the lease, which a read's time is the rest of."""
        order, asked_s = self.asked.get(timeout=20)
        while late and time.monotonic() < asked_s + order.deadline_s:
            os.sched_yield()
        self._first.set_result(None)


@pytest.mark.parametrize("late", [False, True])
def test_a_load_that_outlasts_its_lease_ends_by_that_name_with_what_it_has_brought(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    lease_s = 0.3 if late else 60.0
    monkeypatch.setattr(loads, "portions", lambda pages, _: (slice(i, i + 1) for i in range(pages)))
    with pair(lease_s=lease_s) as (p, d):
        line = Line(d.side.station.transfer.read)
        monkeypatch.setattr(d.side.station.transfer, "read", line)
        p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
        d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
        line.arrives(late=late)
        done = d.until(lambda r: r.received)
        assert done.bad_blocks == ({12, 13} if late else set())
        assert d.side.tally.take().get("loads_failed/LeaseExpired") == (1 if late else None)
        assert ("needs a longer lease_s there" in caplog.text) is late
        assert p.until(lambda r: r.sent).sent == {"r"}
        if late:
            assert line.asked.empty(), "nothing is asked for any more"
        else:
            (second, _), (third, _) = line.asked.get(timeout=20), line.asked.get(timeout=20)
            assert lease_s > second.deadline_s > third.deadline_s, "each has what is left"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (ended(ReadStatus.UNSETTLED, settled=done(None)), "TransferUnsettled"),
        (ended(ReadStatus.DONE, stale=True), "StalePages"),
    ],
)
def test_what_is_lacking_once_the_lease_is_over_is_lacking_because_of_that(
    monkeypatch: pytest.MonkeyPatch, outcome: ReadOutcome, kind: str, late: bool
) -> None:
    with pair(lease_s=0.3 if late else 60.0) as (p, d):
        line = Line(Reads(outcome))
        monkeypatch.setattr(d.side.station.transfer, "read", line)
        p.hold("r", prompt(TOKENS), 4)
        d.load("r", prompt(TOKENS), p, 3)
        line.arrives(late=late)
        assert d.until(lambda r: r.received).bad_blocks == {3}
        assert d.side.tally.take()[f"loads_failed/{'LeaseExpired' if late else kind}"] == 1
