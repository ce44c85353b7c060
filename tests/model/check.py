"""Checks the model of the protocol's core with spin: what must hold holds, and each weakening of it fails.

Guarantees: an answer is "holds" only if the search ended with nothing left out by a limit; a weakening counts as found
only if it broke the law that it is listed with; exit code 0 if all answers are the expected ones, 1 if not, 2 if spin
or gcc is missing. Needs only Python's own library, so it runs without the package's environment.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("core.pml")
SEEDS = range(1, 13)
"""Of the random searches that make up a bitstate check: many small ones find more than one of as many states."""
LIMIT_S = 900.0
"""For one search: on an idle core none takes a tenth of it."""
DEPTH = "-m10000"
"""Steps of one run: far more than the longest takes, and a search that meets the limit is not finished."""
HOLDS = "holds"
ENDLESS = "runs without end"


@dataclass(frozen=True, slots=True)
class Weakening:
    """One precaution taken away, by a macro of that name."""

    macro: str
    what: str
    breaks: str
    """The law, as the comment behind its assertion names it, or `ENDLESS`."""


WEAKENINGS = (
    Weakening("FREED_ON_RELEASE", "pages freed when a read's handle is released", "law 2"),
    Weakening("NO_QUARANTINE", "pages of an aborted read freed at once", "law 2"),
    Weakening("FENCE_BEFORE_DESTROY", "pages back when the agents rotate, not when the old one is destroyed", "law 2"),
    Weakening("STEP_ABANDONED", "an aborted prefill's page freed while its engine step runs", "law 2"),
    Weakening("REUSE_WITHOUT_BUMP", "an evicted page reused under the same generation", "law 5"),
    Weakening("REWRITE_WITHOUT_BUMP", "a sealed page rewritten by its owner under the same generation", "law 5"),
    Weakening("LATE_BUMP", "the generation moves after the first write", "law 5"),
    Weakening("GENERATIONS_FROM_ZERO", "generations start at zero after a restart", "law 5"),
    Weakening("ROW_FIRST", "table rows read before the data", "law 5"),
    Weakening("ROW_REUSED", "a row's landing buffer reused after an abort", "law 5"),
    Weakening("COMMIT_UNBOUND", "commit not bound to the reservation it was verified for", "law 5"),
    Weakening("DIGEST_SKIPPED", "digests not compared, on a link that damages", "law 5"),
    Weakening("NO_ACCOUNT", "admission without comparing accounts", "law 5"),
    Weakening("INDEX_APART", "index-K committed after main", "law 4"),
    Weakening("END_UNCHECKED", "a request's end gives back its page, whoever holds it", "law 1"),
    Weakening("LATE_RENEWAL_REVIVES", "a late renewal revives a lease", "lease"),
    Weakening("NO_FENCE", "no fence: a stopped peer keeps pages in quarantine", "end"),
    Weakening("FENCE_WITHOUT_NEED", "the agents rotate though nothing is stuck", ENDLESS),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table: a search through one build of the model, and what it must say."""

    model: str
    variant: str
    expected: str
    macros: tuple[str, ...] = ()
    build: tuple[str, ...] = ("-O2", "-DSAFETY", "-DNOREDUCE")
    """gcc's. Without partial-order reduction: nearly every step touches what others see, so nothing can be left out."""
    searches: tuple[tuple[str, ...], ...] = ((DEPTH,),)
    """pan's arguments, a search each; the first that finds an error is the last."""
    all_reached: bool = False
    """Nor may a statement be left that no run reaches: laws hold easily in a model in which nothing happens."""


@dataclass(frozen=True, slots=True)
class Found:
    """What pan printed about one search."""

    states: int
    error: str
    """"" if it found none."""
    complete: bool
    """No limit of depth, memory or time left anything out."""
    unreached: tuple[str, ...]
    """Statements, each as `line: text`."""


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    variant: str
    expected: str
    result: str
    states: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.result == self.expected


class ModelError(Exception):
    """There is no such variant, or spin or gcc refused the model: what they said."""


def checks() -> tuple[Check, ...]:
    """All of them, the longest first."""
    two = ("PREFILLS=2", "DECODES=2")
    bits = ("-O2", "-DSAFETY", "-DNOREDUCE", "-DBITSTATE", "-DT_RAND", "-DP_RAND")
    swarm = tuple((DEPTH, "-w21", "-k3", f"-RS{seed}") for seed in SEEDS)
    torn = "REUSE_WITHOUT_BUMP"
    return (
        Check("2+2, bitstate", "", HOLDS, two, bits, swarm),
        Check("1+1, exhaustive", "", HOLDS, all_reached=True),
        Check("1+1, cycles", "", HOLDS, ("LIVES=1",), ("-O2", "-DNP", "-DNOREDUCE"), (("-l", DEPTH),)),
        Check("2+2, bitstate", torn, "breaks law 5", (*two, torn), bits, swarm),
        *(weakened(each) for each in WEAKENINGS),
    )


def weakened(weakening: Weakening) -> Check:
    """Searched breadth first, so that the counterexample is a shortest one; compiled fast rather than well."""
    macro, breaks = weakening.macro, weakening.breaks
    if breaks == ENDLESS:
        return Check("1+1, cycles", macro, ENDLESS, (macro, "LIVES=1"), ("-O0", "-DNP", "-DNOREDUCE"), (("-l", DEPTH),))
    return Check("1+1, breadth first", macro, f"breaks {breaks}", (macro,), ("-O0", "-DSAFETY", "-DNOREDUCE", "-DBFS"))


def missing_tools() -> list[str]:
    return [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


def macros_of(source: str) -> list[str]:
    """Those that a build may define to weaken the model: tested for, and not given a default right after."""
    bounds = set(re.findall(r"^#ifndef (\w+)\n#define \1 ", source, re.M))
    tested = re.findall(r"^#ifn?def (\w+)|defined\((\w+)\)", source, re.M)
    return sorted({a or b for a, b in tested} - bounds)


def parsed(output: str) -> Found:
    """Of what pan prints, on a search that ended or was cut off."""
    states = re.search(r"^ *([\d.e+]+) states, stored", output, re.M)
    errors = re.search(r"errors: (\d+)", output)
    error = re.search(r"^pan:1: (.*?)(?: \(at depth \d+\))?$", output, re.M)
    limits = ("max search depth too small", "out of memory", "reached -DMEMLIM", "Interrupted")
    complete = errors is not None and int(errors[1]) == 0 and not any(limit in output for limit in limits)
    unreached = re.findall(r'^\t\S+?:(\d+), state \d+, "(.*)"$', output, re.M)
    return Found(
        states=int(float(states[1])) if states else 0,
        error=error[1] if error else "",
        complete=complete,
        unreached=tuple(f"{line}: {text}" for line, text in unreached if text != "-end-" and "assert(" not in text),
    )


def law_of(replay: str, source: str) -> str:
    """The law whose assertion a replayed trail ends in; where it stands, if its line names none."""
    line = re.search(r"core\.pml:(\d+), Error: assertion violated", replay)
    if line is None:
        return "nothing that spin names"
    named = re.search(r"assert\(.*\);\s+/\* (.+?) \*/", source.splitlines()[int(line[1]) - 1])
    return named[1] if named else f"the assertion in line {line[1]}"


def story(replay: str) -> list[str]:
    """What happened, from a replayed trail: the model's own lines, one a step."""
    return [line.strip() for line in replay.splitlines() if re.match(r"\s*(P|D|NIC)\d*: ", line)]


class Bench:
    """A folder with one build of the model."""

    def __init__(self, check: Check, folder: Path) -> None:
        """Raises `ModelError` if it can't be built."""
        self._check = check
        self._folder = folder
        self._macros = [f"-D{macro}" for macro in check.macros]
        shutil.copy(SOURCE, folder)
        self._call("spin", "-a", *self._macros, SOURCE.name)
        self._call("gcc", *check.build, "-DMEMLIM=3000", "-w", "-o", "pan", "pan.c")

    def result(self) -> tuple[str, int]:
        """What the searches say, and the states that they stored, together."""
        states = 0
        for search in self._check.searches:
            found = parsed(self._call("./pan", *search, strict=False))
            states += found.states
            if found.error:
                return self._named(found), states
            if not found.complete:
                return "not finished", states
            if self._check.all_reached and found.unreached:
                return f"never reached: {found.unreached[0]}", states
        return HOLDS, states

    def replay(self) -> str:
        """The trail of the error that was found last, with the model's own words. "" without one."""
        if not (self._folder / f"{SOURCE.name}.trail").exists():
            return ""
        return self._call("spin", "-T", "-t", *self._macros, SOURCE.name, strict=False)

    def _named(self, found: Found) -> str:
        if "non-progress cycle" in found.error:
            return ENDLESS
        if "assertion violated" in found.error:
            return f"breaks {law_of(self.replay(), SOURCE.read_text('utf-8'))}"
        return found.error

    def _call(self, *command: str, strict: bool = True) -> str:
        try:
            done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return "Interrupted"
        output = done.stdout + done.stderr
        if strict and done.returncode:
            raise ModelError(f"{' '.join(command)}\n{output}")
        return output


def answer(check: Check) -> Answer:
    """Build and search. Raises `ModelError` if spin or gcc refuse the model."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdkv-model-") as folder:
        result, states = Bench(check, Path(folder)).result()
    return Answer(check.model, check.variant, check.expected, result, states, round(time.monotonic() - began, 1))


def answers(wanted: Iterable[Check], jobs: int) -> list[Answer]:
    """In the order asked for, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(answer, wanted))


def table(rows: Sequence[Answer]) -> str:
    """Plain text, a line an answer; those that are not as expected are marked."""

    def line(*cells: str) -> str:
        model, variant, expected, result, states, seconds, mark = cells
        words = f"{model:<20}{variant:<23}{expected:<18}{result:<18}"
        return f"{words}{states:>12}{seconds:>9}  {mark}".rstrip()

    head = line("model", "variant", "expected", "result", "states", "seconds", "")
    marks = ["" if row.ok else "WRONG" for row in rows]
    return "\n".join(
        [head]
        + [
            line(a.model, a.variant or "-", a.expected, a.result, f"{a.states:,}", f"{a.seconds:.1f}", mark)
            for a, mark in zip(rows, marks, strict=True)
        ]
    )


def trail(name: str) -> str:
    """A weakening's counterexample, told step by step. Raises `ModelError` on an unknown name."""
    weakening = _known(name)
    with tempfile.TemporaryDirectory(prefix="pdkv-model-") as folder:
        bench = Bench(weakened(weakening), Path(folder))
        result, _ = bench.result()
        steps = story(bench.replay())
    return "\n".join([f"{weakening.macro}: {weakening.what}", *(f"  {step}" for step in steps), f"  {result}"])


def report(rows: Sequence[Answer], *, as_json: bool, seconds: float) -> str:
    """`seconds` is the wall clock; the processor time is that of every child so far."""
    ok = all(row.ok for row in rows)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = round(used.ru_utime + used.ru_stime, 1)
    if as_json:
        lines = [asdict(row) | {"ok": row.ok} for row in rows]
        return json.dumps({"ok": ok, "seconds": seconds, "cpu_seconds": cpu_s, "checks": lines})
    verdict = "all as expected" if ok else "NOT as expected"
    return f"{table(rows)}\n{len(rows)} checks in {seconds} s ({cpu_s} s of processor time): {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the model of the protocol's core with spin.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time (default 2)")
    parser.add_argument("--trail", metavar="VARIANT", help="only tell this weakening's counterexample, step by step")
    parser.add_argument("--list", action="store_true", help="only list the weakenings")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{w.macro.ljust(22)}{w.what} ({w.breaks})" for w in WEAKENINGS))
        return 0
    if missing := missing_tools():
        print(f"not found: {' and '.join(missing)}. On Debian or Ubuntu: apt-get install -y spin gcc", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        if options.trail:
            print(trail(options.trail))
            return 0
        rows = answers(checks(), options.jobs)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(report(rows, as_json=options.json, seconds=round(time.monotonic() - began, 1)))
    return 0 if all(row.ok for row in rows) else 1


def _known(name: str) -> Weakening:
    macro = name.upper().replace("-", "_")
    for weakening in WEAKENINGS:
        if weakening.macro == macro:
            return weakening
    raise ModelError(f"no variant {name}; there are {', '.join(w.macro for w in WEAKENINGS)}")


if __name__ == "__main__":
    sys.exit(main())
