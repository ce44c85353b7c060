"""Hands on an engine's memory behind its back, by vLLM's own `--worker-extension-cls`: its methods are called through
`/collective_rpc`, in the worker's process.
"""

from __future__ import annotations

from typing import Any


class Damage:
    """What a worker can be told besides."""

    model_runner: Any

    def negate_block(self, number: str) -> dict[str, int]:
        """Of every layer, every value of a block changes its sign. Returns how many layers."""
        layers = self.model_runner.kv_caches
        for tensor in layers:
            tensor[int(number)].neg_()
        return {"layers": len(layers)}
