"""One look at a fleet: who is asked, what is heard of whom, and that nobody is waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdkv.cli.top import look
from pdkv.cli.top.look import Fleet, Status, role_of
from pdkv.errors import PeerLost
from pdkv.node.routing import RouterStatus
from tests.rpc import samples

ROUTER = RouterStatus({"p0:1": "up", "p1:1": "PeerLost: gone"}, {"d0:1": "up"}, 3)


class Answers:
    """By address; an error is raised, None hangs."""

    def __init__(self, **found: Status | Exception | None) -> None:
        self.found = {f"{name}:1": what for name, what in found.items()}
        self.asked: list[str] = []

    async def __call__(self, address: str) -> Status:
        self.asked.append(address)
        found = self.found[address]
        if found is None:
            await asyncio.Event().wait()
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found


def test_a_router_is_enough_to_find_all_others() -> None:
    answers = Answers(
        r0=ROUTER, d0=samples.status("decode", samples.D), p0=samples.status("prefill"), p1=PeerLost("gone")
    )
    fleet = Fleet(answers, ["r0:1"])
    seen = asyncio.run(fleet.look())
    assert [(each.address, role_of(each)) for each in seen] == [
        ("r0:1", "router"),
        ("d0:1", "decode"),
        ("p0:1", "prefill"),
        ("p1:1", "prefill"),
    ]
    assert [bool(each.status) for each in seen] == [True, True, True, False]
    assert (seen[3].error, seen[3].word) == ("PeerLost: gone", "PeerLost: gone")
    assert sorted(answers.asked) == ["d0:1", "p0:1", "p1:1", "r0:1"]


def test_nodes_stay_known_while_their_router_is_gone_and_go_when_it_names_others() -> None:
    answers = Answers(r0=ROUTER, d0=samples.status("decode"), p0=samples.status("prefill"), p1=PeerLost("gone"))
    fleet = Fleet(answers, ["r0:1"])
    asyncio.run(fleet.look())
    answers.found["r0:1"] = PeerLost("gone")
    without = asyncio.run(fleet.look())
    assert {each.address for each in without if each.status} == {"d0:1", "p0:1"}
    assert {each.address for each in without} == {"r0:1", "d0:1", "p0:1", "p1:1"}
    answers.found["r0:1"] = RouterStatus({"p0:1": "up"}, {"d0:1": "up"}, 0)
    assert {each.address for each in asyncio.run(fleet.look())} == {"r0:1", "d0:1", "p0:1"}


def test_a_node_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "ASK_S", 0.2)
    answers = Answers(r0=ROUTER, d0=None, p0=samples.status("prefill"), p1=None)
    began_s = time.monotonic()
    seen = {each.address: each for each in asyncio.run(Fleet(answers, ["r0:1", "d0:1"]).look())}
    assert time.monotonic() - began_s < 10 * look.ASK_S
    assert seen["p0:1"].status is not None
    for address in ("d0:1", "p1:1"):
        assert seen[address].error.startswith("DeadlineExceeded: the status of ")
    assert role_of(seen["d0:1"]) == "decode", "the router says so"
