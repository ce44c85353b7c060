"""The same requests in one process, in a thread of this one, while the fleet serves them.

Guarantees: requests run one after the other in the order they were asked for, with the fleet's chunk size and number
of threads, and draft as it does, so that every forward has the shapes it has there.
"""

from __future__ import annotations

import torch

from pdkv.adapters.reference.engine import ReferenceEngine
from pdkv.adapters.reference.monolith import Monolith, MonolithAnswer
from pdkv.cli.assemble import contract_of, drafter_of, model_of
from pdkv.config import PrefillConfig
from pdkv.geometry.page_layout import page_format
from pdkv.ids import UInt32Array
from pdkv.kvcache.pool import SlotPool
from pdkv.node.flow import Worker
from pdkv.node.messages import Sampling


class Reference:
    """Answers of one process. `ask` may be called before the model is loaded; answers come in order."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._worker = Worker("reference")
        self._monolith: Monolith | None = None

    async def ask(self, tokens: UInt32Array, sampling: Sampling) -> MonolithAnswer:
        return await self._worker.run(self._answer, tokens, sampling)

    def close(self) -> None:
        self._worker.close()

    def _answer(self, tokens: UInt32Array, sampling: Sampling) -> MonolithAnswer:
        self._monolith = self._monolith or self._load()
        return self._monolith.generate(tokens, sampling)

    def _load(self) -> Monolith:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        model = model_of(self._config)
        fmt = page_format(model.shape, main_row=self._config.main_row)
        pool = SlotPool.create(fmt, self._config.total_pages(fmt.page_bytes))
        contract = contract_of(self._config, model, fmt)
        engine = ReferenceEngine(model, pool)
        drafter = drafter_of(self._config, contract, model, engine)
        return Monolith(engine, pool, contract, self._config.chunk_tokens, drafter)
