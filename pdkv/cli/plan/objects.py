"""A plan and findings as one JSON object each.

Guarantees: bytes are integers, seconds and shares numbers; every key is there in every plan, null where the options
leave nothing to say (no memory, no card, no hit).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pdkv.cli.plan.complaints import Answers
from pdkv.cli.plan.figures import ContextPlan, Plan
from pdkv.geometry import byte_ledger as ledger
from pdkv.geometry.fleet import GpuMemory


def plan_object(plan: Plan) -> dict[str, Any]:
    shape, options = plan.setup.shape, plan.options
    return {
        "architecture": shape.architecture,
        "layers": shape.num_layers,
        "full_layers": list(shape.full_layers),
        "draft_layers": shape.draft_layers,
        "main_row": plan.fmt.main_row.name,
        "page_tokens": plan.fmt.page_tokens,
        "segments": len(plan.fmt.segments),
        "bytes_per_token": _group(ledger.token_bytes(shape, main_row=plan.setup.main_row)),
        "bytes_per_page": _group(ledger.page_group_bytes(plan.fmt)),
        "gbps": options.gbps,
        "contexts": [_context(c) for c in plan.contexts],
        "pool": _pool(plan),
        "rank": _rank(plan),
        "what_if": [
            {
                "change": v.name,
                "bytes_per_slot": _group(v.bytes_per_slot),
                "tokens_per_slot": v.dcp,
                "pool_tokens": v.pool_tokens,
                "ratio": v.ratio,
            }
            for v in plan.what_if
        ],
        "workspaces": asdict(plan.buffers),
        "index_traffic": asdict(plan.index),
        "hit": None if plan.hit is None else {**asdict(plan.hit), "bytes": _group(plan.hit.bytes)},
        "tail_waste": None if plan.tail is None else {"requests": options.short_requests, **asdict(plan.tail)},
    }


def findings_object(answers: Answers) -> dict[str, Any]:
    return {
        "wrong": answers.wrong,
        "findings": [asdict(f) for f in answers.findings],
        "unanswered": {name: list(missing) for name, missing in answers.unanswered.items()},
    }


def _context(c: ContextPlan) -> dict[str, Any]:
    return {
        "tokens": c.tokens,
        "pages": c.pages,
        "bytes": _group(c.bytes),
        "seconds": c.seconds,
        "fit": None if c.fit is None else {"fits": c.fit.fits, **asdict(c.fit), "would_fit": list(c.would_fit)},
    }


def _pool(plan: Plan) -> dict[str, Any] | None:
    """Of a rank."""
    pool = plan.pool
    if pool is None:
        return None
    return {
        "memory_bytes": pool.available_bytes,
        "usable_pages": pool.usable_pages,
        "usable_tokens": pool.tokens,
        "page_bytes": _group(pool.page),
        "tokens_per_page": pool.page_tokens,
        "output_tokens": plan.options.output_tokens,
        "fits": plan.fits,
    }


def _rank(plan: Plan) -> dict[str, Any] | None:
    memory, budget = plan.setup.memory, plan.pool.budget if plan.pool else None
    if not isinstance(memory, GpuMemory) or budget is None:
        return None
    return {
        "gpu": memory.gpu.name,
        "layout": asdict(plan.setup.layout),
        "stage_layers": [budget.layers.start, budget.layers.stop],
        "total_bytes": budget.total_bytes,
        "static_bytes": budget.static_bytes,
        "weight_dtype": memory.weight_dtype,
        "weight_bytes": {"total": budget.weight_bytes, **{str(k): v for k, v in budget.weights.items()}},
        "topk_buffer_bytes": budget.topk_buffer_bytes,
        "page_table_bytes": budget.page_table_bytes,
        "reserve_bytes": budget.reserve_bytes,
        "left_bytes": budget.left_bytes,
    }


def _group(size: ledger.GroupBytes) -> dict[str, int]:
    return {"main": size.main, "index": size.index, "total": size.total}
