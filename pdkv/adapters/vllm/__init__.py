"""vLLM as a pdkv node: `--kv-transfer-config '{"kv_connector": "PdkvConnector", "kv_connector_module_path":
"pdkv.adapters.vllm", …}'`. Guarantees: vLLM is imported only when the connector is asked for; a version that this
wasn't tested with is refused by name, before anything is imported that it may not have.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "PdkvConnector":
        from pdkv.adapters.vllm.facts import require_supported

        require_supported(import_module("vllm").__version__)
        from pdkv.adapters.vllm.connector import PdkvConnector

        return PdkvConnector
    raise AttributeError(f"module {__name__} has no attribute {name}")
