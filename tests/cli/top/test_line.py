"""Figures of a line: what a node said, and differences between two looks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdkv.cli.top.line import DRAINING, READY, SILENT, UNREADY, line_of, lines_of
from pdkv.cli.top.look import Seen
from pdkv.ids import Incarnation, NodeId, PeerName
from pdkv.node.routing import RouterStatus
from tests.rpc import samples

TOTALS = {"read_main_bytes": 1000, "read_index_bytes": 100, "prompt_tokens": 640, "hit_pages": 5, "done_requests": 2}
NODE = replace(samples.status("decode"), totals=TOTALS, unready="", draining=False)
LATER = {"read_main_bytes": 5000, "read_index_bytes": 300, "prompt_tokens": 1280, "hit_pages": 13, "done_requests": 6}


def test_a_first_look_has_no_rates() -> None:
    line = line_of(Seen("d0:1", 10.0, NODE), None)
    assert line.rates == {}
    assert line.state == READY
    assert line.hit_share == pytest.approx(5 * 64 / 640)
    assert line.pages == {"total": 15, "used": 2, "locked": 1, "evictable": 1, "quarantined": 1, "free": 10}
    assert sum(count for name, count in line.pages.items() if name != "total") == line.pages["total"]
    assert (line.requests, line.queued, line.leases) == (2, 1, 1)
    assert (line.peers, line.lanes) == ({"SUSPECT": 1}, ("cma",))


def test_rates_are_differences_over_the_time_between_two_answers() -> None:
    before = Seen("d0:1", 10.0, NODE)
    line = line_of(Seen("d0:1", 14.0, replace(NODE, totals=LATER)), before)
    assert line.rates["in_main_bytes_per_s"] == pytest.approx(1000.0)
    assert line.rates["in_index_bytes_per_s"] == pytest.approx(50.0)
    assert line.rates["done_requests_per_s"] == pytest.approx(1.0)
    assert line.rates["out_main_bytes_per_s"] == 0.0
    assert line.hit_share == pytest.approx(8 * 64 / 640)


def test_without_a_prompt_since_the_last_look_there_is_no_share_of_hits() -> None:
    before = Seen("d0:1", 10.0, NODE)
    assert line_of(Seen("d0:1", 14.0, replace(NODE, totals={**TOTALS, "hit_pages": 6})), before).hit_share is None
    assert line_of(Seen("d0:1", 14.0, replace(NODE, totals={})), None).hit_share is None


def test_there_is_no_rate_across_a_restart() -> None:
    before = Seen("d0:1", 10.0, replace(NODE, totals=LATER))
    again = replace(NODE, name=PeerName(NodeId("prefill-0"), Incarnation("c" * 32)))
    line = line_of(Seen("d0:1", 14.0, again), before)
    assert line.rates == {}
    assert line.hit_share == pytest.approx(5 * 64 / 640)


def test_states_and_their_reasons() -> None:
    def state(status: object, error: str = "") -> tuple[str, str]:
        line = line_of(Seen("d0:1", 1.0, status, error), None)  # type: ignore[arg-type]
        return line.state, line.why

    assert state(replace(NODE, draining=True)) == (DRAINING, "")
    assert state(replace(NODE, unready="no rank")) == (UNREADY, "no rank")
    assert state(None, "PeerLost: gone") == (SILENT, "PeerLost: gone")


def test_a_router_has_its_nodes_by_whether_they_are_up() -> None:
    status = RouterStatus({"p0:1": "up", "p1:1": "PeerLost: gone"}, {"d0:1": "up"}, 3, waiting=1)
    (line,) = lines_of([Seen("r0:1", 1.0, status)], [])
    assert (line.role, line.state, line.peers) == ("router", READY, {"UP": 2, "DOWN": 1})
    assert (line.requests, line.queued) == (3, 1)
    none = replace(status, decode={"d0:1": "Draining: leaving"})
    assert line_of(Seen("r0:1", 1.0, none), None).state == UNREADY
