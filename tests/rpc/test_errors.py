"""Errors as statuses and back."""

import inspect

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc.aio import AioRpcError, Metadata
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from pdkv import errors
from pdkv.errors import (
    AccountMismatch,
    BoundsError,
    ConfigError,
    ContractMismatch,
    DeadlineExceeded,
    Difference,
    MissingDependency,
    PdkvError,
    PeerLost,
    RemoteError,
    RouterFull,
)
from pdkv.rpc.errors import KINDS, MAX_METADATA_BYTES, error_from, status_of

DIFFERENCES = [Difference("main_row_bytes", "656", "576", "content: equal"), Difference("tp", "1", "2", "x")]
SPECIAL: dict[type[PdkvError], PdkvError] = {
    ConfigError: ConfigError("field", "have", "allowed"),
    BoundsError: BoundsError("what", 3, "1 to 2"),
    MissingDependency: MissingDependency("nixl", "RDMA"),
    ContractMismatch: ContractMismatch(DIFFERENCES),
    AccountMismatch: AccountMismatch(DIFFERENCES),
}


def example(kind: type[PdkvError]) -> PdkvError:
    """An error of every class, whatever its constructor takes."""
    if kind in SPECIAL:
        return SPECIAL[kind]
    made = kind.__new__(kind)
    PdkvError.__init__(made, "words of it", wanted=7, free="3")
    return made


def carried(status: grpc.Status) -> AioRpcError:
    """What a client gets to see of a status."""
    return AioRpcError(status.code, Metadata(), Metadata(*status.trailing_metadata), status.details)


def bare(code: grpc.StatusCode, details: str = "words", trailing: Metadata | None = None) -> AioRpcError:
    return AioRpcError(code, Metadata(), trailing or Metadata(), details)


def received(failure: AioRpcError) -> PdkvError:
    return error_from(failure, address="host:1", what="Prefill")


def test_the_registry_holds_every_error() -> None:
    assert set(KINDS.values()) == {
        c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, PdkvError)
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_each_class_survives(kind: type[PdkvError]) -> None:
    sent = example(kind)
    status = status_of(sent)
    assert status.code.name == kind.status
    back = received(carried(status))
    assert type(back) is kind
    assert str(back) == str(sent)
    assert dict(back.fields).items() >= dict(sent.fields).items()
    assert list(back.differences) == list(sent.differences)
    assert back.fields["address"] == "host:1"


def test_the_first_node_that_reported_stays_named_over_hops() -> None:
    once = received(carried(status_of(PeerLost("gone"))))
    twice = error_from(carried(status_of(once)), address="host:2", what="Generate")
    assert twice.fields["address"] == "host:1"
    assert str(twice) == "gone"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, PeerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, PeerLost),
        (grpc.StatusCode.UNIMPLEMENTED, RemoteError),
        (grpc.StatusCode.INTERNAL, RemoteError),
    ],
)
def test_statuses_of_grpc_itself(code: grpc.StatusCode, kind: type[PdkvError]) -> None:
    back = received(bare(code))
    assert type(back) is kind
    assert str(back) == f"Prefill at host:1: {code.name}: words"
    assert back.fields == {"address": "host:1", "code": code.name}


def test_a_kind_of_a_later_version_becomes_a_remote_error() -> None:
    class TooNew(PdkvError):
        status = "ABORTED"

    status = status_of(PeerLost("new words"))
    trailing = Metadata(
        *((key, value.replace(b"PeerLost", b"PeerLess")) for key, value in status.trailing_metadata or ())
    )
    back = received(bare(status.code, status.details, trailing))
    assert type(back) is RemoteError
    assert (back.fields["kind"], back.fields["code"], str(back)) == ("PeerLess", "UNAVAILABLE", "new words")
    assert type(received(carried(status_of(TooNew("x"))))) is PdkvError


@given(st.binary(max_size=60))
def test_damaged_details_are_no_details(damaged: bytes) -> None:
    back = received(bare(grpc.StatusCode.ABORTED, "words", Metadata(("grpc-status-details-bin", damaged))))
    assert type(back) is RemoteError


def test_large_errors_are_cut_to_fit() -> None:
    many = [Difference(f"field{i}", "x" * 50_000, "é\n" * 9000, "content: equal") for i in range(500)]
    for error in (ContractMismatch(many), PeerLost("x" * 200_000, **{f"f{i}": "y" * 9000 for i in range(99)})):
        status = status_of(error)
        ((_, detail),) = status.trailing_metadata or ()
        assert len(detail) * 4 / 3 + 3 * len(status.details.encode()) < MAX_METADATA_BYTES / 2
        back = received(carried(status))
        assert type(back) is type(error)
        assert len(back.differences) == (64 if error.differences else 0)
        assert "\n" not in status.details


@pytest.mark.parametrize(("said", "due"), [("2.5", [2.5]), ("soon", []), ("nan", []), ("inf", []), ("1e300", [])])
def test_when_to_come_again_is_there_for_clients_of_other_makes(said: str, due: list[float]) -> None:
    full = RouterFull("512 run and 512 wait", retry_after_s=said)
    status = rpc_status.from_call(carried(status_of(full)))  # type: ignore[arg-type]
    assert status is not None
    found = [RetryInfo.FromString(d.value) for d in status.details if d.Is(RetryInfo.DESCRIPTOR)]
    assert [info.retry_delay.ToTimedelta().total_seconds() for info in found] == due
    back = received(carried(status_of(full)))
    assert (type(back), back.fields["retry_after_s"]) == (RouterFull, said)
