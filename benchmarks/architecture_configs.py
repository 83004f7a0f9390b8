"""Small configs of decoder-only architectures that transformers knows, each with what makes it different switched on.

Windows are shorter than the sequences that are compared, soft caps and scales are far from neutral, and heads are tied or not as
in the released models: whatever the engine left out would show.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCABULARY, CONTEXT, WINDOW = 1536, 256, 8

_IDS = {"vocab_size": VOCABULARY, "eos_token_id": 1513, "pad_token_id": 1511, "bos_token_id": None}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}
_ALL_HEADS = {**_LLAMA, "num_key_value_heads": 4}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT_DENSE = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    **_LATENT_DENSE,
}
_SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": CONTEXT // 4,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {**_LLAMA, "sliding_window": WINDOW, "head_dim": 12},
    "ministral": {**_LLAMA, **_SLIDING},
    "ministral3": {**_LLAMA, "head_dim": 16},
    "qwen2": {**_LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {**_LLAMA, "tie_word_embeddings": True, "head_dim": 16},
    "gemma": {**_LLAMA, "head_dim": 16},
    "gemma2": {
        **_LLAMA,
        **_SLIDING,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 4,
    },
    "gemma3_text": {**_LLAMA, **_SLIDING, "query_pre_attn_scalar": 4},
    "gemma3n_text": {**_LLAMA, **_SHARED_KV, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.5]},
    "gemma4_text": {**_LLAMA, **_SHARED_KV},
    "vaultgemma": {**_LLAMA, **_SLIDING, "final_logit_softcapping": 2.0},
    "smollm3": {**_LLAMA, "no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "olmo": {**_LLAMA, "clip_qkv": 0.5},
    "olmo2": _LLAMA,
    "olmo3": {**_LLAMA, **_SLIDING},
    "granite": {
        **_LLAMA,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 8.0,
    },
    "cohere": {**_LLAMA, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**_LLAMA, **_SLIDING, "logit_scale": 0.25},
    "exaone4": {**_LLAMA, **_SLIDING},
    "helium": _LLAMA,
    "seed_oss": {**_LLAMA, "attention_bias": True},
    "arcee": _LLAMA,
    "doge": _LLAMA,
    "granite_swa": {**_LLAMA, **_SLIDING},
    "hyperclovax": _LLAMA,
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "jais2": _LLAMA,
    "diffllama": _LLAMA,
    "apertus": _LLAMA,
    "ernie4_5": {**_LLAMA, "use_bias": True},
    "hunyuan_v1_dense": _LLAMA,
    "nanochat": _LLAMA,
    "starcoder2": {**_LLAMA, "use_bias": True, "sliding_window": WINDOW},
    "stablelm": {**_LLAMA, "partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "nemotron": {**_LLAMA, "partial_rotary_factor": 0.5},
    "glm": {**_LLAMA, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {**_LLAMA, "partial_rotary_factor": 0.5, "attention_bias": True},
    "phi": {**_LLAMA, "partial_rotary_factor": 0.5},
    "phi3": {**_LLAMA, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    "persimmon": {**_ALL_HEADS, "partial_rotary_factor": 0.5},
    "bitnet": _LLAMA,
    "gpt2": {**_GPT2, "attn_pdrop": 0.0},
    "gpt_bigcode": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
        "max_position_embeddings": CONTEXT,
    },
    "gpt_neox": {**_ALL_HEADS, "rotary_pct": 0.25},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "biogpt": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
    },
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": CONTEXT},
    "codegen": {**_GPT2, "rotary_dim": 4, "n_ctx": CONTEXT},
    "gpt_neox_japanese": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_multiple_size": 2,
        "max_position_embeddings": CONTEXT,
    },
    "openai-gpt": _GPT2,
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": CONTEXT},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_LLAMA, **_EXPERTS, "norm_topk_prob": True},
    "olmoe": {**_LLAMA, **_EXPERTS, "intermediate_size": 16},
    "flex_olmo": {**_LLAMA, **_EXPERTS, "intermediate_size": 16},
    "granitemoe": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.5},
    "granitemoeshared": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "phimoe": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **_LLAMA,
        **_SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "rope_parameters": _YARN,
    },
    "glm4_moe": {**_LLAMA, **_ROUTED, "partial_rotary_factor": 0.5},
    "dots1": {**_LLAMA, **_ROUTED},
    "ernie4_5_moe": {
        **_LLAMA,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {**_LLAMA, "num_experts": 4, "moe_topk": 2},
    "minimax_m2": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    "afmoe": {**_LLAMA, **_EXPERTS, "num_dense_layers": 1, "sliding_window": WINDOW, "global_attn_every_n_layers": 2},
    "aria_text": {**_LLAMA, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cohere2_moe": {**_LLAMA, **_EXPERTS, **_SLIDING},
    "exaone_moe": {**_LLAMA, **_ROUTED, **_SLIDING, "num_experts": 4},
    "flint": {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    "granitemoe_swa": {**_LLAMA, **_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": {**_LLAMA, **_EXPERTS},
    "jetmoe": {**_LLAMA, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "kolibri1": {
        **_LLAMA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 16,
    },
    "mellum": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": {**_LLAMA, **_ROUTED, **_SLIDING},
    "minimax_m3_vl_text": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "solar_open": {**_LLAMA, **_ROUTED},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": CONTEXT,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "minicpm3": {**_LLAMA, **_LATENT_DENSE, "head_dim": None},
    "youtu": {**_LLAMA, **_LATENT_DENSE, "head_dim": None},
    "deepseek_v2": {**_LLAMA, **_LATENT, "head_dim": None, "topk_method": "greedy"},
    "deepseek_v3": {**_LLAMA, **_LATENT, "head_dim": None},
    "glm4_moe_lite": {**_LLAMA, **_LATENT, "head_dim": None, "n_shared_experts": 1},
    "deepseek_v32": {**_LLAMA, **_LATENT, "head_dim": None},
    "glm_moe_dsa": {**_LLAMA, **_LATENT, "head_dim": None},
    "hy_v4": {**_LLAMA, **_EXPERTS},
    "qwen3_next": {**_LLAMA, **_EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {**_LLAMA, "layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {**_LLAMA, "attention_window_size": WINDOW, "lru_width": 32},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
"""By transformers' model type."""


def make_config(model_type: str) -> PretrainedConfig:
    """The small config of an architecture."""
    fields = {key: value for key, value in ARCHITECTURES[model_type].items() if value is not None}
    return AutoConfig.for_model(model_type, **{**_IDS, **fields})
