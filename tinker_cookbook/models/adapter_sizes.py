"""The number of parameters of a rank-1 adapter on models with experts or with layers other than attention.

The rules are those of the hosted service, whose published counts they reproduce: a linear layer has inputs + outputs.
For the experts of a layer, the factor on the side of the model's width is shared, and the other is separate for each
expert. Routers, gates with a single output, and the projections out of attention's latent spaces are not adapted.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LoraCount(NamedTuple):
    """Parameters at rank 1, by the options of create_lora_training_client."""

    mlp: int
    attn: int
    unembed: int


class Stated(NamedTuple):
    """Published counts of a model whose shapes are not available in a form that transformers reads."""

    hidden_size: int
    lora: LoraCount


_DEEPSEEK_V4_1_FLASH = Stated(5120, LoraCount(107_673_600, 1_013_760, 134_400))
STATED: dict[str, Stated] = {
    "deepseek-ai/DeepSeek-V4.1-Flash": _DEEPSEEK_V4_1_FLASH,
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": _DEEPSEEK_V4_1_FLASH,
    "moonshotai/Kimi-K3.1-Pro": Stated(7168, LoraCount(766_457_856, 8_040_960, 171_008)),
    "zai-org/GLM-5.3": Stated(6144, LoraCount(121_356_288, 2_920_320, 161_024)),
    "zai-org/GLM-5.3-Flash": Stated(4096, LoraCount(75_755_520, 2_009_088, 158_976)),
    "thinkingmachines/Inkling": Stated(6144, LoraCount(154_705_920, 3_424_256, 207_168)),
    "thinkingmachines/Inkling-Small": Stated(4096, LoraCount(64_503_808, 1_311_744, 205_120)),
    "thinkingmachines/Inkling-2-Small": Stated(4608, LoraCount(128_065_536, 2_347_008, 205_632)),
}
"""Counts published by the hosted service, by hub name."""


def count_lora(config: "PreTrainedConfig") -> LoraCount | None:
    """The counts for a model with the text config `config`; None for an unsupported architecture."""
    rule = _RULES.get(config.model_type)
    if rule is None:
        return None
    mlp, attn = rule(config)
    return LoraCount(mlp, attn, config.hidden_size + config.vocab_size)


def _experts(width: int, inner: int, number: int, matrices: int = 3) -> int:
    return matrices * (width + number * inner)


def _attention(config: Any, query_scale: int = 1) -> int:
    """Queries, keys, values and the output; gated queries have twice the outputs."""
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return (
        (config.hidden_size + query_scale * heads) + 2 * (config.hidden_size + kv_heads) + (heads + config.hidden_size)
    )


def _qwen3_moe(config: Any) -> tuple[int, int]:
    layers = config.num_hidden_layers
    number = getattr(config, "num_experts", None) or config.num_local_experts
    experts = _experts(config.hidden_size, config.moe_intermediate_size, number)
    return layers * experts, layers * _attention(config)


def _gpt_oss(config: Any) -> tuple[int, int]:
    layers = config.num_hidden_layers
    experts = _experts(config.hidden_size, config.intermediate_size, config.num_local_experts)
    return layers * experts, layers * _attention(config)


def _qwen3_5(config: Any) -> tuple[int, int]:
    """The gated delta rule has queries, keys, values, a gate as wide as the values, and the output."""
    hidden = config.hidden_size
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    per_kind = {
        "linear_attention": 2 * (hidden + keys) + 3 * (hidden + values),
        "full_attention": _attention(config, query_scale=2),
    }
    attn = sum(per_kind[kind] for kind in config.layer_types)
    if config.model_type == "qwen3_5_text":
        return config.num_hidden_layers * _experts(hidden, config.intermediate_size, 1), attn
    routed = _experts(hidden, config.moe_intermediate_size, config.num_experts)
    shared = _experts(hidden, config.shared_expert_intermediate_size, 1)
    return config.num_hidden_layers * (routed + shared), attn


def _deepseek_v3(config: Any) -> tuple[int, int]:
    """For latent attention the projections into both latent spaces and the output."""
    hidden, layers, dense = config.hidden_size, config.num_hidden_layers, config.first_k_dense_replace
    routed = _experts(hidden, config.moe_intermediate_size, config.n_routed_experts)
    shared = _experts(hidden, config.moe_intermediate_size * config.n_shared_experts, 1)
    attn = (hidden + config.q_lora_rank) + (hidden + config.kv_lora_rank + config.qk_rope_head_dim)
    attn += config.num_attention_heads * config.v_head_dim + hidden
    return dense * _experts(hidden, config.intermediate_size, 1) + (layers - dense) * (routed + shared), layers * attn


def _nemotron_h(config: Any) -> tuple[int, int]:
    """Experts with two matrices, behind a projection to a narrower space and back if the model has one. For Mamba the
    gate, the input and the output.
    """
    hidden, kinds = config.hidden_size, config.layers_block_type
    latent = config.moe_latent_size or 0
    moe = _experts(latent or hidden, config.moe_intermediate_size, config.n_routed_experts, matrices=2)
    moe += _experts(hidden, config.moe_shared_expert_intermediate_size, 1, matrices=2)
    if latent:
        moe += 2 * (hidden + latent)
    mamba = 3 * (hidden + config.mamba_num_heads * config.mamba_head_dim)
    attention = kinds.count("full_attention") * _attention(config)
    return kinds.count("moe") * moe, kinds.count("linear_attention") * mamba + attention


_RULES: dict[str, Callable[[Any], tuple[int, int]]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "nemotron_h": _nemotron_h,
}
