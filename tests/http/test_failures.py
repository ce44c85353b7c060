"""Errors as statuses and objects."""

from __future__ import annotations

import json

import pytest

from pdkv import errors
from pdkv.errors import (
    BodyTooLarge,
    BoundsError,
    CapacityError,
    ConfigError,
    ContractMismatch,
    DeadlineExceeded,
    DigestMismatch,
    Draining,
    FieldRefused,
    KeyRefused,
    LeaseExpired,
    LimitReached,
    NeverFits,
    NotAuthorised,
    PdkvError,
    PeerLost,
    ProtocolError,
    SlowClient,
    UnknownModel,
)
from pdkv.http.failures import failure_of, status_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FieldRefused("n", "2", "1"), 400),
        (ConfigError("fault", "x", "none"), 400),
        (
            BoundsError(
                "token id",
                999,
                "below 256",
            ),
            400,
        ),
        (KeyRefused("no key"), 401),
        (NotAuthorised("no name"), 403),
        (UnknownModel("a", ["b"]), 404),
        (SlowClient("slow"), 408),
        (BodyTooLarge("bytes", 9, 8), 413),
        (NeverFits("too large"), 413),
        (CapacityError("no pages"), 429),
        (LimitReached("too many"), 429),
        (DigestMismatch("bytes"), 500),
        (PdkvError("a bug"), 500),
        (Draining("ends"), 503),
        (PeerLost("gone", address="a:1"), 503),
        (ContractMismatch([]), 503),
        (DeadlineExceeded("late"), 504),
        # what nodes did to each other is nobody's fault out here
        (LeaseExpired("over"), 502),
        (NotAuthorised("no name", address="a:1"), 502),
        (ProtocolError("wrong", address="a:1", accepted_by="b:1"), 502),
    ],
)
def test_statuses(error: PdkvError, status: int) -> None:
    assert failure_of(error).status == status


def test_what_may_be_better_soon_says_when() -> None:
    assert failure_of(CapacityError("full", retry_after_s=2.6)).headers["Retry-After"] == "3"
    for said in ("nan", "inf", "x", "-5", "0.1"):
        assert failure_of(Draining("ends", retry_after_s=said)).headers["Retry-After"] == "1"
    assert "Retry-After" not in failure_of(NeverFits("too large")).headers


def test_the_object() -> None:
    found = json.loads(failure_of(FieldRefused("n", "2", "1")).body)["error"]
    assert found.pop("message") == "n: 2 can't be used; allowed: 1"
    assert found == {"type": "invalid_request_error", "param": "n", "code": "FieldRefused"}
    assert json.loads(failure_of(PeerLost("gone")).body)["error"]["type"] == "server_error"


def test_every_error_has_a_status() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, PdkvError)]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind)
        PdkvError.__init__(error, "words")
        error._differences = ()  # type: ignore[attr-defined]
        assert 400 <= status_of(error) < 600
