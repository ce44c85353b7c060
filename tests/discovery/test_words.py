"""What a word in a list of addresses means."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.discovery.words import ALLOWED, Hosts, Place, Services, Slices, host_and_port, place_of


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("10.0.0.7:7000", None),
        ("[::1]:7000", None),
        ("prefill-0.prefill:7000", None),
        ("dns:7000", None),
        ("k8s:7000", None),
        ("not an address", None),
        ("dns:prefill:7000", Hosts("prefill", 7000)),
        ("dns:prefill.pdkv.svc.cluster.local.:65535", Hosts("prefill.pdkv.svc.cluster.local.", 65535)),
        ("dns:_grpc._tcp.prefill", Services("_grpc._tcp.prefill")),
        ("k8s:prefill", Slices("", "prefill", "grpc")),
        ("k8s:pdkv/prefill:serve", Slices("pdkv", "prefill", "serve")),
    ],
)
def test_a_word_is_a_place_or_none(word: str, place: Place | None) -> None:
    assert place_of(word) == place
    if place is not None:
        assert place_of(str(place)) == place


@pytest.mark.parametrize(
    "word",
    [
        *("dns:", "dns:prefill", "dns:prefill:70000", "dns:_grpc.prefill", "dns:_grpc._tcp.prefill:7000", "dns:a b:7"),
        *("k8s:", "k8s:a/b/c", "k8s:a:b:c", "k8s:/a", "k8s:a_b", "dns:-a:7"),
    ],
)
def test_a_place_that_is_written_wrongly_is_refused_with_what_is_allowed(word: str) -> None:
    with pytest.raises(ValueError, match="k8s:") as refused:
        place_of(word)
    assert str(refused.value) == ALLOWED


@given(st.text())
def test_any_text_is_a_place_or_none_or_refused(word: str) -> None:
    with suppress(ValueError):
        place = place_of(word)
        assert place is None or place_of(str(place)) == place


@pytest.mark.parametrize(("host", "port", "address"), [("h.x", 1, "h.x:1"), ("fd00::7", 7000, "[fd00::7]:7000")])
def test_an_address_as_everybody_writes_it(host: str, port: int, address: str) -> None:
    assert host_and_port(host, port) == address


@pytest.mark.parametrize(("host", "port"), [("", 1), ("@", 1), ("a/b", 1), ("a b", 1), ("h", 0), ("h", 65536)])
def test_what_nobody_could_dial_is_none(host: str, port: int) -> None:
    with pytest.raises(ValueError, match="is no address"):
        host_and_port(host, port)
