"""Configurations of tiny models of many families: those whose KV can be fused, and those that are
refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import pytest

VOCABULARY = 256
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD = {"hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None}
GPT = dict(n_embd=64, n_layer=4, n_head=4, **OLD)
SHORT = {"sliding_window": 20}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MPT = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 4,
    "max_seq_len": 512,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
SMALL_STATE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

# Name -> (model type, what differs from BASE); all of them can be fused.
FAMILIES = MappingProxyType(
    {
        "llama": ("llama", {}),
        "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
        "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        "llama-yarn": ("llama", {"rope_scaling": YARN}),
        "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
        "mistral-window": ("mistral", SHORT),
        "mixtral": ("mixtral", {"num_local_experts": 4}),
        "qwen2": ("qwen2", {}),
        "qwen2-window": ("qwen2", dict(use_sliding_window=True, max_window_layers=2, **SHORT)),
        "qwen3": ("qwen3", {}),
        "qwen3-moe": ("qwen3_moe", dict(moe_intermediate_size=32, **EXPERTS)),
        "gemma": ("gemma", {"head_dim": 16}),
        "gemma2-softcap-window": ("gemma2", dict(head_dim=16, query_pre_attn_scalar=16, **SHORT)),
        "gemma3-two-ropes": (
            "gemma3_text",
            dict(head_dim=16, query_pre_attn_scalar=16, num_hidden_layers=7, **SHORT),
        ),
        "phi-partial": ("phi", {"num_key_value_heads": 4}),
        "phi3-window": ("phi3", SHORT),
        "phimoe": ("phimoe", {"num_local_experts": 4}),
        "falcon": ("falcon", {"num_kv_heads": 1, "multi_query": True, "alibi": False}),
        "falcon-alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False}),
        "bloom-alibi": (
            "bloom",
            {"n_layer": 4, "n_head": 4, "num_hidden_layers": None, "num_attention_heads": None},
        ),
        "mpt-alibi": ("mpt", {**OLD, **MPT}),
        "gpt-neox-partial": ("gpt_neox", {"rotary_pct": 0.25}),
        "stablelm-partial": ("stablelm", {}),
        "persimmon-partial": ("persimmon", {}),
        "nemotron-partial": ("nemotron", {}),
        "glm-interleaved": ("glm", {"head_dim": 16}),
        "glm4-interleaved": ("glm4", {"head_dim": 16}),
        "cohere-interleaved": ("cohere", {}),
        "cohere2-some-nope-window": ("cohere2", SHORT),
        "ernie-interleaved": ("ernie4_5", {}),
        "smollm3-some-nope": ("smollm3", {}),
        "exaone4-some-nope-window": ("exaone4", SHORT),
        "olmo": ("olmo", {}),
        "olmo2": ("olmo2", {}),
        "olmo3-window": ("olmo3", SHORT),
        "olmoe": ("olmoe", EXPERTS),
        "granite": ("granite", {"attention_multiplier": 0.25}),
        "starcoder2-window": ("starcoder2", SHORT),
        "gpt-oss-sinks-window": (
            "gpt_oss",
            dict(num_local_experts=4, head_dim=16, rope_scaling=None, **SHORT),
        ),
        "deepseek-latent": ("deepseek_v3", MLA),
        "seed-oss": ("seed_oss", {"head_dim": 16}),
        "arcee": ("arcee", {}),
        "apertus": ("apertus", {}),
        "doge": ("doge", {}),
        "bitnet": ("bitnet", {}),
        "jetmoe": ("jetmoe", {}),
    }
)
REFUSED = MappingProxyType(
    {
        "gpt2": ("gpt2", GPT, "the hidden states"),
        "opt": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, "the hidden states"),
        "gpt-bigcode": ("gpt_bigcode", GPT, "the hidden states"),
        "xglm": (
            "xglm",
            {"d_model": 64, "attention_heads": 4, "num_layers": 4, "ffn_dim": 128},
            "the hidden states",
        ),
        "gptj": ("gptj", dict(rotary_dim=8, **GPT), "rotation"),
        "codegen": ("codegen", dict(rotary_dim=8, **GPT), "rotation"),
        "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}, "rotation"),
        "llama-dynamic": (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic'",
        ),
        "phi3-longrope": (
            "phi3",
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "long_factor": [2.0] * 8,
                    "short_factor": [1.0] * 8,
                    "factor": 2.0,
                    "original_max_position_embeddings": 256,
                }
            },
            "'longrope'",
        ),
        "mamba": ("mamba", {}, "linear_attention"),
        "qwen3-next": ("qwen3_next", SMALL_STATE, "linear_attention"),
        "llama4": ("llama4_text", {"num_local_experts": 2}, "chunked_attention"),
    }
)

STATE = {"mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_n_heads": 8}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXED = ["linear_attention", "full_attention"] * 2
# Name -> (model type, what differs from BASE, what the reason says, what it goes on with behind a
# kept state)
HYBRIDS = MappingProxyType(
    {
        "qwen3.5": (
            "qwen3_5_text",
            {**DELTA, "full_attention_interval": 2},
            "linear_attention",
            "run",
        ),
        "olmo-hybrid": ("olmo_hybrid", {"layer_types": MIXED}, "linear_attention", "run"),
        "bamba": (
            "bamba",
            {"attn_layer_indices": [1, 3], "mamba_chunk_size": 16, **STATE},
            "linear_attention",
            "run",
        ),
        "granite-hybrid": (
            "granitemoehybrid",
            {
                "layer_types": ["mamba", "attention"] * 2,
                "num_local_experts": 0,
                "shared_intermediate_size": 64,
                **STATE,
            },
            "linear_attention",
            "run",
        ),
        "lfm2": (
            "lfm2",
            {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
            "conv",
            "run",
        ),
        "falcon-h1-both-in-a-layer": (
            "falcon_h1",
            {**STATE, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_chunk_size": 16},
            "standard cache",
            "run",
        ),
        "jamba": (
            "jamba",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
            "linear_attention",
            "whole",
        ),
        "minimax": (
            "minimax",
            {"num_local_experts": 2, "layer_types": MIXED, "block_size": 16},
            "linear_attention",
            "whole",
        ),
        "recurrent-gemma": (
            "recurrent_gemma",
            {
                "block_types": ["recurrent", "attention"],
                "lru_width": 64,
                "attention_window_size": 64,
                "head_dim": 16,
            },
            "linear_attention",
            "whole",
        ),
    }
)
"""Models with a state beside KV, or in its place."""

USUAL = frozenset(
    {
        "llama",
        "qwen3",
        "phi3-window",
        "llama-one-kv-head",
        "gemma3-two-ropes",
        "gemma2-softcap-window",
        "gpt-oss-sinks-window",
        "falcon-alibi",
        "mpt-alibi",
        "gptj",
        "gpt2",
        "mamba",
        "llama4",
    }
)
"""One of each way to hold KV, to place it and to attend: those of every run, where a test takes
long.
"""


def all_when_slow(names: Iterable[str]) -> list[Any]:
    """Families as parameters: the usual ones in every run, the others in slow ones."""
    return [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in names]
