"""What settings take: sizes to the byte, and words that are the same in help and refusals."""

from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pdkv.errors import ConfigError
from pdkv.fields import (
    Address,
    Addresses,
    Bytes,
    Count,
    Listed,
    NodeName,
    Seconds,
    ZmqEndpoint,
    field_kind,
    kind_of,
    parse_bytes,
    shown_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("55GB", 55 * 10**9),
        ("56 GiB", 56 << 30),
        ("1.5kib", 1536),
        ("0.1TB", 10**11),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.5", "1.5B", "1e9", "1 GB x", "5 PB", "0x10", "१"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_bytes(text, "memory")
    assert (error.value.fields["field"], error.value.fields["have"]) == ("memory", text)


@given(st.integers(0, 2**70))
def test_no_byte_is_lost(count: int) -> None:
    assert parse_bytes(f"{count}MiB") == count << 20


@given(st.integers(0, 2**50))
def test_a_size_that_is_shown_is_read_back(count: int) -> None:
    assert parse_bytes(shown_bytes(count)) == count


def test_sizes_are_shown_in_the_largest_unit_that_divides_them() -> None:
    assert [shown_bytes(n) for n in (0, 5, 1024, 3 << 20, 1 << 30, (1 << 30) + 1)] == [
        "0",
        "5",
        "1KiB",
        "3MiB",
        "1GiB",
        "1073741825",
    ]


@pytest.mark.parametrize(
    ("annotation", "metavar", "words"),
    [
        (bool, "", "true or false"),
        (str, "TEXT", "text"),
        (Bytes, "SIZE", "a count of bytes such as 4096, 64MiB or 55GB, above 0"),
        (Bytes | None, "SIZE", "a count of bytes such as 4096, 64MiB or 55GB, above 0"),
        (Annotated[Seconds, Field(le=604800.0)], "SECONDS", "a finite number of seconds, above 0, at most 604,800"),
        (Count, "N", "a whole number, at least 0"),
        (Annotated[int, Field(ge=1, le=4096)] | None, "N", "a whole number, 1 to 4,096"),
        (Annotated[int, Field(gt=0, multiple_of=64)], "N", "a whole number, above 0, a multiple of 64"),
        (Annotated[float, Field(ge=0, lt=0.5)], "X", "a number, at least 0, below 0.5"),
        (Literal["a", "b"], "a|b", "one of a, b"),
        (
            Annotated[tuple[Literal["a", "b"], ...], Listed] | None,
            "a|b,...",
            "each one of a, b, with commas between them",
        ),
        (Addresses, "HOST:PORT,...", "each host:port, with commas between them"),
    ],
)
def test_what_a_field_takes(annotation: Any, metavar: str, words: str) -> None:
    kind = kind_of(annotation)
    assert (kind.metavar, kind.words) == (metavar, words)


def test_what_stands_beside_an_annotation_counts_too() -> None:
    class Model(BaseModel):
        addresses: Addresses = Field(min_length=1)

    words = "at least 1, each host:port, with commas between them"
    assert field_kind(Model.model_fields["addresses"]).words == words


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (Address, ("a:0", "[::1]:65535"), ("a", ":1", "a:", "a:65536", "a:\u0967", "a:-1")),
        (Addresses, ("a:1, b:2", "", ["a:1"]), ("a:1,b", ["a"], 7)),
        (NodeName, ("a", "A-1._", "x" * 63), ("", "-a", "a b", "x" * 64, "a\n")),
        (ZmqEndpoint, ("", "tcp://*:1", "ipc:///a"), ("udp://a", "tcp://", "x")),
        (Seconds, (0.5, "1"), (0, float("nan"), float("inf"), "x")),
        (Bytes, (1, "2GiB"), (0, "0", 1.5, "many")),
    ],
)
def test_kinds_refuse_what_they_do_not_take(annotation: Any, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    for value in good:
        adapter.validate_python(value)
    for value in bad:
        with pytest.raises(ValidationError):
            adapter.validate_python(value)
