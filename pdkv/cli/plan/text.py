"""A plan and findings as text, for a terminal.

Guarantees: what an operator asks first comes first and is all there is, unless more was asked for; figures are exact
where a byte count stands in a table, in decimal GB where a sentence speaks of it; nothing is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdkv.cli.plan.complaints import Answers
from pdkv.cli.plan.figures import Plan
from pdkv.geometry import byte_ledger as ledger
from pdkv.geometry.fleet import WAYS, GpuMemory, RankPool
from pdkv.geometry.workspaces import LOGITS_NEVER_SPLIT_BELOW, LogitsPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def plan_text(plan: Plan) -> Iterator[RenderableType]:
    """The parts of the default output, then the sections that were asked for."""
    options = plan.options
    yield from _head(plan)
    yield _byte_table(plan)
    yield from _pool_lines(plan)
    if plan.hit is not None:
        yield from _hit_lines(plan)
    if plan.tail is not None:
        yield (
            f"Tails of {options.short_requests:,} short requests: {plan.tail.average_tokens:,} tokens or "
            f"{gb(plan.tail.average_bytes)} on average (half a page each), {gb(plan.tail.worst_bytes)} at worst"
        )
    if options.details:
        yield _what_if_table(plan)
        yield from _buffer_lines(plan)
        yield from _index_lines(plan)
    elif plan.hit is None and plan.tail is None:
        yield "(--details: what-ifs, workspaces, index traffic, page tables; --hit, --short-requests, --plot: more)"


def findings_text(answers: Answers) -> Iterator[RenderableType]:
    for finding in answers.findings:
        lines = [finding.complaint, f"  {'found' if finding.wrong else 'ok'}: {finding.finding}"]
        lines += [f"  way out: {way}" for way in finding.way_out]
        numbers = ", ".join(f"{name} {_number(value)}" for name, value in finding.numbers.items())
        yield "\n".join([*lines, f"  from: {numbers}"])
    for complaint, missing in answers.unanswered.items():
        yield f"{complaint}: not looked at, needs {', '.join(missing)} (--given, or --node with --probe)"


def show(parts: Iterator[RenderableType]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    # figures are never cut off: a narrow terminal wraps lines instead
    wide = console.options.update(width=1000)
    made = list(parts)
    console.width = max(console.width, *(console.measure(part, options=wide).maximum for part in made))
    for part in made:
        console.print(part, markup=False)


def gb(count: float) -> str:
    """Bytes in decimal GB, or MB where that says more."""
    return f"{count / 1e9:,.2f} GB" if abs(count) >= 1e8 else f"{count / 1e6:,.2f} MB"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(*columns: str, title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 and column == "" else "right", no_wrap=True)
    return table


def _head(plan: Plan) -> Iterator[str]:
    shape, fmt = plan.setup.shape, plan.fmt
    draft = f" + {shape.draft_layers} draft" if shape.draft_layers else ""
    yield (
        f"{plan.model}: {shape.num_layers}{draft} layers with main KV, {len(shape.full_layers)}{draft} with index-K\n"
        f"rows of {fmt.main_row.row_bytes} B ({fmt.main_row.name}) and {fmt.index_row.row_bytes} B; "
        f"{fmt.page_tokens} tokens a page"
    )
    if isinstance(plan.setup.memory, GpuMemory) and plan.pool is not None:
        yield "\n".join(_budget_lines(plan, plan.setup.memory, plan.pool))


def _budget_lines(plan: Plan, memory: GpuMemory, pool: RankPool) -> Iterator[str]:
    layout, budget = plan.setup.layout, pool.budget
    if budget is None:
        return
    ways = ", ".join(f"{way} {getattr(layout, way)}" for way in WAYS)
    stage = f", stage of layers {budget.layers[0]}-{budget.layers[-1]}" if layout.pp > 1 else ""
    yield f"\n{layout.gpus} x {memory.gpu.name} ({ways}); the tightest rank{stage}:"
    parts = sorted(((size, part) for part, size in budget.weights.items() if size), reverse=True)
    words = ", ".join(f"{part} {size / 1e9:.2f}" for size, part in parts)
    yield f"  {gb(budget.static_bytes):>10} static: {memory.mem_fraction_static:g} of {gb(budget.total_bytes)}"
    yield f"  {gb(budget.weight_bytes):>10} weights, {memory.weight_dtype}: {words}"
    fixed = budget.topk_buffer_bytes + budget.page_table_bytes
    yield f"  {gb(fixed):>10} top-k buffer and page tables"
    if budget.reserve_bytes:
        yield f"  {gb(budget.reserve_bytes):>10} reserved"
    if budget.left_bytes < 0:
        yield f"  no room for pages: {gb(-budget.left_bytes)} short before the first"
    else:
        yield f"  {gb(pool.available_bytes):>10} pages"


def _byte_table(plan: Plan) -> Table:
    columns = ("tokens", "pages", "main KV", "index-K", "together", "seconds")
    table = _table(*columns, title=f"Bytes, and seconds at {plan.options.gbps:g} Gbit/s")
    token = ledger.token_bytes(plan.setup.shape, main_row=plan.setup.main_row)
    rows = [("1", "", token, ""), (str(plan.fmt.page_tokens), "1", ledger.page_group_bytes(plan.fmt), "")]
    rows += [(f"{c.tokens:,}", f"{c.pages:,}", c.bytes, f"{c.seconds:.4f}") for c in plan.contexts]
    for tokens, pages, size, seconds in rows:
        table.add_row(tokens, pages, f"{size.main:,}", f"{size.index:,}", f"{size.total:,}", seconds)
    return table


def _pool_lines(plan: Plan) -> Iterator[str]:
    pool, layout = plan.pool, plan.setup.layout
    if pool is not None:
        whose = "A pool" if pool.budget is None else "A rank's pool"
        dcp = f", {pool.page_tokens} tokens of context each" if layout.dcp > 1 else ""
        more = f"; {layout.dp} of them hold {layout.dp * pool.tokens:,}" if layout.dp > 1 else ""
        yield (
            f"{whose} of {pool.available_bytes:,} B hands out {pool.usable_pages:,} pages{dcp}, {pool.tokens:,} tokens"
            f"{more} (one page more is the write sink)."
        )
    drafts = f" + {plan.options.draft_tokens:,} drafts" if plan.options.draft_tokens else ""
    for c in plan.contexts:
        if c.fit is not None:
            name = (
                f"{c.tokens:,} tokens + {plan.options.output_tokens:,} output{drafts} need {c.fit.needed_pages:,} pages"
            )
            short = f"do not fit: {c.fit.missing_pages:,} pages short, {c.fit.missing_bytes:,} B more memory needed"
            yield f"  {name}: {'fits' if c.fit.fits else short}"
            if not c.fit.fits:
                yield f"    fits with: {'; '.join(c.would_fit) or 'no change that is known here'}"
        if c.tokens > plan.positions:
            yield f"  {c.tokens:,} tokens are more than the {plan.positions:,} that the model was made for"


def _hit_lines(plan: Plan) -> Iterator[str]:
    hit, context, page_tokens = plan.hit, plan.longest, plan.fmt.page_tokens
    if hit is None:
        return
    seconds = context.seconds * hit.bytes.total / context.bytes.total
    cached = plan.options.hit or 0
    pairs, dropped = ledger.bigram_recorded(cached, page_tokens), ledger.drop_page_usable(cached, page_tokens)
    yield "\n".join(
        [
            f"A hit of {hit.tokens:,} of {context.tokens:,} tokens, {hit.pages:,} pages",
            f"  saves {hit.scores_share:.2%} of the index scores (P^2/L^2) and {hit.tokens_share:.2%} of other work",
            f"  saves {hit.bytes.main:,} B main and {hit.bytes.index:,} B index-K on the link, {seconds:.4f} s",
            f"  not the cross term (L-P)*P: {hit.cross_pairs:,} pairs a full layer, and {hit.rest_pairs:,} of the rest",
            f"  not the reads: {gb(hit.index_read_bytes)} index-K of {gb(hit.index_read_without_bytes)} are still read",
            f"  with a draft head less: {pairs:,} tokens by pairs, {dropped:,} by dropping a page",
        ]
    )


def _what_if_table(plan: Plan) -> Table:
    table = _table("", "B a slot", "B a token", "pool tokens", "ratio", title="What if")
    for v in plan.what_if:
        tokens = "" if v.pool_tokens is None else f"{v.pool_tokens:,}"
        slot = v.bytes_per_slot.total
        table.add_row(v.name, f"{slot:,}", f"{slot / v.dcp:,.0f}", tokens, f"{v.ratio:.5f}")
    return table


def _buffer_lines(plan: Plan) -> Iterator[str]:
    o, b = plan.options, plan.buffers
    lines = [
        f"Workspaces beside the pages, at {plan.longest.tokens:,} tokens",
        f"  top-k buffer of {o.chunk_tokens:,} x {plan.setup.shape.index_topk:,}: {b.topk_buffer_bytes:,} B",
        f"  page tables of {o.requests:,} requests x {o.groups}: {b.table_row_per_page_bytes:,} B"
        f" (with an entry a token: {b.table_row_per_token_bytes:,} B)",
        f"  scores of a prefill chunk: {b.prefill_scores_bytes:,} B{_chunks(b.prefill)}",
        f"  scores of a decode step, {b.decode_rows:,} rows: {b.decode_scores_bytes:,} B{_chunks(b.decode)}",
    ]
    if plan.pool is not None and plan.setup.layout.dcp > 1:
        size, dcp = plan.pool.usable_pages * plan.fmt.page_tokens, plan.setup.layout.dcp
        slots = ledger.dcp_index_slots(size, plan.fmt.page_tokens, dcp)
        lines.append(f"  index-K slots beside {size:,} main slots of a rank: {slots:,}, (size + page) * dcp - page")
    if b.prefill is not None:
        lines.append(
            f"  budget for scores: {b.prefill.budget_bytes:,} B, and 0.2 of what is free at the time; "
            f"never split under {LOGITS_NEVER_SPLIT_BELOW:,} elements"
        )
    yield "\n".join(lines)


def _chunks(plan: LogitsPlan | None) -> str:
    if plan is None:
        return ""
    return ", whole" if plan.chunks <= 1 else f", in {plan.chunks:,} pieces of {plan.rows_per_chunk:,} rows"


def _index_lines(plan: Plan) -> Iterator[str]:
    i, gbps = plan.index, plan.options.gbps
    yield "\n".join(
        [
            f"Index-K of a request of {plan.longest.tokens:,} tokens",
            f"  written: {i.written_per_chunk_bytes:,} B a prefill chunk, {i.written_per_step_bytes:,} B a decode step",
            f"  read: {i.read_per_step_bytes:,} B a decode step, {i.read_over_prefill_bytes:,} B by the whole prefill",
            f"  alone on the link: {i.seconds:.4f} s at {gbps:g} Gbit/s",
            f"  scores: {i.score_flops_per_pair:,} operations for each pair of tokens, all full layers together",
        ]
    )
