"""When each request reached which stage: the time to a first token in parts that add up.

Guarantees: a hook only notes the clock; what is noted of a request is forgotten with it; a request that skips a stage
has no part of it, and the parts of one that doesn't add up to its time to the first token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pdkv.ids import RequestId
from pdkv.metrics.names import TTFT_STAGES
from pdkv.node.base import NodeParts
from pdkv.node.stages import Stage

ENDS = (Stage.RESERVED, Stage.PREFILLED, Stage.ARRIVED, Stage.ADMITTED)
"""What ends each of `TTFT_STAGES`: the last time it was reached before the next one."""


@dataclass(slots=True)
class _Marks:
    began_s: float
    at_s: dict[Stage, float]


class Timeline:
    """Of one decode node; used in its loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[RequestId, _Marks] = {}

    def watching(self, parts: NodeParts) -> NodeParts:
        """The same, with this timeline's hook before the one they have."""
        theirs = parts.at

        def hook(stage: Stage, request: RequestId) -> None:
            self.hook(stage, request)
            theirs(stage, request)

        return replace(parts, at=hook)

    def begin(self, request: RequestId) -> bool:
        """False for an id that runs already: its second request is nobody's time."""
        if request in self._of:
            return False
        self._of[request] = _Marks(self._clock(), {})
        return True

    def hook(self, stage: Stage, request: RequestId) -> None:
        """`node.stages.Hook`. Of a request that was not begun here nothing is noted."""
        marks = self._of.get(request)
        if marks is not None and stage in ENDS:
            marks.at_s[stage] = self._clock()

    def end(self, request: RequestId) -> dict[str, float]:
        """Seconds by stage of a request that was admitted; empty for one that wasn't."""
        marks = self._of.pop(request, None)
        if marks is None or Stage.ADMITTED not in marks.at_s:
            return {}
        return dict(_parts(marks))

    def so_far(self, request: RequestId) -> dict[str, float]:
        """Seconds by stage of one that has not ended here, the stage that it is in among them."""
        marks = self._of[request]
        parts: dict[str, float] = {}
        since_s = marks.began_s
        for (name, seconds), stage in zip(_parts(marks), ENDS, strict=True):
            if Stage.ADMITTED not in marks.at_s and marks.at_s.get(stage, -math.inf) < since_s:
                return {**parts, name: self._clock() - since_s}
            parts[name] = seconds
            since_s += seconds
        return parts


def _parts(marks: _Marks) -> Iterator[tuple[str, float]]:
    since_s = marks.began_s
    for name, stage in zip(TTFT_STAGES, ENDS, strict=True):
        # the last page may have arrived before prefill's last word: then nothing of the transfer was exposed
        until_s = max(marks.at_s.get(stage, since_s), since_s)
        yield name, until_s - since_s
        since_s = until_s
