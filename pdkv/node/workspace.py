"""Memory beside the pages that a prefill step needs, planned when the node starts and kept to in every step.

Guarantees: a step has at most `max_batched_tokens` tokens, so the buffer of selected tokens that is planned suffices;
and its whole matrix of index scores, columns aligned, stays within `scores_bytes`: an engine that scores all rows at
once, as the reference engine does, needs no more. Two steps are never made smaller: one of a single page, and one
whose matrix is below `LOGITS_NEVER_SPLIT_BELOW` elements. Steps are whole pages. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.errors import BoundsError
from pdkv.geometry.workspaces import logits_never_split, logits_row_bytes, topk_buffer_bytes


@dataclass(frozen=True, slots=True)
class Workspace:
    page_tokens: int
    index_topk: int
    max_batched_tokens: int
    """Of one step: whole pages."""
    scores_bytes: int | None = None
    """Of one step's scores; None: as many as it takes."""

    def __post_init__(self) -> None:
        """Raises `BoundsError` if a step is not whole pages."""
        if self.max_batched_tokens < 1 or self.max_batched_tokens % self.page_tokens:
            raise BoundsError("max_batched_tokens", self.max_batched_tokens, f"a multiple of {self.page_tokens}")

    @property
    def topk_bytes(self) -> int:
        """Buffer of selected tokens, one for the process."""
        return topk_buffer_bytes(self.max_batched_tokens, self.index_topk)

    def steps(self, start: int, stop: int, chunk_tokens: int) -> list[slice]:
        """[start, stop) in steps of at most `chunk_tokens`. Where the budget bites, later ones are shorter: the same
        rows are scored against more columns."""
        found: list[slice] = []
        while start < stop:
            rows = self._rows(start, min(chunk_tokens, self.max_batched_tokens))
            found.append(slice(start, min(start + rows, stop)))
            start = found[-1].stop
        return found

    def plan(self) -> dict[str, int]:
        """Bytes and tokens, for an operator."""
        scores = {} if self.scores_bytes is None else {"scores_bytes": self.scores_bytes}
        return {"max_batched_tokens": self.max_batched_tokens, "topk_bytes": self.topk_bytes, **scores}

    def __str__(self) -> str:
        """The same in words."""
        scores = "as many scores as that takes" if self.scores_bytes is None else f"{self.scores_bytes:,} B of scores"
        return (
            f"steps of up to {self.max_batched_tokens:,} tokens, {self.topk_bytes:,} B for what they select, {scores}"
        )

    def _rows(self, start: int, most: int) -> int:
        """The most whole pages of rows, up to `most`, that fit: more rows always take more bytes."""
        low, high = 1, most // self.page_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle * self.page_tokens, start) else (low, middle - 1)
        return low * self.page_tokens

    def _fits(self, rows: int, start: int) -> bool:
        if self.scores_bytes is None or logits_never_split(rows, start + rows):
            return True
        return rows * logits_row_bytes(start + rows) <= self.scores_bytes
