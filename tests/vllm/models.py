"""Tiny models as checkpoint directories: random weights, seeded, in safetensors; a tokenizer of one word a token.

Guarantees: weights are large enough that tokens depend on every page of the prompt, so that a wrong page shows.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **_COMMON}
MLA = {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "first_k_dense_replace": 4,
    **_COMMON,
}


def make(directory: Path, config: dict[str, object], seed: int = 0) -> Path:
    """The same bytes for the same arguments."""
    torch.manual_seed(seed)
    kind = str(config["model_type"])
    rest = {name: value for name, value in config.items() if name != "model_type"}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest))
    made.to(torch.float32).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2").save_pretrained(
        directory
    )
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"torch_dtype": "float32"}))
    return directory


def adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter of `LLAMA` that changes keys and values of all layers; the same bytes for the same seed."""
    directory.mkdir(parents=True)
    made = torch.Generator().manual_seed(seed)
    width, rank, heads = int(str(LLAMA["hidden_size"])), 8, {"k_proj": 128, "v_proj": 128}
    weights = {}
    for layer in range(int(str(LLAMA["num_hidden_layers"]))):
        for name, out in heads.items():
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{of}.lora_A.weight"] = torch.randn((rank, width), generator=made)
            weights[f"{of}.lora_B.weight"] = torch.randn((out, rank), generator=made)
    save_file(weights, directory / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(heads), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(said))
    return directory
