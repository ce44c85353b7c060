"""The answer to a complaint: what was found, from which numbers, and the way out.

Guarantees: a finding carries every number that it was drawn from; numbers as they should be say "nothing wrong".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from pdkv.errors import ConfigError

NOTHING_WRONG = "nothing wrong"
TOLERANCE = 1.1
"""A time is as expected up to this factor."""
Number = int | float | str


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one complaint."""

    complaint: str
    wrong: bool
    numbers: dict[str, Number]
    """What it was drawn from, units last in the names."""
    finding: str
    way_out: tuple[str, ...] = ()


def fine(complaint: str, numbers: dict[str, Number], why: str) -> Finding:
    """Numbers as they should be."""
    return Finding(complaint, False, numbers, f"{NOTHING_WRONG}: {why}")


def wrong(complaint: str, numbers: dict[str, Number], why: str, *way_out: str) -> Finding:
    """A cause, and what helps against it."""
    return Finding(complaint, True, numbers, why, way_out)


def require_counts(facts: Any) -> None:
    """Every number of a complaint is finite and not below 0. Raises `ConfigError` naming the first that isn't."""
    for field in fields(facts):
        value = getattr(facts, field.name)
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            raise ConfigError(field.name, value, "a finite number, not below 0")
