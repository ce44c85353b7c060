"""`python -m tests.simulation`: seeds of the deterministic simulation, from the command line.

Guarantees: ends with 0 only if every seed held every law and, with many seeds, each fault met each stage often enough,
or, with `--mutation`, if one seed noticed; a failing seed is printed with the command that replays it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from pdkv.node.stages import Stage
from tests.simulation.faults import KINDS
from tests.simulation.mutations import HARMLESS, MUTATIONS
from tests.simulation.runs import Sum, many, one

SHOWN = 10
"""Failing seeds."""
MANY_SEEDS = 20_000
PAIR_HITS = 50
"""So often each fault has to meet each stage within that many seeds."""


def main() -> int:
    asked = _arguments()
    if asked.replay is not None:
        return _replay(asked)
    seeds = range(asked.first, asked.first + asked.seeds)
    last = [0.0]

    def told(total: Sum, seconds: float) -> None:
        if seconds - last[0] >= 5.0 and not asked.json:
            last[0] = seconds
            rate = total.seeds / seconds
            print(
                f"{total.seeds} of {len(seeds)} seeds, {rate:.1f} a second, {len(total.failed)} failed",
                file=sys.stderr,
                flush=True,
            )

    began = time.monotonic()
    total = many(seeds, asked.jobs, mutation=asked.mutation, told=told)
    seconds = time.monotonic() - began
    (_as_json if asked.json else _as_text)(total, seconds, asked.mutation)
    if asked.mutation in MUTATIONS:
        return int(not total.failed)
    return int(bool(total.failed) or (total.seeds >= MANY_SEEDS and total.least() < PAIR_HITS))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED", help="the first one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true", help="one object, for machines")
    parser.add_argument("--mutation", choices=(*MUTATIONS, *HARMLESS), default="", help="a build that is broken")
    parser.add_argument("--replay", type=int, metavar="SEED", help="this one, with its log")
    parser.add_argument("--verbose", action="store_true", help="all of a replay's log, not only its end")
    return parser.parse_args()


def _replay(asked: argparse.Namespace) -> int:
    result = one(asked.replay, mutation=asked.mutation, keep_log=True)
    print("\n".join(result.log if asked.verbose else result.log[-60:]))
    print(f"seed {result.seed}, digest {result.digest}: {result.broken or 'every law held'}")
    return int(bool(result.broken))


def _as_text(total: Sum, seconds: float, mutation: str) -> None:
    print(table(total))
    requests = sum(total.ends.values())
    print(
        f"{total.seeds} seeds in {seconds:.0f} s, {total.seeds / seconds:.1f} a second; {requests} requests,"
        f" {sum(total.hits.values())} faults, the rarest pair of fault and stage {total.least()} times"
        f" (due in {MANY_SEEDS:,} seeds: {PAIR_HITS});"
        f" {total.virtual_s / 3600:.1f} h of virtual time"
    )
    print("requests ended: " + ", ".join(f"{end} {count}" for end, count in total.ends.most_common()))
    for seed, law in sorted(total.failed.items())[:SHOWN]:
        more = f" --mutation {mutation}" if mutation else ""
        print(f"FAILED seed {seed}: {law}\n  replay: python -m tests.simulation --replay {seed}{more} --verbose")
    if not total.failed:
        print("every law held")


def _as_json(total: Sum, seconds: float, mutation: str) -> None:
    hits = {kind: {stage.value: total.hits[kind, stage.value] for stage in Stage} for kind in sorted(KINDS)}
    print(
        json.dumps(
            {
                "seeds": total.seeds,
                "seconds": round(seconds, 1),
                "failed": {str(seed): law for seed, law in sorted(total.failed.items())},
                "ends": dict(total.ends),
                "hits": hits,
                "rarest_pair": total.least(),
                "virtual_s": round(total.virtual_s, 1),
                "mutation": mutation,
            }
        )
    )


def table(total: Sum) -> str:
    """Faults by stage, so often as they were injected there."""
    stages = list(Stage)
    lines = [" ".join([f"{'':18}", *(f"{stage.value.partition('.')[2][:8]:>8}" for stage in stages)])]
    for kind in sorted(KINDS):
        lines.append(" ".join([f"{kind:18}", *(f"{total.hits[kind, stage.value]:>8}" for stage in stages)]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
