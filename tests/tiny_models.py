"""Tiny random models of real architectures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 4}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mamba": ("mamba", {"state_size": 4}),
    "bert": ("bert", {}),
    "stablelm": ("stablelm", {}),
    "phimoe-window": (
        "phimoe",
        {"sliding_window": 4096, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        },
    ),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 12, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "first_k_dense_replace": 1,
        },
    ),
}
"""Models that do not pack, are no causal models, or of which one test asks one thing."""


def tiny(
    name: str = "llama",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    layers: int = 2,
    **changes: Any,
) -> nn.Module:
    """A random model of this architecture.

    Weights are large enough for a leak between sequences to show. layers: one where it is not the
    model that is looked at, as that halves what a step takes.
    """
    kind, settings = (ARCHITECTURES | OTHERS)[name]
    # GPT-2 has two names for it
    depth = dict.fromkeys({"num_hidden_layers", "n_layer"} & (SMALL | settings).keys(), layers)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(SMALL | settings | depth | changes))
    # which SDPA, the default of transformers 5.17, leaves out
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.mul_(5)
    return model.to(dtype).eval()
