"""What a soak has to hit, fault by place, and the faults of a node's life, which aim at what was hit least.

Guarantees: a life's faults at stages are at different stages, so that none is told of and then forestalled by another;
a pair that was aimed at in vain strikes the first time that its place is come to; every pair of `DUE` is aimed at.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from random import Random

from pdkv.node.fault_plan import AT_STAGES, FaultPlan
from pdkv.node.stages import Stage

Pair = tuple[str, str]
"""A kind of fault, and where: at a stage, in a call, of reads, or at any time."""
AT_ANY_TIME = "any time"
MILD_PER_LIFE = 4
KILLS_AT, MILD_AT = (10, 60), (1, 30)
"""Times that a node comes to a stage before it dies there, or suffers something milder."""
RARE = (Stage.RECOMPUTING, Stage.RENEWED, Stage.QUEUED, Stage.LENT, Stage.PULLING, Stage.PULLED)
"""Reached by few requests: a fault there strikes the first."""
MISSED = 1
"""So does one that was planned so often and not come to."""
SPRINKLED = {
    "decode": (
        "drop@renew_lease:p=0.05",
        "duplicate@renew_lease:p=0.05",
        "drop@release_lease:p=0.05",
        "duplicate@release_lease:p=0.1",
        "drop@prefill:p=0.01",
        "duplicate@prefill:p=0.02",
        "delay@prefill:p=0.05:s=0.2",
        "corrupt:p=0.01",
        "stale:p=0.01",
        "fail:p=0.01",
        "lose:p=0.003",
        "hang:p=0.003",
        "delay:p=0.03:s=0.1",
    ),
    "prefill": ("fail:p=0.05:of=probes",),
}
"""In every life: messages lost and repeated, and bad reads."""


def pair_of(rule: str) -> Pair:
    """Of a rule of a fault plan, as the node tells it."""
    plan = FaultPlan.parse(rule)
    of_reads = [(read.kind.value, f"read.{read.of}") for read in plan.reads.rules]
    return next(iter([*((r.deed.value, r.place) for r in plan.rules), *of_reads]))


DUE: tuple[Pair, ...] = (
    *((deed.value, stage.value) for stage in Stage for deed in AT_STAGES),
    *(("kill", AT_ANY_TIME), ("stop", AT_ANY_TIME)),
    *(pair_of(rule) for rule in chain.from_iterable(SPRINKLED.values())),
)
"""Every pair that the soak can hit."""


class Aims:
    """Plans by `hit`, which counts what nodes say has happened to them."""

    def __init__(self, hit: Counter[Pair], rng: Random) -> None:
        self._hit = hit
        self._rng = rng
        self._planned: Counter[Pair] = Counter()

    def plan(self, role: str) -> str:
        """For a life of a `prefill` or `decode` node: a death, milder faults, and what every life has."""
        stages = [stage for stage in Stage if stage.value.startswith(role)]
        rules = [self._at_stage(("kill",), stages, KILLS_AT)]
        rules += [self._at_stage(("stop", "fail", "delay"), stages, MILD_AT) for _ in range(MILD_PER_LIFE)]
        return f"{','.join([*rules, *self._sprinkled(role)])};seed={self._rng.randrange(1 << 30)}"

    def _at_stage(self, deeds: tuple[str, ...], stages: list[Stage], at: tuple[int, int]) -> str:
        """Takes its stage out of `stages`."""
        deed, stage = min(
            ((deed, stage) for deed in deeds for stage in stages),
            key=lambda pair: (self._hit[pair], self._planned[pair], self._rng.random()),
        )
        stages.remove(stage)
        nth = 1 if stage in RARE or self._in_vain((deed, stage.value)) else self._rng.randint(*at)
        self._planned[deed, stage.value] += 1
        return f"{deed}@{stage.value}:nth={nth}" + (":s=0.3" if deed == "delay" else "")

    def _sprinkled(self, role: str) -> list[str]:
        """By chance; but those of which none was hit strike the first at their place, the second, and so on."""
        rules: list[str] = []
        aimed: Counter[str] = Counter()
        for rule in SPRINKLED[role]:
            pair = pair_of(rule)
            if not self._hit[pair] and self._in_vain(pair):
                aimed[pair[1]] += 1
                rule = re.sub(r":p=[\d.]+", f":nth={aimed[pair[1]]}", rule)
            self._planned[pair] += 1
            rules.append(rule)
        return rules

    def _in_vain(self, pair: Pair) -> bool:
        return self._planned[pair] >= self._hit[pair] + MISSED
