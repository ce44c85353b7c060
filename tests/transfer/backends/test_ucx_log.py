"""Lanes as UCX prints them; the live library is asked in test_nixl."""

import os
import re
from pathlib import Path

import pytest

from pdkv.transfer.backends import ucx_log
from pdkv.transfer.backends.base import UNKNOWN_LANE
from pdkv.transfer.backends.ucx_log import ReadTable, UcxLog, read_tables

STAMP = "[1795991505.514662] [vm:5099 :0]  "
# as UCX 1.23 of nixl 1.5.1 writes it
LOG = f"""\
{STAMP} +--------+-------------+-----------------------------------+
{STAMP} | decode#01 self cfg#0                                     |
{STAMP} | remote memory write by ucp_put* from host memory to host |
{STAMP} +--------+-------------+-----------------------------------+
{STAMP} | Range  | Description |              Config               |
{STAMP} +--------+-------------+-----------------------------------+
{STAMP} | 0..inf | zero-copy   | cma/memory                        |
{STAMP} +--------+-------------+-----------------------------------+
{STAMP} +--------+-------------+-------------------------------------------+
{STAMP} | decode#01 intra-node cfg#1                                       |
{STAMP} | remote memory read by ucp_get*(multi) into host memory from host |
{STAMP} +--------+-------------+-------------------------------------------+
{STAMP} | Range  | Description |                  Config                   |
{STAMP} +--------+-------------+-------------------------------------------+
{STAMP} | 0..inf | zero-copy   | cma/memory                                |
{STAMP} +--------+-------------+-------------------------------------------+
{STAMP} +-------------+--------------------+------------------------------------------+
{STAMP} | decode#01 inter-node cfg#2                                                  |
{STAMP} | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda              |
{STAMP} +-------------+--------------------+------------------------------------------+
{STAMP} |    Range    |    Description     |                  Config                  |
{STAMP} +-------------+--------------------+------------------------------------------+
{STAMP} |     0..8191 | copy-out           | rc_mlx5/mlx5_0:1                         |
{STAMP} |   8192..inf | zero-copy          | 52% on rc_mlx5/mlx5_0:1 and 48% on rc_mlx5/mlx5_1:1 |
{STAMP} +-------------+--------------------+------------------------------------------+
"""


def test_tables_of_reads_are_found_with_the_row_of_long_ones() -> None:
    assert read_tables(LOG.splitlines()) == [
        ReadTable("decode#01", 1, "host", "zero-copy", "cma/memory"),
        ReadTable("decode#01", 2, "cuda", "zero-copy", "52% on rc_mlx5/mlx5_0:1 and 48% on rc_mlx5/mlx5_1:1"),
    ]


@pytest.mark.parametrize(
    ("how", "lanes", "name", "rdma", "ends_clean"),
    [
        ("zero-copy", "cma/memory", "cma", False, True),
        ("software emulation", "tcp/eth0", "tcp", False, True),
        ("zero-copy", "52% on tcp/lo and 48% on tcp/eth0", "tcp", False, False),
        ("zero-copy", "rc_mlx5/mlx5_0:1", "rc_mlx5", True, False),
        ("zero-copy", "50% on rc_mlx5/mlx5_0:1 and 50% on dc_mlx5/mlx5_1:1", "rc_mlx5+dc_mlx5", True, False),
        ("zero-copy", "50% on rc_mlx5/mlx5_0:1 and 50% on cma/memory", "rc_mlx5+cma", False, False),
        ("software emulation", "rc_verbs/mlx5_0:1", "rc_verbs", False, True),
        ("software emulation", "ud_mlx5/mlx5_0:1", "ud_mlx5", False, True),
        ("zero-copy", "cuda_ipc/cuda", "cuda_ipc", False, False),
        ("copy-out", "sysv/memory", "sysv", False, True),
    ],
)
def test_lanes(how: str, lanes: str, name: str, *, rdma: bool, ends_clean: bool) -> None:
    lane = ReadTable("x", 1, "host", how, lanes).lane()
    assert (lane.name, lane.rdma, lane.ends_clean) == (name, rdma, ends_clean)
    assert lane.copied == (name in ("cma", "sysv"))
    assert lanes in lane.detail


def test_a_table_without_a_transport_is_unknown() -> None:
    assert ReadTable("x", 1, "host", "no protocol", "").lane() == UNKNOWN_LANE


class FakeUcx:
    """The library: opens the log when it is loaded, and writes to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded = False
        self._file = None
        monkeypatch.setattr(ucx_log, "_ucs_library", lambda: "libucs.so" if self.loaded else "")
        monkeypatch.setattr(ucx_log.ctypes, "CDLL", lambda _: self)

    def load(self) -> None:
        self.loaded = True
        self._file = open(os.environ["UCX_LOG_FILE"], "w")  # noqa: SIM115

    def write(self, text: str) -> None:
        assert self._file is not None
        self._file.write(text)

    def ucs_log_flush(self) -> None:
        assert self._file is not None
        self._file.flush()


@pytest.fixture
def ucx(monkeypatch: pytest.MonkeyPatch) -> FakeUcx:
    for key in [k for k in os.environ if k.startswith("UCX_")]:
        monkeypatch.delenv(key)
    return FakeUcx(monkeypatch)


def test_the_log_is_read_from_a_file_without_a_name(ucx: FakeUcx, monkeypatch: pytest.MonkeyPatch) -> None:
    log = UcxLog()
    monkeypatch.setenv("UCX_TLS", "tcp")
    before = dict(os.environ)
    with log.listening({"UCX_TLS": "all", "UCX_TCP_RX_SEG_SIZE": "1m"}):
        assert os.environ["UCX_PROTO_INFO"] == "*remote memory read*"
        assert os.environ["UCX_TCP_RX_SEG_SIZE"] == "1m"
        assert os.environ["UCX_TLS"] == "tcp"
    with log.listening({}):
        path = Path(os.environ["UCX_LOG_FILE"])
        ucx.load()
    assert dict(os.environ) == before
    assert not path.exists()
    half = LOG.index("cma/memory      ", LOG.index("ucp_get"))
    ucx.write(LOG[:half])
    assert log.tables("decode#01", "DRAM") == []
    ucx.write(LOG[half:])
    assert [t.config for t in log.tables("decode#01", "DRAM")] == [1]
    assert [t.config for t in log.tables("decode#01", "VRAM")] == [2]
    assert log.tables("decode#02", "DRAM") == []


def test_only_so_much_of_a_name_is_compared(ucx: FakeUcx) -> None:
    log, name = UcxLog(), "n" * 40
    with log.listening({}):
        ucx.load()
    ucx.write(re.sub("decode#01", "n" * ucx_log.AGENT_CHARS, LOG))
    assert len(log.tables(name, "DRAM")) == 1


def test_warnings_are_passed_on_and_not_all_of_them(ucx: FakeUcx, caplog: pytest.LogCaptureFixture) -> None:
    log = UcxLog()
    with log.listening({}):
        ucx.load()
    ucx.write("".join(f"{STAMP} mpool.c:40 UCX  WARN  object {i} was not returned\n" for i in range(9)))
    log.catch_up()
    assert [r.getMessage() for r in caplog.records] == [
        *(f"WARN  object {i} was not returned" for i in range(3)),
        "and 6 more warnings of UCX",
    ]


def test_the_operators_log_file_is_kept_and_read(ucx: FakeUcx, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCX_LOG_FILE", str(tmp_path / "ucx.%p"))
    log = UcxLog()
    with log.listening({}):
        monkeypatch.setenv("UCX_LOG_FILE", str(tmp_path / f"ucx.{os.getpid()}"))
        ucx.load()
    ucx.write(LOG)
    assert len(log.tables("decode#01", "DRAM")) == 1
    assert (tmp_path / f"ucx.{os.getpid()}").exists()


@pytest.mark.parametrize("place", ["stdout", "stderr"])
def test_a_log_on_the_terminal_stays_free_of_tables(ucx: FakeUcx, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("UCX_LOG_FILE", place)
    log = UcxLog()
    with log.listening({}):
        assert "UCX_PROTO_INFO" not in os.environ
    assert log.tables("decode#01", "DRAM") == []


def test_a_library_that_was_loaded_before_is_not_asked(ucx: FakeUcx) -> None:
    ucx.loaded = True
    log = UcxLog()
    with log.listening({}):
        assert "UCX_LOG_FILE" not in os.environ
        assert "UCX_PROTO_INFO" not in os.environ
    assert log.tables("decode#01", "DRAM") == []
