"""Raw yardsticks move the right bytes in processes of their own, say what is absent, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdkv.cli.bench import yardsticks
from pdkv.cli.bench.yardsticks import (
    Absent,
    Ceiling,
    Kind,
    Pages,
    RawProcess,
    Reading,
    Yardsticks,
    YardstickSettings,
    pieces,
    source_command,
)
from pdkv.errors import BoundsError, ConfigError, DeadlineExceeded, PeerLost, TransferError
from pdkv.geometry.model_config import load_config, model_shape
from pdkv.geometry.page_layout import page_format
from pdkv.transfer.backends.ucx_settings import tcp_segments
from tests.waiting import until_ended

FORMAT = page_format(model_shape(load_config("tiny")))
COUNT = 12
SHUFFLED = np.random.default_rng(5).permutation(COUNT)
PAGES = Pages.of(SHUFFLED[:8], SHUFFLED[::-1][:8])
MIXED = YardstickSettings(pieces(FORMAT, COUNT, "page_major", "layer_major"), COUNT, deadline_s=30)
OPTIONAL = {Kind.UCX, Kind.MOONCAKE}


@pytest.fixture(scope="module")
def raw() -> Iterator[Yardsticks]:
    with Yardsticks(MIXED) as pair:
        yield pair


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_moves_the_bytes_or_says_why_not(raw: Yardsticks, kind: Kind) -> None:
    reading = raw.measure(kind, PAGES, repeats=2, verify=True)
    if isinstance(reading, Absent):
        assert kind in OPTIONAL
        assert "pip install" in reading.reason
        return
    assert reading.verified
    assert reading.bytes == len(PAGES.local) * FORMAT.page_bytes
    assert len(reading.seconds) == 2
    assert all(0 <= post_s <= seconds for post_s, seconds in zip(reading.post_s, reading.seconds, strict=True))
    assert reading.descriptors == (1 if kind is Kind.NIXL_LARGEST else len(PAGES.local) * len(MIXED.pieces))
    assert reading.sink_cpu_s > 0
    assert reading.source_cpu_s > 0


def test_bytes_are_compared_the_first_time_only(raw: Yardsticks) -> None:
    readings = [raw.measure(Kind.MEMCPY, PAGES) for _ in range(2)]
    assert not any(reading.verified for reading in readings[1:] if isinstance(reading, Reading))


def test_pieces_are_those_that_pdkv_reads() -> None:
    (whole,) = pieces(FORMAT, COUNT)
    assert (whole.length, whole.local_stride) == (FORMAT.page_bytes, FORMAT.page_bytes)
    assert [p.length for p in MIXED.pieces] == [s.length for s in FORMAT.segments]
    ends = [p.remote_base + (COUNT - 1) * p.remote_stride + p.length for p in MIXED.pieces]
    assert max(ends) == COUNT * FORMAT.page_bytes


def test_pages_come_in_pairs() -> None:
    assert Pages.of(np.array([2, 1], np.int32), [0, 3]) == Pages((2, 1), (0, 3))
    with pytest.raises(ConfigError, match="remote pages"):
        Pages.of([1, 2], [1])
    with pytest.raises(ConfigError, match="remote pages"):
        Pages.of([], [])


def test_figures_of_a_reading() -> None:
    reading = Reading(Kind.SOCKET, 10**9, (1.0, 4.0, 2.0), (0.0, 0.0, 0.0), 1, 6.0, 3.0, True)
    assert reading.gb_per_s == 0.5
    assert reading.cpu_s_per_gb == (2.0, 1.0)


def test_raw_nixl_counts_only_near_process_vm_readv() -> None:
    assert Ceiling(9.0, 10.0).counts
    assert not Ceiling(8.9, 10.0).counts


def test_as_it_comes_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TCP_TX_SEG_SIZE", raising=False)
    settings = yardsticks._ucx_settings(replace(MIXED, ucx_tls="tcp"))
    assert settings["UCX_TLS"] == "tcp"
    assert f"UCX_TCP_TX_SEG_SIZE={settings['UCX_TCP_TX_SEG_SIZE']}" in tcp_segments()
    assert yardsticks._ucx_settings(replace(MIXED, as_it_comes=True)) == {}
    monkeypatch.setenv("UCX_TLS", "self")
    assert "UCX_TLS" not in yardsticks._ucx_settings(replace(MIXED, ucx_tls="tcp"))


class Astray(RawProcess):
    """Its sink expects another content than the source has."""

    def ask(self, op: str, **words: Any) -> dict[str, Any]:
        if op == "pool" and self.role == "sink":
            words["seed"] += 1
        return super().ask(op, **words)


def test_wrong_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardsticks, "RawProcess", Astray)
    with Yardsticks(MIXED) as pair, pytest.raises(TransferError, match="other bytes"):
        pair.measure(Kind.SOCKET, PAGES)


def test_a_killed_process_is_named_and_the_other_ended() -> None:
    with Yardsticks(MIXED) as pair:
        pids = pair.pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"raw source .*-9"):
            pair.measure(Kind.MEMCPY, PAGES)
    until_ended(pids)


def test_a_process_that_cannot_start_says_so() -> None:
    with pytest.raises(PeerLost, match="raw source ended with 1 at pool"), Yardsticks(replace(MIXED, python="false")):
        pass


def test_pages_outside_the_pools_are_refused(raw: Yardsticks) -> None:
    with pytest.raises(BoundsError, match=f"below {COUNT}"):
        raw.measure(Kind.MEMCPY, Pages.of([0], [COUNT]))


def test_silence_has_a_deadline() -> None:
    process = RawProcess("sink", (), replace(MIXED, deadline_s=0.2))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match="raw sink: no answer to usage"):
        process.ask("usage")
    process.close()
    until_ended([process.pid])


PARENT = """
import select, sys
from tests.cli.bench.test_yardsticks import MIXED, Yardsticks
with Yardsticks(MIXED) as pair:
    print(*pair.pids, flush=True)
    # a signal that comes just before a read doesn't interrupt it: one without an end would go on for ever
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        pass
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(how: signal.Signals) -> None:
    line = [sys.executable, "-c", PARENT]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(how)
        assert parent.wait() != 0
    assert len(pids) == 2
    until_ended(pids)


def test_a_source_on_another_host_is_dialled() -> None:
    line = source_command("127.0.0.1:0")
    with subprocess.Popen(line, stderr=subprocess.PIPE) as source:
        assert source.stderr is not None
        at = source.stderr.readline().split()[-1].decode()
        with Yardsticks(replace(MIXED, source_at=at)) as pair:
            assert isinstance(pair.measure(Kind.SOCKET, PAGES), Reading)
        assert source.wait() == 0


def test_nobody_at_the_source() -> None:
    with (
        pytest.raises(PeerLost, match=r"no raw source at 127\.0\.0\.1:9"),
        Yardsticks(replace(MIXED, source_at="127.0.0.1:9")),
    ):
        pass


def test_nothing_polls_between_two_measurements() -> None:
    """NIXL's progress thread burns a core for as long as its agent lives."""
    with Yardsticks(replace(MIXED, as_it_comes=True)) as pair:
        pair.measure(Kind.MEMCPY, PAGES)
        before = [len(os.listdir(f"/proc/{pid}/task")) for pid in pair.pids]
        assert isinstance(pair.measure(Kind.NIXL_PAGES, PAGES), Reading)
        assert [len(os.listdir(f"/proc/{pid}/task")) for pid in pair.pids] == before
