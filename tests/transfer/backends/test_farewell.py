"""Connections that outlive their agent for as long as the other side needs, on sockets that a test makes."""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from pdkv.transfer.backends import farewell
from pdkv.transfer.backends.farewell import Connections
from tests.waiting import DEADLINE_S

MUCH = bytes(64 << 20)
"""More than the kernel holds between two sockets."""


class Agent:
    """A connection in an epoll instance, as an agent has them; `other` is the far end."""

    def __init__(self) -> None:
        self.connections = Connections()
        with socket.create_server(("127.0.0.1", 0)) as listening, self.connections.of_agent():
            self.epoll = select.epoll()
            self.mine = socket.create_connection(listening.getsockname())
            self.other, _ = listening.accept()
            self.epoll.register(self.mine, select.EPOLLIN)
        self.other.settimeout(DEADLINE_S)

    def destroy(self) -> None:
        self.epoll.close()
        self.mine.close()

    def sends_much(self) -> threading.Thread:
        """The far end is in the middle of sending."""

        def send() -> None:
            with suppress(OSError):
                self.other.sendall(MUCH)
                self.sent = True

        self.sent = False
        thread = threading.Thread(target=send)
        thread.start()
        assert self.mine.recv(1)
        return thread


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.destroy()
    agent.other.close()


def read_empty() -> None:
    for thread in farewell._threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_the_other_side_may_finish_what_it_sends_and_is_told_that_we_are_gone(agent: Agent) -> None:
    sending = agent.sends_much()
    with agent.connections.parting():
        agent.destroy()
    sending.join(DEADLINE_S)
    assert agent.sent
    assert agent.other.recv(1) == b""
    agent.other.close()
    read_empty()


def test_without_a_farewell_it_is_cut_off(agent: Agent) -> None:
    """The control, and what UCX doesn't bear."""
    sending = agent.sends_much()
    agent.destroy()
    sending.join(DEADLINE_S)
    assert not agent.sent


def test_a_destruction_that_fails_leaves_connections_alone(agent: Agent) -> None:
    with pytest.raises(ZeroDivisionError), agent.connections.parting():
        raise ZeroDivisionError
    agent.other.sendall(b"still there?")
    assert agent.mine.recv(100) == b"still there?"
    agent.mine.sendall(b"yes")
    assert agent.other.recv(100) == b"yes"


def test_connections_of_others_are_not_touched(agent: Agent) -> None:
    """Neither those of an earlier agent, nor one that is waited for elsewhere."""
    later = Agent()
    with later.connections.parting():
        later.destroy()
    assert later.other.recv(1) == b""
    later.other.close()
    read_empty()
    agent.mine.sendall(b"here")
    assert agent.other.recv(100) == b"here"


def test_one_that_stays_open_is_not_ended(agent: Agent) -> None:
    with agent.connections.parting():
        agent.epoll.close()
    agent.mine.sendall(b"here")
    assert agent.other.recv(100) == b"here"


def test_a_side_that_doesnt_answer_holds_up_the_exit_only_so_long(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farewell, "AT_EXIT_S", 0.05)
    with agent.connections.parting():
        agent.destroy()
    farewell._last_words()
    assert farewell._threads[-1].is_alive()
    agent.other.close()
    read_empty()
