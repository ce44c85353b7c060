"""Gathers the numbers for the four complaints and has them answered.

Guarantees: what is given by hand wins over what a node says, and that over what the plan says; a number that is missing
or isn't known here is named; a node is asked only if it was named, and prompts are sent to it only with `--probe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pdkv.cli.plan.figures import Plan, find_card
from pdkv.config import parse_bytes
from pdkv.errors import ConfigError
from pdkv.geometry import diagnose
from pdkv.geometry.diagnose import Finding
from pdkv.geometry.fleet import stage_shape
from pdkv.geometry.model_config import ModelShape

ALL = "all"
COMPLAINTS: dict[str, tuple[type[Any], Callable[..., Finding]]] = {
    "pool": (diagnose.PoolFacts, diagnose.diagnose_pool),
    "refused": (diagnose.RefusedFacts, diagnose.diagnose_refused),
    "ttft": (diagnose.TtftFacts, diagnose.diagnose_ttft),
    "step": (diagnose.StepFacts, diagnose.diagnose_step),
}

Numbers = dict[str, int | float]


@dataclass(frozen=True, slots=True)
class Answers:
    findings: tuple[Finding, ...]
    unanswered: dict[str, tuple[str, ...]]
    """Complaint to the numbers that it lacks."""

    @property
    def wrong(self) -> bool:
        return any(f.wrong for f in self.findings)


def answer(plan: Plan) -> Answers:
    """Raises `ConfigError` for an unknown complaint or number, or if one that was named lacks numbers; what a call to
    the node raises if it can't be asked."""
    options = plan.options
    wanted = options.diagnose or ALL
    if wanted != ALL and wanted not in COMPLAINTS:
        raise ConfigError("diagnose", wanted, ", ".join((*COMPLAINTS, ALL)))
    names = list(COMPLAINTS) if wanted == ALL else [wanted]
    numbers = {name: _planned(name, plan) for name in names}
    given = _given(options.given or [], names)
    if options.node is not None:
        from pdkv.cli.plan.live import observe

        for name, seen in asyncio.run(observe(options.node, options.probe)).items():
            if name in numbers:
                # the plan's memory stays what was planned: a node only says what it holds
                planned = numbers[name]
                numbers[name] = {
                    **planned,
                    **{k: v for k, v in seen.items() if k != "memory_bytes" or k not in planned},
                }
    found, lacking = [], {}
    for name in names:
        facts_class, diagnosis = COMPLAINTS[name]
        known = {f.name for f in fields(facts_class)}
        made = {k: v for k, v in {**numbers[name], **given}.items() if k in known}
        missing = tuple(f.name for f in fields(facts_class) if f.default is MISSING and f.name not in made)
        if missing:
            lacking[name] = missing
        else:
            found.append(diagnosis(_caches(name, plan), plan.setup.main_row, facts_class(**made)))
    if not found:
        name, missing = next(iter(lacking.items()))
        raise ConfigError("given", ",".join(options.given or []), f"for {name} also {', '.join(missing)}")
    return Answers(tuple(found), lacking)


def _caches(name: str, plan: Plan) -> ModelShape:
    """A pool is a rank's: of its pipeline stage only. The other complaints are about the whole model."""
    budget = plan.pool.budget if plan.pool is not None else None
    return plan.setup.shape if name != "pool" or budget is None else stage_shape(plan.setup.shape, budget.layers)


def _planned(name: str, plan: Plan) -> Numbers:
    """What the plan itself says of a complaint."""
    options = plan.options
    if name == "pool" and plan.pool is not None and plan.pool.usable_pages:
        page = {"dcp": options.dcp, "rollback_tokens": options.draft_tokens}
        return {"memory_bytes": plan.pool.available_bytes, **page}
    if name == "refused":
        needed = plan.longest.tokens + options.output_tokens + options.draft_tokens
        return {"request_tokens": needed, "dcp": options.dcp}
    if name == "step" and options.gpu is not None and (rate := find_card(options.gpu).bytes_per_s):
        return {"memory_bytes_per_s": rate}
    return {}


def _given(texts: list[str], names: list[str]) -> Numbers:
    """`key=value` pairs, as integers, sizes or decimals by the key's type in the facts that will hold it."""
    types: Mapping[str, str] = {f.name: str(f.type) for name in names for f in fields(COMPLAINTS[name][0])}
    made: Numbers = {}
    for part in (p.strip() for text in texts for p in text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in types:
            raise ConfigError("given", part, f"key=value with one of {', '.join(types)}")
        if key.endswith("_bytes"):
            made[key] = parse_bytes(value, f"given.{key}")
            continue
        try:
            made[key] = float(value) if types[key] == "float" else int(value)
        except ValueError as error:
            raise ConfigError(f"given.{key}", value, f"of type {types[key]}") from error
    return made
