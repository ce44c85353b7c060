"""A sequence in the pages of a pool, driven as a node drives it."""

import numpy as np

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.model import LoadedModel
from pdkv.geometry.page_layout import Group
from pdkv.ids import LocalPages
from pdkv.kvcache.pool import SlotPool
from pdkv.node.ports import Logits


class Run:
    def __init__(self, model: LoadedModel, pool: SlotPool, *, page_seed: int = 0, pages: int = 66) -> None:
        ids = np.random.default_rng(page_seed).permutation(np.arange(1, pool.num_pages))[:pages]
        self.pool = pool
        self.pages = LocalPages.checked(ids, pool.num_pages)
        self.engine = ReferenceEngine(model, pool)

    def prefill(self, tokens: np.ndarray, chunk: int = 1024) -> Logits:
        for start in range(0, len(tokens), chunk):
            logits = self.engine.forward(tokens[start : start + chunk], start, self.pages)
        return logits

    def decode(self, logits: Logits, start: int, steps: int) -> tuple[list[int], list[Logits]]:
        """Greedy tokens and the logits after each of them."""
        tokens: list[int] = []
        after: list[Logits] = []
        for position in range(start, start + steps):
            tokens.append(int(logits.argmax()))
            logits = self.engine.forward(np.array(tokens[-1:], np.uint32), position, self.pages)
            after.append(logits)
        return tokens, after

    def copy_to(self, other: "Run", count: int) -> None:
        """The bytes of the first `count` pages, as a transfer would move them: segment by segment, to other ids."""
        for mine, theirs in zip(self.pages[:count], other.pages[:count], strict=True):
            for group in Group:
                moved = zip(self.pool.group_bytes(mine, group), other.pool.group_bytes(theirs, group), strict=True)
                for source, target in moved:
                    target[:] = source
