"""Lines that go down, and come back.

Guarantees: the last line of a peer that is up stays up, so that a peer with one line is as it would be without rails; a
line is down when the transport says so, or when no read has ended on it for `line_stall_s` while another line of the
same peer moves: a peer that stands still has no line down. What runs on a line that is down is stranded, and nothing
else. A line that is down is tried again, less and less often, and is up once a read has ended well on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from pdkv.transfer.lines import Line, Peer
from pdkv.transfer.orders import TransferSettings
from pdkv.transfer.rails import Rails
from pdkv.transfer.tasks import SCRATCH, ProbeTask, Ticket

logger = logging.getLogger(__name__)

RETRY_MOST_S = 60.0
"""Between two attempts. A line that was up for longer than that is a new one."""
LOOKS_PER_STALL = 8


class Failover:
    """`take` gets the probes that it wants to be posted."""

    def __init__(self, rails: Rails, settings: TransferSettings, take: Callable[[ProbeTask], None]) -> None:
        self._rails = rails
        self._settings = settings
        self._take = take
        self._look_s = 0.0

    def failed(self, peer: Peer, line: Line, reason: str, now: float) -> bool:
        """The line brings nothing, and another one is to bring what runs on it; False if there is none."""
        if not any(other is not line for other in peer.up):
            return False
        if not line.down:
            if now - line.up_s > RETRY_MOST_S:
                line.failures = 0
            self._back_off(line, now)
            logger.warning("%s: %s is down: %s", peer.name, self._rails.describe(line), reason)
        line.down = reason
        for run in self._rails.runs(line):
            run.stranded = True
        return True

    def moved(self, peer: Peer, line: Line, now: float) -> None:
        """A read has ended well on it."""
        line.moved_s = now
        if line.down:
            line.down, line.up_s = "", now
            logger.info("%s: %s is up again", peer.name, self._rails.describe(line))

    def watch(self, peers: Iterable[Peer], now: float) -> bool:
        """Look after lines, now and then. True if one went down."""
        if now < self._look_s:
            return False
        self._look_s = now + self._settings.line_stall_s / LOOKS_PER_STALL
        return sum(self._look(peer, now) for peer in peers if len(peer.lines) > 1 and not peer.lost) > 0

    def _look(self, peer: Peer, now: float) -> bool:
        stall_s, failed = self._settings.line_stall_s, False
        for line in peer.up:
            if not line.running or now - line.quiet_s < stall_s / 2:
                continue
            others = [other for other in peer.up if other is not line]
            if now - line.quiet_s >= stall_s and any(other.moved_s > now - stall_s / 2 for other in others):
                failed |= self.failed(peer, line, f"nothing came on it for {stall_s:g} s", now)
                continue
            # is it the line, or the peer?
            for other in others:
                if not other.running and other.moved_s < now - stall_s / 4:
                    self._try(peer, other, now)
        for line in peer.lines:
            if line.down and not line.running and now >= line.retry_s:
                self._back_off(line, now)
                self._try(peer, line, now)
        return failed

    def _try(self, peer: Peer, line: Line, now: float) -> None:
        probe = ProbeTask(peer, SCRATCH, Ticket(drawn=now), self._settings.probe_s)
        probe.line = line
        self._take(probe)

    def _back_off(self, line: Line, now: float) -> None:
        line.retry_s = now + min(RETRY_MOST_S, self._settings.line_retry_s * 2**line.failures)
        line.failures += 1
