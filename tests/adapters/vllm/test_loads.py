"""Loads that must not pass: damage at the source, reuse during the read; and what shadow mode makes of them."""

import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from pdkv.kvcache.verifier import Verifier
from pdkv.node.messages import LendCall, Loan
from pdkv.rpc.client import GrpcSource
from pdkv.transfer.orders import ReadOrder, ReadOutcome, ReadStatus
from tests.adapters.vllm.engines import TOKENS, free_port, pair, prompt


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


@pytest.mark.parametrize("step", ["seal", "verify"])
def test_a_device_that_cant_digest_ends_the_load(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def failing(self: Verifier, *args: object) -> object:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(Verifier, step, failing)
    with pair() as (p, d):
        p.hold("r", prompt(3 * TOKENS), 4, 2, 9)
        d.load("r", prompt(3 * TOKENS), p, 11, 12, 13)
        assert d.until(lambda r: r.received).bad_blocks == {11, 12, 13}
        kind = {"seal": "StalePages", "verify": "IntegrityError"}[step]
        assert d.side.tally.take()[f"loads_failed/{kind}"] == 1


class Reads:
    """In place of a transfer engine's `read`: what the test says becomes of it."""

    def __init__(self, outcome: ReadOutcome) -> None:
        self.outcome, self.asked = outcome, threading.Event()

    def __call__(self, order: ReadOrder) -> Future[ReadOutcome]:
        self.asked.set()
        answered: Future[ReadOutcome] = Future()
        answered.set_result(replace(self.outcome, stale=np.resize(self.outcome.stale, len(order))))
        return answered


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
