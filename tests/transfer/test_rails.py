"""Agents that can't be made, on one rail of several, and first acquaintance over rails of which one is down."""

from typing import Any

import pytest

from pdkv.errors import DeadlineExceeded, PdkvError, TransferError
from pdkv.transfer.backends.base import AgentName, Backend
from pdkv.transfer.backends.loopback import LoopbackNet
from pdkv.transfer.core import TransferCore
from pdkv.transfer.orders import ReadStatus
from tests.transfer.pools import TestPool, peer_name
from tests.transfer.town import SETTINGS, Town, down


def test_a_rail_whose_device_is_gone_gives_its_agent_up_and_gets_one_when_it_is_back() -> None:
    town = Town()
    town.broken.add("here1")
    down(town)
    assert not any(agent.startswith("read2-1.") for agent in town.sink.status(0.0).agents)
    assert not town.late_writes(1)
    town.step(SETTINGS.line_retry_s + 0.5)
    assert town.line(1).down == "no device here1"
    town.broken.clear()
    town.step(60.0)
    assert not town.line(1).down
    assert town.done(town.read()).status is ReadStatus.DONE


def test_a_peer_is_added_though_one_of_its_rails_is_down() -> None:
    town = Town(connect=False)
    town.net.cut(town.agent(0))
    town.done(town.add(), 3.0)
    assert town.line(0).down
    assert town.done(town.read()).status is ReadStatus.DONE


def test_a_peer_is_added_though_one_rail_here_has_no_device() -> None:
    town = Town(connect=False)
    town.broken.add("here0")
    town.done(town.add(), 1.0)
    assert "no device here0" in town.line(0).down
    assert town.done(town.read()).status is ReadStatus.DONE


def test_a_peer_that_no_rail_reaches_is_not_added() -> None:
    town = Town(connect=False)
    for rail in range(2):
        town.net.cut(town.agent(rail))
    with pytest.raises(DeadlineExceeded):
        town.done(town.add())
    town.broken |= {"here0", "here1"}
    fresh = Town(connect=False)
    fresh.broken |= {"here0", "here1"}
    with pytest.raises(TransferError, match="no device here1"):
        fresh.add()
    assert not fresh.sink.peers


def test_rails_are_told_in_words() -> None:
    town = Town()
    assert [str(rail) for rail in town.sink.status(0.0).rails] == ["loopback", "nothing read yet"]
    down(town)
    words = f"nothing read yet; down to {town.source_name}: nothing came on it for 1 s"
    assert [str(rail) for rail in town.sink.status(0.0).rails] == ["loopback", words]


def test_a_rail_without_a_device_at_the_start_is_refused_and_leaves_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    net, name = LoopbackNet(), peer_name("node")

    def gone(_: AgentName) -> Backend:
        raise TransferError("no such device")

    rails: dict[str, Any] = {"good": net.backend, "gone": gone}
    with pytest.raises(PdkvError, match="no such device"):
        TransferCore(rails, name, TestPool(fill=False).map(), SETTINGS)
    assert not net.alive(str(name))
