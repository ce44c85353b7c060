"""The agents that read: one takes the new reads; one at most is fenced off, ends the reads it has and is destroyed.

Guarantees: where there is but one rail, the agent for new reads is replaced only by one that was made, so a fence that
fails leaves everything as it was; an agent is destroyed only when each read that it still has was given up or is
stranded; only then are those reads handed out as settled. No agent is made before something is to be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdkv.errors import PdkvError
from pdkv.transfer.agents import ReadingAgent, Run

logger = logging.getLogger(__name__)


class Rotation:
    """`make` gets a number that it wasn't given before, and makes an agent or raises."""

    def __init__(self, make: Callable[[int], ReadingAgent], *, every_s: float) -> None:
        self._make = make
        self._made = 0
        self._every_s = every_s
        self._not_before = 0.0
        self._current: ReadingAgent | None = None
        self._retired: ReadingAgent | None = None
        self._stuck: PdkvError | None = None
        self.rotations = 0
        """Fences that ended with the old agent's destruction."""
        self.error = ""
        """Why the last one came to nothing, if it did."""

    @property
    def agents(self) -> tuple[ReadingAgent, ...]:
        """Those that are polled, the one for new reads first."""
        if self._retired is None:  # as a rule; this is asked in every step
            return () if self._current is None else (self._current,)
        return (self._retired,) if self._current is None else (self._current, self._retired)

    @property
    def outstanding(self) -> list[Run]:
        """Reads of the agent for new reads that have no proven end."""
        return [] if self._current is None else [*self._current.running, *self._current.lost]

    @property
    def reading(self) -> bool:
        """A read runs, or may still write."""
        return any(agent.running for agent in self.agents)

    def current(self) -> ReadingAgent:
        """The agent for new reads. Raises what making one raises."""
        if self._current is None:
            self._current = self._new()
        return self._current

    def start(self, now: float, *, alone: bool = True) -> bool:
        """New reads go to a new agent from here on. False if that is not possible now.

        Unless this rail is `alone`, the old one goes without a new one too: none can be made where a device is gone.
        """
        if self._current is None or self._retired is not None or now < self._not_before:
            return False
        self._not_before = now + self._every_s
        fresh: ReadingAgent | None
        try:
            fresh = self._new()
        except PdkvError as error:
            logger.warning("no second agent for a fence: %s", error)
            self.error = str(error)
            if alone:
                return False
            fresh = None
        self._retired, self._current = self._current, fresh
        return True

    def finish(self) -> list[Run]:
        """Destroy the agent that was fenced off when it has no read but those given up: they are settled."""
        old = self._retired
        if old is None or not all(run.stranded or run.task.failure for run in old.running):
            return []
        self._retired = None
        try:
            outstanding = old.close()
        except PdkvError as error:
            logger.error("agent %s could not be destroyed, its reads stay unsettled: %s", old.name, error)
            self.error = str(error)
            self._stuck = error
            return []
        self.rotations += 1
        self.error = ""
        return outstanding

    def close(self) -> list[Run]:
        """Destroy all agents: what was outstanding is settled. Raises `TransferError` if one could ever not be."""
        settled: list[Run] = []
        for agent in self.agents:
            try:
                settled += agent.close()
            except PdkvError as error:
                self._stuck = error
        self._current = self._retired = None
        if self._stuck is not None:
            raise self._stuck
        return settled

    def _new(self) -> ReadingAgent:
        self._made += 1
        return self._make(self._made)
