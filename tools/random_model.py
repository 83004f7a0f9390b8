"""Makes a small model of any architecture with random weights and the shipped tokenizer, for tests and trials on a CPU.

    python -m tools.random_model architecture=qwen3_5_text folder=/tmp/qwen3_5
    python -m tools.random_model architecture=nemotron_h folder=/tmp/nemotron hidden_size=64 layers=8 seed=1
    python -m tools.random_model architecture=gemma2 folder=/tmp/gemma2 fields='{"sliding_window": 64}'

It is untrained: `recipes.sl_basic model_name=/tmp/qwen3_5` teaches it to chat. The same settings and seed give the same weights
on the same machine.
"""

import json
from collections.abc import Callable
from typing import Any

import chz
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tinker_cookbook.backends import why_not_local
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.exceptions import ConfigurationError
from tools.make_tiny_model.folder import check_replaceable, write_folder
from tools.make_tiny_model.tokenizer import CONTEXT_LENGTH, PAD, STOP, token_id

HEAD = 32
"""Head size of queries, keys and values, also in layers with a state."""

INITIALIZER_RANGE = 0.04
"""As in the shipped models: with the 0.02 of large models, a narrow model barely distinguishes its tokens."""


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m tools.random_model`."""

    architecture: str = chz.field(
        doc="model type of transformers, of a text model: qwen3_5_text, nemotron_h, lfm2, llama"
    )
    folder: str = chz.field(doc="folder to write; an older model there is replaced")
    hidden_size: int = chz.field(default=96, doc="width, a multiple of 32")
    layers: int = chz.field(
        default=4, doc="number of layers, 2 or more; in models with states every fourth has full attention"
    )
    seed: int = chz.field(default=0, doc="seed of the weights")
    fields: str = chz.field(default="{}", doc="further fields of the config, as a JSON object; they take precedence")

    @chz.validate
    def _sizes(self) -> None:
        if self.hidden_size < HEAD or self.hidden_size % HEAD:
            raise ConfigurationError(f"hidden_size={self.hidden_size}: must be a multiple of {HEAD}")
        if self.layers < 2:
            raise ConfigurationError(f"layers={self.layers}: must be 2 or more")


def layer_types(layers: int, with_state: str) -> list[str]:
    """Every fourth layer and the last one have full attention."""
    return ["full_attention" if i % 4 == 3 or i == layers - 1 else with_state for i in range(layers)]


def _common_fields(hidden: int, layers: int) -> dict[str, Any]:
    """Fields with the names of most decoders, with two query heads per key head if the width allows it."""
    heads = hidden // HEAD
    return {
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "head_dim": HEAD,
    }


def _experts(hidden: int) -> dict[str, Any]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}


def _delta(hidden: int, layers: int) -> dict[str, Any]:
    heads = hidden // HEAD
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "layer_types": layer_types(layers, "linear_attention"),
    }


def _routed_delta(hidden: int, layers: int) -> dict[str, Any]:
    return {**_delta(hidden, layers), **_experts(hidden), "shared_expert_intermediate_size": hidden}


def _kimi_linear(hidden: int, layers: int) -> dict[str, Any]:
    heads = hidden // HEAD
    return {
        **_experts(hidden),
        "num_key_value_heads": heads,
        "head_dim": None,
        "kv_lora_rank": HEAD,
        "qk_rope_head_dim": HEAD // 2,
        "qk_nope_head_dim": HEAD,
        "v_head_dim": HEAD,
        "linear_num_heads": heads,
        "linear_head_dim": HEAD,
        "layer_types": layer_types(layers, "linear_attention"),
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
    }


def _nemotron_h(hidden: int, layers: int) -> dict[str, Any]:
    """Mamba, MLP, attention and mixture of experts are separate layers."""
    kinds = ["linear_attention", "mlp", "full_attention", "mlp"]
    return {
        "num_hidden_layers": None,
        "layers_block_type": [kinds[i % len(kinds)] for i in range(layers)],
        "mamba_num_heads": 2 * hidden // HEAD,
        "mamba_head_dim": HEAD,
        "ssm_state_size": HEAD,
        "n_groups": 1,
        "chunk_size": 64,
        "n_routed_experts": 4,
        "moe_intermediate_size": hidden,
        "moe_shared_expert_intermediate_size": hidden,
    }


def _lfm2(hidden: int, layers: int) -> dict[str, Any]:
    return {"layer_types": layer_types(layers, "conv")}


FIELDS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": lambda hidden, layers: {**_lfm2(hidden, layers), **_experts(hidden), "num_dense_layers": 1},
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _delta,
    "qwen3_5_moe_text": _routed_delta,
    "qwen3_5_text": _delta,
    "qwen3_moe": lambda hidden, layers: _experts(hidden),
    "qwen3_next": _routed_delta,
}
"""Architecture -> its fields in addition to the common ones; None removes one."""


def make_config(config: CLIConfig, tokenizer: Any) -> Any:
    """transformers' config. Raises ConfigurationError if transformers does not know it or the engine does not support it."""
    if config.architecture not in CONFIG_MAPPING:
        raise ConfigurationError(f"architecture={config.architecture!r}: transformers has no such model type")
    try:
        given: Any = json.loads(config.fields)
    except ValueError as error:
        raise ConfigurationError(f"fields={config.fields!r}: is not JSON ({error})") from error
    if not isinstance(given, dict):
        raise ConfigurationError(f"fields={config.fields!r}: must be a JSON object, such as '{{\"num_experts\": 8}}'")
    special = FIELDS.get(config.architecture, lambda hidden, layers: {})(config.hidden_size, config.layers)
    fields: dict[str, Any] = {
        **_common_fields(config.hidden_size, config.layers),
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": True,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": token_id(tokenizer, STOP),
        "pad_token_id": token_id(tokenizer, PAD),
        **special,
        **given,
    }
    made = AutoConfig.for_model(
        config.architecture, **{key: v for key, v in fields.items() if v is not None or key == "bos_token_id"}
    )
    if (refusal := why_not_local(config.folder, made)) is not None:
        raise ConfigurationError(f"architecture={config.architecture!r}: {refusal}")
    return made


def main(config: CLIConfig) -> None:
    check_replaceable(config.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(shipped_model("tiny_chat"))
    made = make_config(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    # A renderer is usually chosen by the model type, but this model has the chat template of tiny_chat.
    tokenizer.init_kwargs["recommended_renderer"] = "qwen3_instruct"
    with write_folder(model, tokenizer, config.folder):
        pass
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{config.architecture} of {parameters:,} parameters, written to {config.folder}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
