"""This node's rails: on each, one agent that serves and those that read.

Guarantees: a read goes over the rail of its line and no other; what runs on one rail is settled only by its own end or
by the end of that rail's agent; a rail that can't be made at the start leaves no other one behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from pdkv.errors import PdkvError
from pdkv.geometry.page_layout import PoolMap
from pdkv.ids import PeerName
from pdkv.transfer.agents import ReadingAgent, Run, serving
from pdkv.transfer.backends.base import UNKNOWN_LANE, AgentName, Backend, BackendFactory, End
from pdkv.transfer.landing import LandingRows
from pdkv.transfer.lines import Line, Peer, pack, serving_agent
from pdkv.transfer.orders import RailStatus, Registration, TransferSettings
from pdkv.transfer.rotation import Rotation

RailFactories = Mapping[str, BackendFactory]
"""Of the backends of each rail, in order; by the device's name, or by an empty one where any device will do."""


class Rail:
    """Raises what making its serving agent raises."""

    def __init__(self, device: str, own: AgentName, serving_: tuple[Backend, Registration], readers: Rotation) -> None:
        self.device = device
        self.own = own
        self.serving, self.registration = serving_
        self.readers = readers


class Rails:
    """Not thread-safe, as the agents. Raises what making a serving agent raises."""

    def __init__(
        self, factories: RailFactories, name: PeerName, pool: PoolMap, landing: LandingRows, settings: TransferSettings
    ) -> None:
        self._rails: list[Rail] = []
        # a rail that went down is fenced off at once, and may be down again soon
        every_s = settings.fence_every_s if len(factories) == 1 else min(settings.fence_every_s, settings.line_stall_s)

        def reader(rail: int, factory: BackendFactory, number: int) -> ReadingAgent:
            # the numbers first: UCX keeps only the beginning of a name
            agent = AgentName(f"read{number}{f'-{rail}' if rail else ''}.{name}")
            return ReadingAgent(agent, factory(agent), pool, landing, settings.look_bytes)

        try:
            for number, (device, factory) in enumerate(factories.items()):
                own = serving_agent(name, number)
                readers = Rotation(partial(reader, number, factory), every_s=every_s)
                self._rails.append(Rail(device, own, serving(partial(factory, own), pool), readers))
        except PdkvError:
            self._close_serving()
            raise
        made = [rail.registration for rail in self._rails]
        self.registration = Registration(
            sum(one.regions for one in made), sum(one.bytes for one in made), sum(one.seconds for one in made)
        )
        self.metadata = pack([rail.serving.metadata() for rail in self._rails])
        self.backend_name = self._rails[0].serving.name

    def __iter__(self) -> Iterator[Rail]:
        return iter(self._rails)

    def __len__(self) -> int:
        return len(self._rails)

    @property
    def reading(self) -> bool:
        """A posted read has not ended."""
        return any(rail.readers.reading for rail in self._rails)

    @property
    def agents(self) -> tuple[AgentName, ...]:
        """Those that serve, then those that read."""
        owns = [rail.own for rail in self._rails]
        return (*owns, *(agent.name for rail in self._rails for agent in rail.readers.agents))

    def status(self, peers: Iterable[Peer]) -> tuple[RailStatus, ...]:
        """How they stand, a row a rail."""
        lines = [(peer, line) for peer in peers for line in peer.lines]
        rows = []
        for number, rail in enumerate(self._rails):
            here = [(peer, line) for peer, line in lines if line.rail == number]
            lanes = {line.lane.name for _, line in here if line.lane != UNKNOWN_LANE}
            down = tuple(f"{peer.name}: {line.down}" for peer, line in here if line.down)
            rows.append(RailStatus(rail.device, tuple(sorted(lanes)), down))
        return tuple(rows)

    def serve(self) -> None:
        for rail in self._rails:
            rail.serving.progress()

    def collect(self, now: float) -> list[tuple[ReadingAgent, Run, End]]:
        """Reads that have ended since."""
        return [
            (agent, run, end)
            for rail in self._rails
            for agent in rail.readers.agents
            for run, end in agent.collect(now)
        ]

    def linked(self, peer: Peer, line: Line) -> ReadingAgent:
        """The agent for new reads on that line, which knows the peer from here on.

        Raises what making an agent, and `ReadingAgent.link`, raise.
        """
        agent = self._rails[line.rail].readers.current()
        agent.link(peer, line)
        return agent

    def describe(self, line: Line) -> str:
        return f"rail {self._rails[line.rail].device or line.rail} to {line.agent}"

    def runs(self, line: Line) -> list[Run]:
        """Reads on a line without a proven end."""
        agents = self._rails[line.rail].readers.agents
        return [run for agent in agents for run in (*agent.running, *agent.lost) if run.line is line]

    def unlink(self, peer: Peer) -> None:
        """Only when none of its reads runs. Raises `TransferError` if a backend can't let it go; others have."""
        error: PdkvError | None = None
        for line in peer.lines:
            for agent in self._rails[line.rail].readers.agents:
                try:
                    agent.unlink(line)
                except PdkvError as refused:
                    error = refused
        if error is not None:
            raise error

    def close(self) -> list[Run]:
        """Destroy all agents: what was outstanding is settled. Raises if one could not be, when the others are gone."""
        settled: list[Run] = []
        stuck: PdkvError | None = None
        for rail in self._rails:
            try:
                settled += rail.readers.close()
            except PdkvError as error:
                stuck = error
        self._close_serving()
        if stuck is not None:
            raise stuck
        return settled

    def _close_serving(self) -> None:
        for rail in self._rails:
            rail.serving.close()
