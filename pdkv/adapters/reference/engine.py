"""The reference engine: transformers' model, computing over the pages of a pool.

Guarantees: a call returns when its rows are in the pool; it writes the rows of its own positions and no others; input
is checked before anything is computed or written; with the same weights, bytes in the pages, call shapes, thread count
and machine, logits are the same bit for bit in any process, whatever the page ids and the placement of the pool.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pdkv.adapters.reference.model import LoadedModel
from pdkv.adapters.reference.pool_cache import LayerRows, Window, step_cache
from pdkv.errors import BoundsError, ConfigError
from pdkv.geometry.model_config import FULL, ModelShape
from pdkv.geometry.page_layout import page_format
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.ports import Computed, Logits

ENGINE_NAME = "reference"


class ReferenceEngine:
    """`node.ports.Engine` over one pool; one call at a time.

    It is for correctness: like transformers' model, it reads and decodes the main rows of the whole context in each
    step, and masks what the indexer didn't select.
    """

    def __init__(self, model: LoadedModel, pool: SlotPool) -> None:
        """Raises `ConfigError` for a pool of another model's segments or on another device, and for rows or index
        pooling that transformers can't do.
        """
        self.shape: ModelShape = model.shape
        self.weights_id: str = model.weights_id
        self._model = model
        self.pool = pool
        _check_pool(model, pool)
        self._layers = tuple(
            LayerRows(pool, i, indexed=kind == FULL) for i, kind in enumerate(model.shape.indexer_types)
        )

    def forward(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Logits:
        """Compute positions [start, start + n) from their tokens [n] and the rows of [0, start) in `pages`.

        Writes the new rows of both caches and returns float32 [vocab] logits of the last position. Raises
        `BoundsError` for no tokens, an id outside the vocabulary, a position outside `pages` or the model, or a page
        outside the pool.
        """
        logits: Logits = self._run(tokens, start, pages).logits[-1]
        return logits

    def chunk(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        """As `forward`, with float32 [n, width] hidden states, those that the logits are made of."""
        return self._run(tokens, start, pages)

    def verify(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        """float32 [n, vocab] logits and [n, width] hidden states, each position computed by itself: as many together
        would be rounded otherwise, and where two tokens are close that is enough to say the other one.
        """
        self._check(tokens, start, start + len(tokens), pages)
        rows = [self._run(tokens[i : i + 1], start + i, pages) for i in range(len(tokens))]
        return Computed(*(np.concatenate(column) for column in zip(*((r.logits, r.hidden) for r in rows), strict=True)))

    def _run(self, tokens: UInt32Array, start: int, pages: LocalPages) -> Computed:
        """Logits [1, vocab] of the last position, hidden states of all."""
        stop = start + len(tokens)
        self._check(tokens, start, stop, pages)
        device = self._model.module.device
        with torch.inference_mode():
            at = Window.of(start, stop, _column(pages.array, device), self.pool.fmt.page_tokens)
            out = self._model.module.model(
                input_ids=_column(tokens, device)[None],
                position_ids=torch.arange(start, stop, device=device)[None],
                cache=step_cache(self._layers, at),
                use_cache=True,
            )
            hidden = out.last_hidden_state
            logits = self._model.module.lm_head(hidden[:, -1:])
            return Computed(*(column[0].float().cpu().numpy() for column in (logits, hidden)))

    def _check(self, tokens: UInt32Array, start: int, stop: int, pages: LocalPages) -> None:
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise BoundsError("tokens", f"{tokens.dtype} of shape {tokens.shape}", "a column of at least one integer")
        worst = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
        if not 0 <= worst < self.shape.vocab_size:
            raise BoundsError("token id", worst, f"0 to {self.shape.vocab_size - 1}")
        room = min(len(pages) * self.pool.fmt.page_tokens, self._model.max_positions)
        if not 0 <= start < stop <= room:
            raise BoundsError(
                "positions",
                f"[{start}, {stop})",
                f"within [0, {room}) ({len(pages)} pages, {self._model.max_positions} positions of the model)",
            )
        if int(pages.array.max()) >= self.pool.num_pages:
            raise BoundsError("page id", int(pages.array.max()), f"1 to {self.pool.num_pages - 1}")


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _check_pool(model: LoadedModel, pool: SlotPool) -> None:
    if model.shape.index_kpool != 1:
        raise ConfigError("index_kpool", model.shape.index_kpool, "1: transformers does not pool index keys")
    own = page_format(model.shape, main_row=pool.fmt.main_row.name)
    mine, theirs = ([(s.name, s.length) for s in fmt.segments] for fmt in (own, pool.fmt))
    if mine != theirs:
        raise ConfigError("segments of the pool", theirs, f"those of the model, {mine}")
    device = pool.main_view(0).device
    if device != model.module.device:
        raise ConfigError("device of the pool", device, f"the model's, {model.module.device}")
