"""vLLM as a pdkv node: `--kv-transfer-config '{"kv_connector": "PdkvConnector", "kv_connector_module_path":
"pdkv.adapters.vllm", …}'`. Guarantees: vLLM is imported only when the connector is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "PdkvConnector":
        from pdkv.adapters.vllm.connector import PdkvConnector

        return PdkvConnector
    raise AttributeError(f"module {__name__} has no attribute {name}")
