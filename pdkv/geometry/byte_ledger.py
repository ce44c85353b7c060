"""What a context costs: bytes, pages, workspaces and seconds on a link.

Guarantees: pure integer arithmetic (seconds and shares apart), no rounding but the one that is named; a count of pages
always takes whole pages, and a pool always loses one page to the write sink. Every figure is checked against
`tests/golden/ledger.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pdkv.errors import ConfigError
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.page_layout import PageFormat
from pdkv.geometry.row_format import INDEX_FP8, main_row_format

INT32_BYTES = 4
FLOAT32_BYTES = 4
LOGITS_NEVER_SPLIT_BELOW = 8_000_000
"""Elements of a score matrix under which the indexer never works in row chunks."""
LOGITS_COLUMN_ALIGN = 256


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes of main KV and of index-K."""

    main: int
    index: int

    @property
    def total(self) -> int:
        return self.main + self.index

    def times(self, count: int) -> GroupBytes:
        return GroupBytes(self.main * count, self.index * count)


@dataclass(frozen=True, slots=True)
class PoolFit:
    """Whether one request fits into a pool that has nothing else in it."""

    usable_pages: int
    needed_pages: int
    missing_pages: int
    missing_bytes: int
    """Memory to add until it fits; 0 if it does."""

    @property
    def fits(self) -> bool:
        return self.missing_pages == 0


# --- tokens and pages -------------------------------------------------------------------------------------------------


def token_bytes(shape: ModelShape, *, main_row: str = "fp8_ds_mla", dcp: int = 1) -> GroupBytes:
    """Bytes a token: row * (L + L_draft * dcp), and ceil(132 / kpool) * (F + F_draft) * dcp.

    Under decode context parallelism main rows are sharded, index-K and draft main rows are replicated, and one local
    slot serves `dcp` tokens of context, so this is the cost of a local slot. Raises `ConfigError` for an unknown row.
    """
    _positive(dcp=dcp)
    row = main_row_format(main_row).row_bytes
    index_row = -(-INDEX_FP8.row_bytes // shape.index_kpool)
    index_layers = len(shape.full_layers) + shape.draft_layers
    return GroupBytes(row * (shape.num_layers + shape.draft_layers * dcp), index_row * index_layers * dcp)


def page_group_bytes(fmt: PageFormat) -> GroupBytes:
    """Bytes of a page, by cache."""
    return GroupBytes(fmt.main_bytes, fmt.index_bytes)


def request_pages(prompt_tokens: int, *, output_tokens: int = 0, draft_tokens: int = 0, page_tokens: int = 64) -> int:
    """Pages that a request needs: prompt, output and draft headroom, rounded up to whole pages."""
    _positive(page_tokens=page_tokens)
    _not_negative(prompt_tokens=prompt_tokens, output_tokens=output_tokens, draft_tokens=draft_tokens)
    return -(-(prompt_tokens + output_tokens + draft_tokens) // page_tokens)


def usable_pages(available_bytes: int, page_bytes: int, *, fixed_bytes: int = 0) -> int:
    """Pages to hand out: (available - fixed) // page_bytes - 1. Page 0 is the write sink."""
    _positive(page_bytes=page_bytes)
    return max((available_bytes - fixed_bytes) // page_bytes - 1, 0)


def pool_fit(available_bytes: int, page_bytes: int, needed_pages: int) -> PoolFit:
    """Whether `needed_pages` and the sink fit into `available_bytes`, and by how much they don't."""
    usable = usable_pages(available_bytes, page_bytes)
    short = max(needed_pages - usable, 0)
    short_bytes = (needed_pages + 1) * page_bytes - available_bytes if short else 0
    return PoolFit(usable, needed_pages, short, short_bytes)


def bigram_recorded(tokens: int, page_tokens: int = 64) -> int:
    """Tokens recorded and usable of a prompt under the bigram rule: N tokens are N - 1 pairs, in full pages."""
    return max(tokens - 1, 0) // page_tokens * page_tokens


def drop_page_usable(tokens: int, page_tokens: int = 64) -> int:
    """Most tokens that a lookup finds under the drop-page rule: N - 1 tokens, aligned down, then one page less."""
    return max(bigram_recorded(tokens, page_tokens) - page_tokens, 0)


def dcp_index_slots(size: int, page_tokens: int, dcp: int, *, logical: bool = False) -> int:
    """Index-K slots beside `size` main slots: (size + page) * dcp - page, or `size` for an only logical replica."""
    _positive(dcp=dcp)
    return size if logical else (size + page_tokens) * dcp - page_tokens


# --- time and traffic -------------------------------------------------------------------------------------------------


def link_seconds(count_bytes: int, gbit_per_s: float) -> float:
    """Seconds on a link of `gbit_per_s` * 10^9 bits a second. Raises `ConfigError` for a rate that is not positive."""
    if not gbit_per_s > 0:
        raise ConfigError("gbps", gbit_per_s, "a rate above 0, in Gbit/s")
    return count_bytes * 8 / (gbit_per_s * 1e9)


def index_reads(context_tokens: int, chunk_tokens: int, index_token_bytes: int) -> int:
    """Index-K bytes read by a prefill in chunks: each chunk scores all tokens up to and with its own."""
    _positive(chunk_tokens=chunk_tokens)
    whole, rest = divmod(context_tokens, chunk_tokens)
    scored = chunk_tokens * whole * (whole + 1) // 2 + (context_tokens if rest else 0)
    return scored * index_token_bytes


def scores_saved(prefix_tokens: int, context_tokens: int) -> float:
    """Share of all index scores that a prefix hit saves: P^2 / L^2. The cross term (L - P) * P stays."""
    _positive(context_tokens=context_tokens)
    return prefix_tokens * prefix_tokens / (context_tokens * context_tokens)


def score_flops(index_heads: int, index_head_dim: int) -> int:
    """Operations for one query-key pair of one full layer: a multiply and an add a head element."""
    return 2 * index_heads * index_head_dim


# --- workspaces -------------------------------------------------------------------------------------------------------


def topk_buffer_bytes(max_batched_tokens: int, index_topk: int) -> int:
    """Buffer of selected token numbers (int32), one for the process."""
    return max_batched_tokens * index_topk * INT32_BYTES


def page_table_bytes(context_tokens: int, *, page_tokens: int = 1, requests: int = 1) -> int:
    """int32 table rows of `requests` requests, one entry a page; the default page of 1 is the per-token table."""
    return request_pages(context_tokens, page_tokens=page_tokens) * INT32_BYTES * requests


def logits_bytes(rows: int, cols: int) -> int:
    """Indexer scores (float32) of `rows` queries against `cols` keys, unaligned."""
    return rows * cols * FLOAT32_BYTES


def logits_never_split(rows: int, cols: int) -> bool:
    return rows * cols < LOGITS_NEVER_SPLIT_BELOW


def logits_budget_bytes(total_bytes: int, mem_fraction_static: float, *, free_bytes: int | None = None) -> int:
    """Memory for scores: min(0.3 of all, 0.2 of what the static part leaves, 0.2 of what is free now), rounded down."""
    static = Fraction(str(mem_fraction_static))
    if not 0 <= static <= 1:
        raise ConfigError("mem_fraction_static", mem_fraction_static, "0 to 1")
    limits: list[Fraction] = [Fraction(3, 10) * total_bytes, Fraction(1, 5) * (1 - static) * total_bytes]
    if free_bytes is not None:
        limits.append(Fraction(1, 5) * free_bytes)
    budget = min(limits)
    return budget.numerator // budget.denominator


def logits_rows_per_chunk(budget_bytes: int, cols: int) -> int:
    """Rows scored at once: the budget over a row's bytes, columns aligned to 256; at least 1."""
    aligned = -(-cols // LOGITS_COLUMN_ALIGN) * LOGITS_COLUMN_ALIGN
    return max(budget_bytes // (aligned * FLOAT32_BYTES), 1)


def _positive(**values: int) -> None:
    for field, value in values.items():
        if value < 1:
            raise ConfigError(field, value, "an integer of at least 1")


def _not_negative(**values: int) -> None:
    for field, value in values.items():
        if value < 0:
            raise ConfigError(field, value, "an integer of at least 0")
