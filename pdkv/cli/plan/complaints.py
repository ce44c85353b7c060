"""Gathers the numbers for the four complaints and has them answered.

Guarantees: what is given by hand wins over what a node says, and that over what the plan says; without a model the
plan is what the node's contract says of itself; a number that is missing
or isn't known here is named; a node is asked only if it was named, and prompts are sent to it only with `--probe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from pdkv.cli.plan.figures import Plan, find_card, make_plan
from pdkv.cli.plan.options import PlanOptions
from pdkv.contract import Contract
from pdkv.errors import ConfigError
from pdkv.fields import parse_bytes
from pdkv.geometry import diagnose
from pdkv.geometry.diagnose import Finding
from pdkv.geometry.fleet import RankPool, stage_shape
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.what_if import Setup, dcp_only

ALL = "all"
COMPLAINTS: dict[str, tuple[type[Any], Callable[..., Finding]]] = {
    "pool": (diagnose.PoolFacts, diagnose.diagnose_pool),
    "refused": (diagnose.RefusedFacts, diagnose.diagnose_refused),
    "ttft": (diagnose.TtftFacts, diagnose.diagnose_ttft),
    "step": (diagnose.StepFacts, diagnose.diagnose_step),
}

Numbers = dict[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a complaint's numbers are measured against: a plan, or a node as it describes itself."""

    setup: Setup
    pool: RankPool | None
    request_tokens: int | None
    """Of the longest request that was asked about, with output and drafts."""


@dataclass(frozen=True, slots=True)
class Answers:
    findings: tuple[Finding, ...]
    unanswered: dict[str, tuple[str, ...]]
    """Complaint to the numbers that it lacks."""

    @property
    def wrong(self) -> bool:
        return any(f.wrong for f in self.findings)


def answer(options: PlanOptions) -> Answers:
    """Raises `ConfigError` for an unknown complaint or number, or if one that was named lacks numbers; what a call to
    the node raises if it can't be asked."""
    wanted = options.diagnose or ALL
    if wanted != ALL and wanted not in COMPLAINTS:
        raise ConfigError("diagnose", wanted, ", ".join((*COMPLAINTS, ALL)))
    names = list(COMPLAINTS) if wanted == ALL else [wanted]
    given = _given(options.given or [], names)
    subject = None if options.model is None else _of_plan(make_plan(options))
    seen: Mapping[str, Numbers] = {}
    if options.node is not None:
        from pdkv.cli.plan.live import observe

        observed = asyncio.run(observe(options.node, options.probe, options.security()))
        seen, subject = observed.seen, subject or _of_node(observed.contract, options)
    if subject is None:
        raise ConfigError("model", None, "a preset or path, or a node to ask")
    found, lacking = [], {}
    for name in names:
        facts_class, diagnosis = COMPLAINTS[name]
        known = {f.name for f in fields(facts_class)}
        # the plan's memory stays what was planned: a node only says what it holds
        planned = _planned(name, subject, options)
        kept = {"memory_bytes": planned["memory_bytes"]} if "memory_bytes" in planned else {}
        numbers = {**planned, **seen.get(name, {}), **kept, **given}
        made = {key: value for key, value in numbers.items() if key in known}
        missing = tuple(f.name for f in fields(facts_class) if f.default is MISSING and f.name not in made)
        if missing:
            lacking[name] = missing
        else:
            found.append(diagnosis(_caches(name, subject), subject.setup.main_row, facts_class(**made)))
    if not found:
        name, missing = next(iter(lacking.items()))
        raise ConfigError("given", ",".join(options.given or []), f"for {name} also {', '.join(missing)}")
    return Answers(tuple(found), lacking)


def _of_plan(plan: Plan) -> Subject:
    o = plan.options
    return Subject(plan.setup, plan.pool, plan.longest.tokens + o.output_tokens + o.draft_tokens)


def _of_node(contract: Contract, o: PlanOptions) -> Subject:
    """The node's own layers, rows and drafts where the options don't say otherwise."""
    from pdkv.cli.plan.live import shape_of

    shape = shape_of(contract)
    if o.draft_layers is not None:
        shape = replace(shape, draft_layers=o.draft_layers)
    drafts = o.draft_tokens or contract.rollback_tokens
    setup = Setup(
        shape,
        o.main_row or contract.main_row_format,
        dcp_only(max(o.dcp, contract.topology.dcp)),
        None if o.memory is None else parse_bytes(o.memory, "memory"),
        drafts,
    )
    asked = max(o.context) + o.output_tokens + drafts if o.context else None
    return Subject(setup, setup.pool(), asked)


def _caches(name: str, subject: Subject) -> ModelShape:
    """A pool is a rank's: of its pipeline stage only. The other complaints are about the whole model."""
    shape, budget = subject.setup.shape, subject.pool.budget if subject.pool is not None else None
    return shape if name != "pool" or budget is None else stage_shape(shape, budget.layers)


def _planned(name: str, subject: Subject, options: PlanOptions) -> Numbers:
    """What is known of a complaint before anything runs."""
    layout, pool = subject.setup.layout, subject.pool
    if name == "pool":
        memory = {"memory_bytes": pool.available_bytes} if pool is not None and pool.usable_pages else {}
        return {**memory, "dcp": layout.dcp, "rollback_tokens": subject.setup.rollback_tokens}
    if name == "refused":
        asked = {} if subject.request_tokens is None else {"request_tokens": subject.request_tokens}
        return {**asked, "dcp": layout.dcp}
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
        if types[key] == "str":
            made[key] = value
            continue
        try:
            made[key] = float(value) if types[key] == "float" else int(value)
        except ValueError as error:
            raise ConfigError(f"given.{key}", value, f"of type {types[key]}") from error
    return made
