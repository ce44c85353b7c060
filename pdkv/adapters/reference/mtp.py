"""The next-token (MTP) head of the model's kind: one layer more, which drafts, with rows of its own in the pages.

Guarantees: the layer is transformers' own decoder layer, with an indexer of its own, its cache in the pool's draft
segments; the row of position i depends on the model's hidden state there, on token i + 1 and on the rows before it, and
on nothing else; equal weights, bytes and call shapes give equal drafts, bit for bit, in any process.

    row i:  x = eh_proj [enorm(embed(t_{i+1})) ; hnorm(h_i)],  g_i = layer(x),  logits of t_{i+2} = lm_head(norm(g_i))

h_i is the model's hidden state after its last norm, or, for a row within a draft, the head's own g_{i-1}. Formula:
DeepSeek-V3 report (arXiv:2412.19437), section 2.2; embeddings and lm_head are the model's.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pdkv.adapters.reference.model import LoadedModel
from pdkv.adapters.reference.pool_cache import LayerRows, Window, step_cache
from pdkv.errors import BoundsError, ConfigError, MissingDependency
from pdkv.ids import LocalPages, UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.messages import DraftHandoff, Float32Array
from pdkv.node.ports import DraftAsk, Drafts
from pdkv.node.sampling import logits_digest

try:
    from transformers.masking_utils import create_causal_mask
except ImportError as e:
    raise MissingDependency("transformers", "the reference engine", extra="reference") from e


class MtpDrafter:
    """`node.ports.Drafter` over one pool. Drafts are a chain: each goes on from the best candidate before it."""

    def __init__(self, model: LoadedModel, pool: SlotPool, *, topk: int = 1, index_sharing: bool = False) -> None:
        """`topk` candidates are handed over. With `index_sharing` a draft's later rows read what the last row before
        it selected, and select nothing themselves.

        Raises `ConfigError` for a model without draft layer, or sharing with more than one candidate.
        """
        if model.draft is None:
            raise ConfigError("draft_layers", 0, "1: the model was loaded without its draft layer")
        if index_sharing and topk != 1:
            raise ConfigError("index_sharing", index_sharing, f"false, as topk is {topk}, not 1")
        self.hidden_width = int(model.module.config.hidden_size)
        self._module = model.module
        self._head = model.draft
        self._blind = _without_indexer(self._head.layer)
        """The same layer, to be told what to attend to."""
        self._pool = pool
        self._rows = LayerRows(pool, model.shape.num_layers, indexed=True)
        self._layer = model.shape.num_layers
        self._topk = topk
        self._seed_length = model.shape.index_topk + model.shape.index_kpool - 1 if index_sharing else 0

    def extend(self, hidden: Float32Array, after: UInt32Array, start: int, pages: LocalPages) -> DraftHandoff:
        """Write draft rows of positions [start, start + n). Raises `BoundsError` for columns of other lengths."""
        if hidden.shape != (len(after), self.hidden_width) or not len(after):
            raise BoundsError("hidden states", hidden.shape, f"[{len(after)}, {self.hidden_width}], at least one")
        with torch.inference_mode():
            out, selected = self._run(torch.from_numpy(hidden), after, start, pages)
            seed = np.full(self._seed_length, -1, np.int32)
            if self._seed_length:
                chosen = np.sort(selected[0, -1].cpu().numpy())
                seed[: len(chosen)] = chosen
            return self._state(out[-1], seed)

    def propose(self, ask: DraftAsk, pages: LocalPages) -> Drafts:
        """The candidate of the state, then one more for each further row. Raises `BoundsError` without a state."""
        state = ask.state
        if state is None:
            raise BoundsError("draft state", None, "what `extend` gave")
        tokens, digests = [int(state.tokens[0])], [state.logits_digest]
        with torch.inference_mode():
            for place in range(ask.place, ask.place + ask.count - 1):
                after = np.array(tokens[-1:], np.uint32)
                told = self._told(state.index_seed, ask.place, place)
                out, _ = self._run(torch.from_numpy(state.hidden)[None], after, place, pages, told)
                state = self._state(out[-1], state.index_seed)
                tokens.append(int(state.tokens[0]))
                digests.append(state.logits_digest)
        return Drafts(np.array(tokens, np.uint32), tuple(digests))

    def _told(self, seed: npt.NDArray[np.int32], first: int, place: int) -> Tensor | None:
        """int32 [1, 1, n]: what the row at `place` of a draft that began at `first` attends to: what was selected
        before it, and the draft's own rows. None: the indexer says it."""
        if not self._seed_length:
            return None
        positions = np.concatenate((seed[seed >= 0], np.arange(first, place + 1, dtype=np.int32)))
        return torch.from_numpy(positions)[None, None].to(self._module.device)

    def _run(
        self, hidden: Tensor, after: UInt32Array, start: int, pages: LocalPages, told: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[n, width] of the layer's output for rows [start, start + n), and what they selected."""
        device, stop = self._module.device, start + len(after)
        at = Window.of(start, stop, _ids(pages.array, device), self._pool.fmt.page_tokens)
        cache = step_cache((self._rows,) * (self._layer + 1), at)
        embedded = self._module.model.embed_tokens(_ids(after, device)[None])
        x = self._head(embedded, hidden.to(device, embedded.dtype)[None])
        position_ids = torch.arange(start, stop, device=device)[None]
        mask = create_causal_mask(
            config=self._module.config,
            inputs_embeds=x,
            attention_mask=None,
            cache=cache,
            position_ids=position_ids,
            allow_is_causal_skip=False,
        )
        out, selected = (self._head.layer if told is None else self._blind)(
            x,
            attention_mask=mask,
            position_embeddings=self._module.model.rotary_emb(x, position_ids=position_ids),
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
            prev_topk_indices=told,
        )
        return out[0], selected

    def _state(self, hidden: Tensor, seed: npt.NDArray[np.int32]) -> DraftHandoff:
        logits = self._module.lm_head(self._head.norm(hidden[None]))[0].float()
        probabilities, tokens = torch.softmax(logits, dim=-1).topk(self._topk)
        return DraftHandoff(
            hidden=hidden.float().cpu().numpy(),
            tokens=tokens.cpu().numpy().astype(np.uint32),
            probabilities=probabilities.cpu().numpy(),
            index_seed=seed,
            logits_digest=logits_digest(logits.cpu().numpy()),
        )


def _ids(values: npt.NDArray[np.generic], device: Any) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _without_indexer(layer: Any) -> nn.Module:
    """The same parameters in a layer that selects nothing itself, as transformers' shared layers don't."""
    blind: nn.Module = copy.copy(layer)
    attention = copy.copy(layer.self_attn)
    attention._modules = {**attention._modules, "indexer": None}
    blind._modules = {**layer._modules, "self_attn": attention}
    return blind
