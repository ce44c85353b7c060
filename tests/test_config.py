"""Configuration: who wins, what is refused and by which name."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdkv.config import (
    ROLES,
    DecodeConfig,
    NodeConfig,
    PrefillConfig,
    RouterConfig,
    ServiceConfig,
)
from pdkv.errors import BoundsError, ConfigError
from pdkv.fields import field_kind
from pdkv.kvcache.eviction import ORDERS
from pdkv.resolve import resolve
from pdkv.rpc.convert.checks import MAX_DURATION_S, duration_s
from pdkv.rpc.security import Gate, MutualTls, PlainText

NODE = {"node_id": "p0"}


def refused(cls: type[ServiceConfig], values: dict[str, Any], **more: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        resolve(cls, values, **{"environ": {}, **more})
    return error.value


def test_defaults() -> None:
    config = resolve(PrefillConfig, NODE, environ={})
    assert (config.bind, config.lease_ttl_s, config.chunk_tokens) == ("127.0.0.1:0", 30.0, 32_768)
    assert (config.read_max_bytes, config.digest, config.placement) == (512 << 20, "xxh3_64", "page_major")
    assert not resolve(DecodeConfig, NODE, environ={}).allow_fault_injection


def test_a_node_is_called_as_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, name in (("pod-7", "pod-7"), ("a b.c", "a-b.c"), ("--", "node"), ("x" * 80, "x" * 63), ("", "node")):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        made = resolve(DecodeConfig, {}, environ={}).node_id
        assert made == name
        assert resolve(DecodeConfig, {"node_id": made}, environ={}).node_id == name


@pytest.mark.parametrize("cls", [PrefillConfig, DecodeConfig, RouterConfig])
def test_every_field_says_what_it_is(cls: type[ServiceConfig]) -> None:
    assert [name for name, field in cls.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("cls", "values", "field", "allowed"),
    [
        (PrefillConfig, {"node_id": "a#b"}, "node_id", "letters A to Z"),
        (PrefillConfig, {"chunk_token": 64}, "chunk_token", "chunk_tokens"),
        (DecodeConfig, {"chunk_tokens": 64}, "chunk_tokens", "prefill_addresses"),
        (PrefillConfig, {"chunk_tokens": 100}, "chunk_tokens", "a whole number, above 0, a multiple of 64"),
        (PrefillConfig, {"chunk_tokens": 0}, "chunk_tokens", "a whole number, above 0, a multiple of 64"),
        (PrefillConfig, {"lease_ttl_s": -1}, "lease_ttl_s", "a finite number of seconds, above 0, at most 604,800"),
        (PrefillConfig, {"lease_ttl_s": float("nan")}, "lease_ttl_s", "a finite number of seconds, above 0"),
        (PrefillConfig, {"digest": "crc"}, "digest", "one of xxh3_64, none"),
        (PrefillConfig, {"placement": "row_major"}, "placement", "page_major"),
        (PrefillConfig, {"eagle_rule": "two"}, "eagle_rule", "drop_page"),
        (PrefillConfig, {"bind": "localhost"}, "bind", "host:port"),
        (PrefillConfig, {"bind": "localhost:70000"}, "bind", "host:port"),
        (PrefillConfig, {"bind": "0.0.0.0:0"}, "bind", "advertise"),
        (PrefillConfig, {"bind": "0.0.0.0:0", "advertise": "[::]:1"}, "advertise", "advertise"),
        (PrefillConfig, {"pool_bytes": "1 potato"}, "pool_bytes", "64MiB"),
        (PrefillConfig, {"pool_bytes": 0}, "pool_bytes", "55GB, above 0"),
        (PrefillConfig, {"pool_pages": 1}, "pool_pages", "a whole number, at least 2"),
        (PrefillConfig, {"pool_pages": 9, "pool_bytes": 9}, "pool_pages", "not both"),
        (PrefillConfig, {"synthetic_token_us": 5}, "synthetic_token_us", 'only when engine is "synthetic"'),
        (DecodeConfig, {"reserve": "late", "preempt": "offload"}, "preempt", "none where reserve is late"),
        (DecodeConfig, {"reserve": "late", "rank_addresses": "h:1"}, "reserve", "all where rank_addresses are given"),
        (DecodeConfig, {"reserve_window_pages": 0}, "reserve_window_pages", "at least 1"),
        (PrefillConfig, {"metrics_bind": "9400"}, "metrics_bind", "host:port"),
        (PrefillConfig, {"memory": "file"}, "memory_path", "only then"),
        (PrefillConfig, {"memory_path": "a"}, "memory_path", "only then"),
        (DecodeConfig, {"fault_plan": "kill@decode.reading:nth=1"}, "fault_plan", "only with allow_fault_injection"),
        (PrefillConfig, {"draft_layers": 1}, "draft_layers", "mtp"),
        (PrefillConfig, {"draft_layers": 2, "speculation": "mtp"}, "draft_layers", "mtp"),
        (DecodeConfig, {"speculation": "mtp", "eagle_rule": "drop_page"}, "eagle_rule", "bigram"),
        (DecodeConfig, {"speculation": "oracle", "rollback_tokens": 3}, "rollback_tokens", "draft_tokens"),
        (DecodeConfig, {"speculation": "eagle"}, "speculation", "one of none, mtp, oracle"),
        (DecodeConfig, {"draft_tokens": 0}, "draft_tokens", "a whole number, 1 to 16"),
        (PrefillConfig, {"indexer_types": "full,half"}, "indexer_types.1", "one of full, shared"),
        (DecodeConfig, {"prefill_addresses": "a:1,b"}, "prefill_addresses.1", "host:port"),
        (DecodeConfig, {"source_addresses": "dns:a:b"}, "source_addresses.0", "host:port"),
        (DecodeConfig, {"prefill_addresses": "a:1,dns:b"}, "prefill_addresses.1", "dns:NAME:PORT"),
        (DecodeConfig, {"dns_server": "ns.test:53"}, "dns_server", "IP address:port"),
        (RouterConfig, {"decode_addresses": "a:1"}, "prefill_addresses", "no default"),
        (
            RouterConfig,
            {"decode_addresses": "", "prefill_addresses": "a:1"},
            "decode_addresses",
            "at least 1, each host:port, dns:NAME:PORT, dns:_PORT._tcp.NAME or k8s:[NAMESPACE/]SERVICE[:PORT], with",
        ),
    ],
)
def test_refusals_name_the_field(cls: type[ServiceConfig], values: dict[str, Any], field: str, allowed: str) -> None:
    error = refused(cls, {**NODE, **values})
    assert error.fields["field"] == field
    assert allowed in error.fields["allowed"]
    if field in values:
        assert str(values[field]) in error.fields["have"]


def test_every_eviction_order_can_be_named_and_no_other() -> None:
    for name in ORDERS:
        assert resolve(NodeConfig, {**NODE, "eviction": name}, environ={}).eviction == name
    assert "one of lru, lfu, fifo, priority" in str(refused(NodeConfig, {**NODE, "eviction": "mru"}))


def test_total_pages() -> None:
    def total(**values: object) -> int:
        return resolve(NodeConfig, {**NODE, **values}, environ={}).total_pages(1000)

    assert total(pool_pages=7) == 7
    assert total(pool_bytes=2000) == 2
    assert total(pool_bytes="5.5kB") == 5
    with pytest.raises(ConfigError, match=r"pool_bytes: 1999 .*2000"):
        total(pool_bytes=1999)


NONSENSE: tuple[Any, ...] = (
    *("", "x", "1.5", "-1", "0", "1" * 5000, "nan", "inf", "a,b", ",", "\u0967"),
    *(-1, 0, 1.5, float("nan"), float("inf"), 10**400, True, b"x", [], [1], {}, object()),
)


@pytest.mark.parametrize("cls", ROLES)
def test_whatever_is_wrong_with_a_value_it_is_refused_in_our_words(cls: type[ServiceConfig]) -> None:
    """The field, the value, and all that is allowed: nothing of what pydantic says, whatever it complains of."""
    needed = {name: "a:1" for name, info in cls.model_fields.items() if info.is_required()}
    kinds_of_mistakes = set()
    for name, info in cls.model_fields.items():
        kind = field_kind(info)
        for value in NONSENSE:
            values = {**needed, name: value}
            try:
                cls.model_validate(values)
            except ValidationError as complaint:
                first = complaint.errors()[0]
                error = refused(cls, values)
                if first["loc"]:
                    kinds_of_mistakes.add(first["type"])
                    assert error.fields["field"].split(".")[0] == name
                    assert error.fields["allowed"] in (kind.words, kind.items and kind.items.words), (name, value)
                assert not re.search("[Ii]nput|should|valid|pydantic", error.fields["allowed"]), (name, value)
    assert len(kinds_of_mistakes) >= 8, kinds_of_mistakes


FILES = {"tls_ca": "ca.pem", "tls_certificate": "own.pem", "tls_key": "own.key"}


def test_tls_or_plain_text_and_neither_by_itself() -> None:
    made = resolve(PrefillConfig, {**NODE, **FILES}, environ={}).security()
    assert made == MutualTls(Path("ca.pem"), Path("own.pem"), Path("own.key"), "p0")
    addresses = {"prefill_addresses": "a:1", "decode_addresses": "b:2"}
    assert resolve(RouterConfig, {**NODE, **addresses, **FILES}, environ={}).security() == replace(made, node="")
    assert resolve(PrefillConfig, {**NODE, "insecure": "true"}, environ={}).security() == PlainText()
    environ = {f"PDKV_{name.upper()}": value for name, value in FILES.items()}
    assert resolve(PrefillConfig, NODE, environ=environ).security() == made
    for values, field in (
        ({}, "insecure"),
        ({**FILES, "insecure": True}, "insecure"),
        ({"tls_ca": "a"}, "tls_certificate"),
    ):
        with pytest.raises(ConfigError) as error:
            resolve(PrefillConfig, {**NODE, **values}, environ={}).security()
        assert error.value.fields["field"] == field


def test_who_may_call_and_how_much() -> None:
    assert resolve(DecodeConfig, NODE, environ={}).gate() == Gate()
    asked = {"allow_names": "router-*, spiffe://fleet/*", "allow_status": "a", "calls_per_peer": "7", "connections": 9}
    asked |= {"allow_admin": "admin,ops-*", "connections_per_peer": 8}
    due = Gate(("router-*", "spiffe://fleet/*"), ("a",), ("admin", "ops-*"), 7, 8, 9)
    assert resolve(DecodeConfig, {**NODE, **asked}, environ={}).gate() == due
    assert refused(DecodeConfig, {**NODE, "allow_status": "a"}).fields["allowed"].startswith("only with allow_names")
    error = refused(DecodeConfig, {**NODE, "insecure": True, "allow_names": "a"})
    assert (error.fields["field"], error.fields["allowed"]) == (
        "allow_names",
        "only under mutual TLS; in plain text nobody has a name",
    )
    for field in ("calls_per_peer", "connections_per_peer", "connections"):
        assert refused(DecodeConfig, {**NODE, field: 0}).fields["field"] == field


def test_a_lease_lives_as_long_as_a_decode_node_believes() -> None:
    """One constant for what is set here and for what is taken there."""
    assert resolve(PrefillConfig, {**NODE, "lease_ttl_s": MAX_DURATION_S}, environ={}).lease_ttl_s == MAX_DURATION_S
    assert duration_s("ttl_s", MAX_DURATION_S) == MAX_DURATION_S
    longer = math.nextafter(MAX_DURATION_S, math.inf)
    assert refused(PrefillConfig, {**NODE, "lease_ttl_s": longer}).fields["field"] == "lease_ttl_s"
    with pytest.raises(BoundsError):
        duration_s("ttl_s", longer)
