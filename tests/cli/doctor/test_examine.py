"""All of it together, on this machine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pdkv.cli.app import run
from pdkv.cli.doctor import examine
from pdkv.cli.doctor.finding import Finding, Level, fail
from pdkv.config import DecodeConfig, NodeConfig, PrefillConfig
from pdkv.errors import ConfigError, TransferError
from pdkv.transfer.backends.ucx_probe import UcxFacts
from tests.discovery.dns_server import dns_server

FACTS = UcxFacts("1.23.0", "libucp.so", (("tcp", "lo"), ("cma", "memory")))
HOST = {"memory", "huge pages", "numa", "memlock", "cma", "rdma", "ucx", "UCX_TCP_RX_SEG_SIZE", "socket buffers"}


@pytest.fixture(autouse=True)
def ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live one is asked in test_ucx_probe."""
    monkeypatch.setattr(examine, "ask_ucx", lambda: FACTS)
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def checks(config: NodeConfig) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine.this_machine(config)}


def test_every_check_answers() -> None:
    found = checks(PrefillConfig(pool_pages=9))
    assert found.keys() >= HOST
    assert not found.keys() & {"gpu", "gpu memory"}
    assert found["ucx"].found.startswith("1.23.0")


def test_a_pool_on_a_gpu_is_looked_at_too() -> None:
    """With a GPU or without: one that no machine has."""
    found = checks(DecodeConfig(pool_pages=9, device="cuda:77", memory="torch", ucx_tls="tcp,self"))
    assert found.keys() >= HOST | {"gpu", "gpu memory"}
    assert (found["gpu"].level, found["gpu memory"].level) == (Level.FAIL, Level.FAIL)


def test_a_ucx_that_does_not_start_is_a_finding_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies() -> UcxFacts:
        raise TransferError("UCX ended its process by SIGSEGV")

    monkeypatch.setattr(examine, "ask_ucx", dies)
    found = checks(PrefillConfig(pool_pages=9))
    assert found.keys() >= HOST
    assert (found["ucx"].level, "SIGSEGV" in found["ucx"].found) == (Level.FAIL, True)


def test_transports_of_the_configuration_are_in_force() -> None:
    found = checks(PrefillConfig(pool_pages=9, ucx_tls="tcp,self", require_rdma=True))
    assert found["UCX_TLS"].found == "tcp,self: set by you"
    assert found["rdma"].level is Level.FAIL


def test_peers_that_are_not_there_are_findings() -> None:
    config = DecodeConfig(pool_pages=9, insecure=True)
    found = asyncio.run(examine.peers(config, ["127.0.0.1:1", "127.0.0.1:2"]))
    assert [(f.check, f.level) for f in found] == [(f"peer 127.0.0.1:{n}", Level.FAIL) for n in (1, 2)]
    with pytest.raises(ConfigError, match="insecure"):
        asyncio.run(examine.peers(DecodeConfig(pool_pages=9), ["127.0.0.1:1"]))


# --- the command ------------------------------------------------------------------------------------------------------


def command(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run(["doctor", *args])
    return int(ended.value.code or 0)


def test_the_command_says_ready_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--alone", "--pool-pages", "9") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("ready: ")
    assert "8 pages" not in out
    assert " 9 pages of 369,664 B" in " ".join(out.split())


def test_a_failure_ends_it_with_1_and_stands_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("prefill", "--alone", "--json", "--pool-bytes", "900TiB") == 1
    made = json.loads(capsys.readouterr().out)
    assert (made["role"], made["ready"]) == ("prefill", False)
    [failed] = [f for f in made["findings"] if f["level"] == "fail"]
    assert failed["check"] == "memory"
    assert "pool_pages" in failed["todo"]


def test_settings_are_the_nodes_own_from_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("chunk_tokens: 128\npool_pages: 7\n", "utf-8")
    monkeypatch.setenv("PDKV_MAIN_ROW", "bf16")
    assert command("prefill", "--alone", "--config", str(file)) == 0
    assert "7 pages of 623,616 B" in " ".join(capsys.readouterr().out.split())


def test_a_decode_nodes_prefill_nodes_are_asked_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    async def peers(config: NodeConfig, addresses: tuple[str, ...]) -> list[Finding]:
        asked.append(addresses)
        return [fail("peer", "gone", "look")]

    monkeypatch.setattr(examine, "peers", peers)
    own = ("--prefill-addresses", "p0:1,p1:1", "--insecure")
    assert command(*own, "--connect", "d0:1, p1:1") == 1
    assert command(*own) == 1
    assert command(*own, "--alone") == 0
    assert asked == [("d0:1", "p1:1", "p0:1"), ("p0:1", "p1:1")]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("painter",), "role: 'painter' can't be used; allowed: decode, prefill, rank"),
        (("prefill", "--queue-limit", "3"), "queue_limit"),
        (("--alone", "--connect", "a:1"), "connect: 'a:1' can't be used"),
        (("--alone", "--model", "glm-9"), "model"),
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*args) == 2
    assert words in capsys.readouterr().err


def test_peers_are_found_where_their_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, who aren't there; and a place that finds nobody."""

    async def body() -> list[Finding]:
        async with dns_server() as dns:
            dns.serve("_grpc._tcp.p.test", ["127.0.0.1:1", "127.0.0.1:2"])
            config = DecodeConfig(pool_pages=9, insecure=True, dns_server=dns.address)
            words = ("dns:_grpc._tcp.p.test", "127.0.0.1:2", "dns:nobody.test:7")
            return await examine.peers(config, words)

    found = asyncio.run(body())
    assert [finding.check for finding in found[:4]] == [
        "discovery",
        "discovery",
        "peer 127.0.0.1:1",
        "peer 127.0.0.1:2",
    ]
    assert found[0].found == "dns:_grpc._tcp.p.test finds 127.0.0.1:1, 127.0.0.1:2"
    assert [finding.level for finding in found[:3]] == [Level.OK, Level.FAIL, Level.FAIL]
    assert "dns:nobody.test:7: NXDOMAIN" in found[1].found


def test_a_place_that_is_written_wrongly_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(("doctor", "--connect", "dns:p0", "--insecure"))
    assert ended.value.code == 2
    assert "connect: 'dns:p0' can't be used; allowed: host:port, dns:NAME:PORT" in capsys.readouterr().err
