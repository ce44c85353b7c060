"""`pdkv plan`: what a model's two caches cost, from its `config.json` alone.

Guarantees: every figure comes from `geometry.byte_ledger`; the table and `--json` show the same plan; exit code 0 if
every context fits (or no memory was given), 3 if one doesn't.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdkv.errors import ConfigError
from pdkv.geometry import byte_ledger as ledger
from pdkv.geometry import traffic
from pdkv.geometry.model_config import ModelShape, load_config, model_shape
from pdkv.geometry.page_layout import PageFormat, page_format

if TYPE_CHECKING:
    from rich.console import RenderableType

DOES_NOT_FIT = 3
"""Exit code when a context doesn't fit into the memory."""
CONTEXTS = (8_192, 131_072, 524_288, 1_048_576)

HELP = """Count the bytes of a model's two caches: a token, a page, a context, a pool.

Needs only a config.json: no GPU, no torch, no weights. Presets: glm-5.3, glm-5.3-mtp, deepseek-v3.2, tiny.

**Examples**

`pdkv plan --model glm-5.3`: bytes by cache, and seconds on a 400 Gbit/s link.

`pdkv plan --model glm-5.3 --context 1048576 --memory 56GB`: does a 1M-token request with 256 output tokens fit? No
(exit code 3), and it says how many pages and bytes are missing.

`pdkv plan --model ./config.json --draft-layers 1 --json | jq .bytes_per_page`: a model of your own, with one MTP layer.
"""


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """One prompt: whole pages, their bytes, and the time to ship all of them."""

    tokens: int
    pages: int
    bytes: ledger.GroupBytes
    seconds: float
    fit: ledger.PoolFit | None
    """With the output tokens; None when no memory was given."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the command prints."""

    shape: ModelShape
    fmt: PageFormat
    per_token: ledger.GroupBytes
    contexts: tuple[ContextPlan, ...]
    gbps: float
    output_tokens: int
    memory_bytes: int | None

    @property
    def usable_pages(self) -> int:
        return ledger.usable_pages(self.memory_bytes or 0, self.fmt.page_bytes)

    @property
    def fits(self) -> bool:
        return all(c.fit is None or c.fit.fits for c in self.contexts)


def plan(
    model: Annotated[str, typer.Option(help="Preset, path of a config.json, or a directory with one.")],
    context: Annotated[list[int] | None, typer.Option(help="Prompt tokens; repeat for several.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of the pool: bytes, 56GB (1000^3) or 56GiB.")] = None,
    main_row: Annotated[str, typer.Option(help="Main-KV row: fp8_ds_mla, fp8, bf16 or nvfp4.")] = "fp8_ds_mla",
    draft_layers: Annotated[
        int | None, typer.Option(help="MTP layers kept in the pool [default: the config's].")
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Tokens to leave room for beside the prompt.")] = 256,
    gbps: Annotated[float, typer.Option(help="Rate of the link, Gbit/s.")] = 400.0,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from pdkv.config import parse_bytes

    shape = model_shape(load_config(model), draft_layers=draft_layers)
    fmt = page_format(shape, main_row=main_row)
    memory_bytes = None if memory is None else parse_bytes(memory, "memory")
    tokens = tuple(context or CONTEXTS)
    if min(tokens) < 1:
        raise ConfigError("context", min(tokens), "an integer of at least 1")
    made = Plan(
        shape=shape,
        fmt=fmt,
        per_token=ledger.token_bytes(shape, main_row=main_row),
        contexts=tuple(_context(n, fmt, gbps, output_tokens, memory_bytes) for n in tokens),
        gbps=gbps,
        output_tokens=output_tokens,
        memory_bytes=memory_bytes,
    )
    if json_:
        typer.echo(json.dumps(to_dict(made)))
    else:
        _print(_tables(model, made))
    if not made.fits:
        raise typer.Exit(DOES_NOT_FIT)


plan.__doc__ = HELP


def _context(tokens: int, fmt: PageFormat, gbps: float, output_tokens: int, memory_bytes: int | None) -> ContextPlan:
    pages = ledger.request_pages(tokens, page_tokens=fmt.page_tokens)
    size = ledger.page_group_bytes(fmt).times(pages)
    needed = ledger.request_pages(tokens, output_tokens=output_tokens, page_tokens=fmt.page_tokens)
    fit = None if memory_bytes is None else ledger.pool_fit(memory_bytes, fmt.page_bytes, needed)
    return ContextPlan(tokens, pages, size, traffic.link_seconds(size.total, gbps), fit)


def to_dict(plan: Plan) -> dict[str, Any]:
    """The JSON object: bytes as integers, seconds as numbers, `pool` null when no memory was given."""
    pool = None
    if plan.memory_bytes is not None:
        pool = {
            "memory_bytes": plan.memory_bytes,
            "usable_pages": plan.usable_pages,
            "usable_tokens": plan.usable_pages * plan.fmt.page_tokens,
            "output_tokens": plan.output_tokens,
            "fits": plan.fits,
        }
    return {
        "architecture": plan.shape.architecture,
        "layers": plan.shape.num_layers,
        "full_layers": list(plan.shape.full_layers),
        "draft_layers": plan.shape.draft_layers,
        "main_row": plan.fmt.main_row.name,
        "page_tokens": plan.fmt.page_tokens,
        "segments": len(plan.fmt.segments),
        "bytes_per_token": _group(plan.per_token),
        "bytes_per_page": _group(ledger.page_group_bytes(plan.fmt)),
        "gbps": plan.gbps,
        "contexts": [
            {
                "tokens": c.tokens,
                "pages": c.pages,
                "bytes": _group(c.bytes),
                "seconds": c.seconds,
                "fit": None if c.fit is None else {"fits": c.fit.fits, **asdict(c.fit)},
            }
            for c in plan.contexts
        ],
        "pool": pool,
    }


def _group(size: ledger.GroupBytes) -> dict[str, int]:
    return {"main": size.main, "index": size.index, "total": size.total}


def _tables(model: str, plan: Plan) -> Sequence[RenderableType]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shape, fmt = plan.shape, plan.fmt
    draft = f" + {shape.draft_layers} draft" if shape.draft_layers else ""
    head = (
        f"{model}: {shape.num_layers}{draft} layers with main KV, {len(shape.full_layers)}{draft} with index-K\n"
        f"rows of {fmt.main_row.row_bytes} B ({fmt.main_row.name}) and {fmt.index_row.row_bytes} B; "
        f"{fmt.page_tokens} tokens a page"
    )
    table = Table(title=f"Bytes, and seconds at {plan.gbps:g} Gbit/s", title_justify="left", box=SIMPLE_HEAD)
    for column in ("tokens", "pages", "main KV", "index-K", "together", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [("1", "", plan.per_token, ""), (str(fmt.page_tokens), "1", ledger.page_group_bytes(fmt), "")]
    rows += [(f"{c.tokens:,}", f"{c.pages:,}", c.bytes, f"{c.seconds:.4f}") for c in plan.contexts]
    for tokens, pages, size, seconds in rows:
        table.add_row(tokens, pages, f"{size.main:,}", f"{size.index:,}", f"{size.total:,}", seconds)
    return [head, table] if plan.memory_bytes is None else [head, table, *_pool_lines(plan)]


def _pool_lines(plan: Plan) -> list[str]:
    pages = plan.usable_pages
    lines = [
        f"A pool of {plan.memory_bytes:,} B hands out {pages:,} pages, {pages * plan.fmt.page_tokens:,} tokens "
        f"(one page more is the write sink)."
    ]
    for c in plan.contexts:
        if c.fit is None:
            continue
        name = f"{c.tokens:,} tokens + {plan.output_tokens:,} output need {c.fit.needed_pages:,} pages"
        short = f"do not fit: {c.fit.missing_pages:,} pages short, {c.fit.missing_bytes:,} B more memory needed"
        lines.append(f"  {name}: {'fits' if c.fit.fits else short}")
    return lines


def _print(parts: Sequence[RenderableType]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    # figures are never cut off: a narrow terminal wraps lines instead
    wide = console.options.update(width=1000)
    console.width = max(console.width, *(console.measure(part, options=wide).maximum for part in parts))
    for part in parts:
        console.print(part, markup=False)
