"""Which part of the control path time is counted for."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from time import thread_time

import pytest

from pdkv.cli.bench.control_probe import SEAMS, Part, Probe, Seam
from pdkv.errors import ConfigError


def busy(seconds: float) -> None:
    began = thread_time()
    while thread_time() - began < seconds:
        pass


def test_a_parts_time_is_its_own():
    probe = Probe()
    inner = probe.timed(Part.MATCH, lambda: busy(0.02))

    def reserve() -> None:
        busy(0.01)
        inner()

    probe.timed(Part.RESERVATION, reserve)()
    spans = probe.taken()

    assert [(s.part, s.first) for s in spans] == [
        (Part.RESERVATION, True),
        (Part.MATCH, True),
        (Part.RESERVATION, False),
    ]
    assert spans[0].cpu_s == pytest.approx(0.01, abs=0.005)
    assert spans[1].cpu_s == pytest.approx(0.02, abs=0.005)
    assert spans[2].cpu_s < 0.005
    assert all(a.ended_s <= b.began_s for a, b in pairwise(spans))
    assert probe.taken() == []


def test_time_asleep_is_no_cpu_and_threads_dont_mix():
    probe, gate = Probe(), threading.Event()
    thread = threading.Thread(target=probe.timed(Part.POSTING, lambda: gate.wait(5)))
    thread.start()
    probe.timed(Part.HASHING, lambda: busy(0.02))()
    gate.set()
    thread.join()
    hashed, posted = probe.taken()

    assert (hashed.part, posted.part) == (Part.HASHING, Part.POSTING)
    assert posted.began_s <= hashed.began_s < hashed.ended_s <= posted.ended_s
    assert posted.cpu_s < 0.01 < hashed.cpu_s


def test_an_error_passes_and_counts():
    probe = Probe()
    with pytest.raises(ZeroDivisionError):
        probe.timed(Part.COMMIT, lambda: 1 // 0)()
    assert [s.part for s in probe.taken()] == [Part.COMMIT]


def test_every_seam_is_there_and_answers_as_before():
    # in a process of its own: what is wrapped stays so
    code = (
        "from pdkv.cli.bench.control_probe import Part, Probe\n"
        "probe = Probe(); probe.attach()\n"
        "from pdkv.v1 import prefill_pb2\n"
        "raw = prefill_pb2.LeaseCall(lease_id='x').SerializeToString()\n"
        "assert prefill_pb2.LeaseCall.FromString(raw).lease_id == 'x'\n"
        "assert [s.part for s in probe.taken()] == [Part.MESSAGES, Part.MESSAGES]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("where", ["pdkv.kvcache.manager:CacheManager.all", "pdkv.nowhere:f", "os.path:nothing"])
def test_a_seam_that_is_gone_is_an_error(where):
    with pytest.raises(ConfigError, match="seam"):
        Probe().attach([Seam(Part.COMMIT, where)])


def test_each_part_has_a_seam():
    assert {seam.part for seam in SEAMS} == set(Part)
