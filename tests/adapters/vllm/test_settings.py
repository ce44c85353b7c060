"""The connector's extra configuration."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from pdkv.adapters.vllm.settings import HOST, PORT, Settings, settings_of, worker_id
from pdkv.errors import ConfigError, ProtocolError
from pdkv.ids import NodeId, PeerName, new_incarnation
from pdkv.rpc.convert.common import peer_from_pb, peer_to_pb
from pdkv.rpc.security import MutualTls, PlainText


def test_nothing_said_is_the_defaults() -> None:
    assert settings_of({}, {}) == Settings()


def test_what_nixl_connector_is_told_holds_here() -> None:
    said = settings_of({}, {HOST: "10.0.0.1", PORT: "5700"})
    assert (said.host, said.port) == ("10.0.0.1", 5700)
    assert settings_of({"port": 5800}, {PORT: "5700"}).port == 5800, "and is overruled by what is said to this one"


def test_an_ipv6_address_gets_its_brackets_once() -> None:
    said = settings_of({"bind": "[::]"}, {HOST: "fd00::1"})
    assert (said.host, said.bind) == ("[fd00::1]", "[::]")


def test_numbers_may_be_whole() -> None:
    assert settings_of({"hold_s": 30}, {}).hold_s == 30.0


@pytest.mark.parametrize(
    ("extra", "environ"),
    [
        ({"holds": 3}, {}),
        ({"port": "5600"}, {}),
        ({"port": True}, {}),
        ({"shadow": 1}, {}),
        ({"hold_s": "long"}, {}),
        ({"hold_s": 0}, {}),
        ({"hold_s": 10**400}, {}),
        ({"lease_s": 1e9}, {}),
        ({"find_s": float("nan")}, {}),
        ({"port": 0}, {}),
        ({"port": 65536}, {}),
        ({}, {PORT: "high"}),
        ({}, {PORT: "0"}),
    ],
)
def test_what_cant_be_meant_is_refused_by_name(extra: dict[str, Any], environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter({**extra, **environ}))):
        settings_of(extra, environ)


def test_three_files_are_mutual_tls_and_two_are_none() -> None:
    files = {"tls_ca": "ca.pem", "tls_certificate": "c.pem", "tls_key": "k.pem"}
    worker = NodeId("engine-0")
    assert settings_of(files, {}).security_of(worker) == MutualTls(Path("ca.pem"), Path("c.pem"), Path("k.pem"), worker)
    assert isinstance(Settings().security_of(worker), PlainText)
    with pytest.raises(ConfigError, match="all three"):
        _ = settings_of({"tls_ca": "ca.pem"}, {}).security_of(worker)


MADE_UP = str(uuid.UUID(int=7 << 96, version=4))


@pytest.mark.parametrize("engine_id", [MADE_UP, f"{MADE_UP}_dp0", "prefill-0", "p" * 61])
def test_an_engine_id_makes_names_of_workers_that_other_nodes_take(engine_id: str) -> None:
    name = PeerName(worker_id(engine_id, 3), new_incarnation())
    assert peer_from_pb(peer_to_pb(name)) == name


@pytest.mark.parametrize("engine_id", ["", "pre/0", "-p", "p 0", "p" * 62, "pre\n"])
def test_one_that_makes_none_is_refused_by_name(engine_id: str) -> None:
    with pytest.raises(ConfigError, match=r"engine_id: .* can't be used; allowed: letters.*vLLM makes one"):
        worker_id(engine_id, 0)
    with pytest.raises(ProtocolError):  # what every other node would have said
        peer_from_pb(peer_to_pb(PeerName(NodeId(f"{engine_id}-0"), new_incarnation())))
