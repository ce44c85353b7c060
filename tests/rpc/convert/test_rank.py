"""What a leader and its ranks say comes back as it was; what can't be is refused by its name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.errors import BoundsError, PdkvError, ProtocolError
from pdkv.ids import LocalPages, PageHashes, RemotePages, ReservationId
from pdkv.kvcache.arrival import Arrival
from pdkv.node.ranks import Entry, Joining, NewPeer, Op, RankOutcome, RankRead, RankStep, StepKind
from pdkv.rpc.convert import rank
from pdkv.transfer.engine import Flow, ReadOrder, ReadStatus
from tests.rpc import samples

PAGES = 16
HASHES = PageHashes(bytes(range(64)))
LOCAL = LocalPages.checked([3, 1], PAGES)
DIGESTS = np.array([[1, 2**64 - 1], [3, 4]], np.uint64)
ENTRIES = [
    Entry(Op.RESERVE, ReservationId(1), np.array([3, 1, 2], np.int32), HASHES, (3, 2, 0, 1)),
    Entry(Op.COMMIT, ReservationId(1), np.array([3, 1], np.int32), HASHES, (0,)),
    Entry(Op.QUARANTINE, ReservationId(1), np.array([2], np.int32), reason="no end"),
    Entry(Op.END, ReservationId(1), np.empty(0, np.int32), numbers=(0,)),
]
REMOTE = RemotePages.checked([9, 8], 10)
READ = RankRead(7, 4, ReadOrder(samples.P, LOCAL, REMOTE, DIGESTS[:, 1], HASHES, 2.5, Flow(6, 9, 3)))
ARRIVAL = Arrival(ReservationId(2), 5, LOCAL, HASHES, DIGESTS)
STEP = RankStep(StepKind.VERIFY, 9, np.array([1, 2**32 - 1], np.uint32), 63, np.array([3, 1], np.int32))


def facts(value: Any) -> dict[str, Any]:
    """Fields with arrays as lists."""
    found = {name: getattr(value, name) for name in value.__slots__}
    return {name: field.tolist() if isinstance(field, np.ndarray) else field for name, field in found.items()}


def test_joining_and_new_peers() -> None:
    joining = Joining(samples.D, samples.contract(), 99)
    assert rank.joining_from_pb(rank.joining_to_pb(joining)) == joining
    intro = samples.intro()
    new = NewPeer(intro.name, intro.agent_metadata, intro.metadata_checksum, intro.pool)
    assert rank.new_peer_from_pb(rank.new_peer_to_pb(samples.D, new)) == new


def test_the_log() -> None:
    message = rank.entries_to_pb(samples.D, 41, ENTRIES)
    assert message.first == 41
    assert [facts(e) for e in rank.entries_from_pb(message)] == [facts(e) for e in ENTRIES]


def test_reads_and_their_ends() -> None:
    found = rank.read_from_pb(rank.read_to_pb(samples.D, READ), PAGES)
    assert (found.read_id, found.after) == (7, 4)
    assert facts(found.order) == facts(READ.order)
    for status in ReadStatus:
        ended = RankOutcome(status, np.array([False, True]), "words")
        assert facts(rank.outcome_from_pb(rank.outcome_to_pb(ended), 2)) == facts(ended)


def test_arrivals_and_steps() -> None:
    assert facts(rank.arrival_from_pb(rank.arrival_to_pb(samples.D, ARRIVAL, 3), PAGES)) == facts(ARRIVAL)
    assert facts(rank.step_from_pb(rank.step_to_pb(samples.D, STEP))) == facts(STEP)
    assert rank.digests_from("digests", DIGESTS.tobytes(), 2).tolist() == DIGESTS.tolist()


def more(column: str, page: int) -> Callable[[Any], object]:
    """Another page id in that column."""
    return lambda m: setattr(m, column, getattr(m, column) + page.to_bytes(4, "little", signed=True))


def read(change: Callable[[Any], object]) -> object:
    message = rank.read_to_pb(samples.D, READ)
    change(message)
    return rank.read_from_pb(message, PAGES)


def entry(change: Callable[[Any], object]) -> object:
    message = rank.entries_to_pb(samples.D, 0, ENTRIES[:1])
    change(message.entries[0])
    return rank.entries_from_pb(message)


def arrival(change: Callable[[Any], object]) -> object:
    message = rank.arrival_to_pb(samples.D, ARRIVAL, 0)
    change(message)
    return rank.arrival_from_pb(message, PAGES)


def step(change: Callable[[Any], object]) -> object:
    message = rank.step_to_pb(samples.D, STEP)
    change(message)
    return rank.step_from_pb(message)


def outcome(change: Callable[[Any], object]) -> object:
    message = rank.outcome_to_pb(RankOutcome(ReadStatus.DONE, np.array([False, True])))
    change(message)
    return rank.outcome_from_pb(message, 2)


@pytest.mark.parametrize(
    ("say", "change", "named"),
    [
        (read, lambda m: m.ClearField("peer"), "peer"),
        (read, more("local", PAGES), "page id"),
        (read, more("local", 2), "generations"),
        (read, more("remote", 2), "read order"),
        (read, more("remote", -1), "remote"),
        (read, lambda m: setattr(m, "remote", b"123"), "remote"),
        (read, lambda m: setattr(m, "generations", m.generations[:-1]), "generations"),
        (read, lambda m: setattr(m, "deadline_s", float("nan")), "deadline_s"),
        (read, lambda m: setattr(m, "hashes", b"x"), "page hashes"),
        (read, lambda m: setattr(m.flow, "pages", 2**40), r"flow\.pages"),
        (read, lambda m: setattr(m.flow, "after", 2**40), r"flow\.after"),
        (entry, lambda m: setattr(m, "op", "evict"), r"entry\.op"),
        (entry, lambda m: m.numbers.extend(range(9)), r"entry\.numbers"),
        (entry, lambda m: setattr(m, "reason", "\x00"), r"entry\.reason"),
        (entry, more("pages", -1), r"entry\.pages"),
        (arrival, lambda m: setattr(m, "digests", m.digests + bytes(8)), "digests"),
        (arrival, more("pages", 0), "page id"),
        (step, more("pages", -1), "pages"),
        (step, lambda m: setattr(m, "kind", "train"), "kind"),
        (step, lambda m: setattr(m, "tokens", b"123"), "tokens"),
        (step, lambda m: setattr(m, "start", 2**40), "start"),
        (outcome, lambda m: setattr(m, "status", "perhaps"), "status"),
        (outcome, lambda m: m.stale.append(2), "stale"),
    ],
)
def test_what_can_t_be_is_refused(say: Callable[..., object], change: Callable[[Any], object], named: str) -> None:
    with pytest.raises(PdkvError, match=f"^{named}") as caught:
        say(change)
    assert isinstance(caught.value, ProtocolError | BoundsError)


def test_long_reasons_are_cut() -> None:
    long = replace(ENTRIES[2], reason="x" * 5000)
    assert len(rank.entries_from_pb(rank.entries_to_pb(samples.D, 0, [long]))[0].reason) == 1024
