"""What a context costs: bytes and pages, and whether they fit.

Guarantees: pure integer arithmetic, no rounding but the one that is named; a count of pages always takes whole pages,
and a pool always loses one page to the write sink. Every figure is checked against `tests/golden/ledger.json`.
Neighbours: `traffic` (reads, links, hits), `workspaces` (memory beside pages), `weights`, `fleet` (a rank's memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import ConfigError
from pdkv.geometry.model_config import ModelShape
from pdkv.geometry.page_layout import INDEX_PAGE_ROWS, Group, PageFormat, page_format
from pdkv.geometry.row_format import INDEX_FP8, main_row_format


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
    require_positive(dcp=dcp)
    row = main_row_format(main_row).row_bytes
    index_row = -(-INDEX_FP8.row_bytes // shape.index_kpool)
    index_layers = len(shape.full_layers) + shape.draft_layers
    return GroupBytes(row * (shape.num_layers + shape.draft_layers * dcp), index_row * index_layers * dcp)


def page_group_bytes(fmt: PageFormat) -> GroupBytes:
    """Bytes of a page, by cache."""
    return GroupBytes(fmt.main_bytes, fmt.index_bytes)


def slot_page_bytes(
    shape: ModelShape, *, main_row: str = "fp8_ds_mla", dcp: int = 1, rollback_tokens: int = 0
) -> GroupBytes:
    """Bytes of a page of local slots; under decode context parallelism it serves `dcp` pages of context.

    Index-K and draft main rows are replicated over the dcp ranks, so a rank keeps them for all the context that its
    slots serve. Exact for a pooled index, where `token_bytes` rounds up and leaves out the keys of open windows, which
    `rollback_tokens` adds to. Raises `ConfigError`.
    """
    require_positive(dcp=dcp)
    fmt = page_format(shape, main_row=main_row, rollback_tokens=rollback_tokens)
    draft = sum(s.length for s in fmt.group_segments(Group.MAIN) if s.layer >= shape.num_layers)
    return GroupBytes(fmt.main_bytes + draft * (dcp - 1), fmt.index_bytes * dcp)


def index_page_bytes(shape: ModelShape) -> int:
    """Index-K rows of a page, all full and draft layers: what the indexer reads, without keys of an open window."""
    return INDEX_PAGE_ROWS * INDEX_FP8.row_bytes * (len(shape.full_layers) + shape.draft_layers)


def request_pages(prompt_tokens: int, *, output_tokens: int = 0, draft_tokens: int = 0, page_tokens: int = 64) -> int:
    """Pages that a request needs: prompt, output and draft headroom, rounded up to whole pages."""
    require_positive(page_tokens=page_tokens)
    require_not_negative(prompt_tokens=prompt_tokens, output_tokens=output_tokens, draft_tokens=draft_tokens)
    return -(-(prompt_tokens + output_tokens + draft_tokens) // page_tokens)


def usable_pages(available_bytes: int, page_bytes: int, *, fixed_bytes: int = 0) -> int:
    """Pages to hand out: (available - fixed) // page_bytes - 1. Page 0 is the write sink."""
    require_positive(page_bytes=page_bytes)
    return max((available_bytes - fixed_bytes) // page_bytes - 1, 0)


def pool_fit(available_bytes: int, page_bytes: int, needed_pages: int) -> PoolFit:
    """Whether `needed_pages` and the sink fit into `available_bytes`, and by how much they don't."""
    usable = usable_pages(available_bytes, page_bytes)
    short = max(needed_pages - usable, 0)
    short_bytes = (needed_pages + 1) * page_bytes - available_bytes if short else 0
    return PoolFit(usable, needed_pages, short, short_bytes)


@dataclass(frozen=True, slots=True)
class TailWaste:
    """Slots of partly filled last pages: half a page a request on average, a page less one token at worst."""

    average_tokens: int
    average_bytes: int
    worst_bytes: int


def tail_waste(requests: int, page_tokens: int, page_bytes: int) -> TailWaste:
    """What the last pages of `requests` requests hold without a token in it."""
    require_not_negative(requests=requests)
    require_positive(page_tokens=page_tokens, page_bytes=page_bytes)
    worst = requests * (page_tokens - 1) * page_bytes // page_tokens
    return TailWaste(requests * page_tokens // 2, requests * page_bytes // 2, worst)


def bigram_recorded(tokens: int, page_tokens: int = 64) -> int:
    """Tokens recorded and usable of a prompt under the bigram rule: N tokens are N - 1 pairs, in full pages."""
    return max(tokens - 1, 0) // page_tokens * page_tokens


def drop_page_usable(tokens: int, page_tokens: int = 64) -> int:
    """Most tokens that a lookup finds under the drop-page rule: N - 1 tokens, aligned down, then one page less."""
    return max(bigram_recorded(tokens, page_tokens) - page_tokens, 0)


def dcp_index_slots(size: int, page_tokens: int, dcp: int, *, logical: bool = False) -> int:
    """Index-K slots beside `size` main slots: (size + page) * dcp - page, or `size` for an only logical replica."""
    require_positive(dcp=dcp)
    return size if logical else (size + page_tokens) * dcp - page_tokens


def require_positive(**values: int) -> None:
    """Raises `ConfigError` for the first named value below 1."""
    for field, value in values.items():
        if value < 1:
            raise ConfigError(field, value, "an integer of at least 1")


def require_not_negative(**values: int) -> None:
    """Raises `ConfigError` for the first named value below 0."""
    for field, value in values.items():
        if value < 0:
            raise ConfigError(field, value, "an integer of at least 0")
