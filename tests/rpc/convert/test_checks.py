"""Single values of a peer, at their bounds."""

from collections.abc import Callable

import numpy as np
import pytest

from pdkv.errors import BoundsError, ProtocolError
from pdkv.rpc.convert import checks
from pdkv.v1 import common_pb2


@pytest.mark.parametrize(
    "refused",
    [
        lambda: checks.within("f", float("nan"), 0, 1),
        lambda: checks.within("f", 2, 0, 1),
        lambda: checks.text("f", "x" * 1025),
        lambda: checks.name("f", ""),
        lambda: checks.duration_s("f", 0.0),
        lambda: checks.duration_s("f", -1.0),
        lambda: checks.duration_s("f", float("inf")),
        lambda: checks.duration_s("f", float("nan")),
        lambda: checks.elapsed_s("f", -0.1),
        lambda: checks.sized("f", b"123", 0, 32),
        lambda: checks.optional_hash("f", b"1" * 31),
        lambda: checks.bounded("f", range(4097)),
        lambda: checks.words("f", b"12345", "<f4", 9),
        lambda: checks.words("f", b"12345678", "<f4", 1),
        lambda: checks.tokens_from(b""),
        lambda: checks.tokens_from(b"12345"),
        lambda: checks.tokens_from(bytes(4 * ((1 << 22) + 1))),
    ],
)
def test_out_of_bounds(refused: Callable[[], object]) -> None:
    with pytest.raises(BoundsError, match=r"^(f|tokens)\b"):
        refused()


@pytest.mark.parametrize(
    "refused",
    [
        lambda: checks.text("f", "a\nb"),
        lambda: checks.matching("f", "a b", checks.NODE_NAME),
        lambda: checks.matching("f", "A" * 32, checks.INCARNATION),
        lambda: checks.matching("f", "unix:/run/x", checks.ADDRESS),
        lambda: checks.matching("f", "host", checks.ADDRESS),
        lambda: checks.one_of("f", "c", ("a", "b")),
        lambda: checks.column("f", [1, 2], np.uint64, 3),
        lambda: checks.raw_column("f", bytes(8), np.int32, 3),
        lambda: checks.rising("f", [0, 0], 9),
        lambda: checks.rising("f", [0, 9], 9),
        lambda: checks.present(common_pb2.Envelope(), "sender"),
    ],
)
def test_against_the_protocol(refused: Callable[[], object]) -> None:
    with pytest.raises(ProtocolError, match=r"^(f|sender)\b"):
        refused()


def test_what_is_within_bounds_passes() -> None:
    assert checks.duration_s("f", 1e-6) == 1e-6
    assert checks.elapsed_s("f", 0.0) == 0.0
    assert checks.rising("f", [0, 3, 8], 9) == (0, 3, 8)
    assert checks.rising("f", [], 0) == ()
    assert len(checks.rising("f", range(5000), 5000)) == 5000, "a long prompt in small chunks"
    assert checks.matching("f", "[::1]:80", checks.ADDRESS) == "[::1]:80"
    assert checks.column("f", [2**64 - 1], np.uint64, 1).tolist() == [2**64 - 1]
    raw = checks.raw_column("f", bytes.fromhex("01000000feffffff"), np.int32, 2)
    assert (raw.tolist(), raw.dtype) == ([1, -2], np.int32)


def test_tokens_are_little_endian_and_not_copied() -> None:
    raw = bytes.fromhex("01000000ffffffff")
    tokens = checks.tokens_from(raw)
    assert tokens.tolist() == [1, 2**32 - 1]
    assert tokens.dtype == np.uint32
    assert checks.tokens_raw(tokens) is raw
    assert checks.tokens_raw(tokens[1:]) == raw[4:]
    assert checks.tokens_raw(tokens[::-1]) == raw[4:] + raw[:4]
    assert checks.tokens_raw(np.array([1, 2**32 - 1], np.uint32)) == raw


def test_a_message_over_the_limit_is_refused_by_name() -> None:
    checks.require_sendable(common_pb2.Namespace(extra_key="x" * 100), "Prefill")
    with pytest.raises(BoundsError, match="Prefill, bytes of the message: 671"):
        checks.require_sendable(common_pb2.Namespace(extra_key="x" * (64 << 20)), "Prefill")
