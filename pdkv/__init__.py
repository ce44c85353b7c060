"""KV transfer for prefill/decode disaggregated LLM serving.

Importing the package needs neither torch, nixl nor transformers: a planner has only a `config.json`.
"""

__version__ = "0.1.0"
