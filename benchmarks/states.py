"""Layers with a state (delta rule, KDA, Mamba-2, short convolution): memory of a sequence, and how exact logprobs are.

    python -m benchmarks.states

The first table is arithmetic from the shapes of released models. For the second, random models of four to eight layers sample in
float32 and bfloat16; their logprobs are compared with the trainer's and with those of plain transformers in float64, on the same
tokens and weights.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz
import numpy as np
import numpy.typing as npt
import tinker
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from benchmarks.architecture_parts import VOCABULARY
from benchmarks.architectures import copy_tokenizer, load_plain
from benchmarks.config import CommonConfig, environment, run_benchmark
from benchmarks.gpu.models import PROBED_TOKENS, sharpness
from benchmarks.workload import random_tokens
from tinker_cookbook import backends
from tinker_cookbook.models.shapes import shapes_of
from tinker_cookbook.utils.misc_utils import markdown_table
from tinker_local_backend import ServiceClient
from tinker_local_backend.engine.engine import DEFAULT_KV_BYTES_CPU

# Copied from their config.json files: moonshotai/Kimi-Linear-48B-A3B-Instruct and LiquidAI/LFM2-1.2B.
_KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "layer_types": [*(["linear_attention"] * 3 + ["full_attention"]) * 6, *["linear_attention"] * 2, "full_attention"],
}
"""All other fields have transformers' defaults, which are those of this model."""
_LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
}
_KNOWN = (
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-35B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)
RELEASED: dict[str, dict[str, Any]] = {
    **{name: shapes for name in _KNOWN if (shapes := shapes_of(name)) is not None},
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": _KIMI_LINEAR,
    "LiquidAI/LFM2-1.2B": _LFM2,
}

_COMMON_FIELDS = {
    "vocab_size": VOCABULARY,
    "eos_token_id": 1513,
    "pad_token_id": 1511,
    "bos_token_id": None,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.04,
    "tie_word_embeddings": False,
}
_MIXED = {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
SMALL: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_5_text": {
        **_MIXED,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    },
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 1,
    },
    "lfm2": {"layer_types": [*["conv"] * 3, "full_attention"]},
    "kimi_linear": {
        **_MIXED,
        "head_dim": None,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "mlp_layer_types": ["dense"] * 4,
    },
}
"""Random models by model type; the first has no state, for comparison with the others."""

DTYPES = ("float32", "bfloat16")
SAMPLES, NEW_TOKENS = 4, 64
PROMPTS = (20, 45, 70, 100)
"""tokens of each"""

Logprobs = npt.NDArray[np.float64]


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m benchmarks.states`."""

    threads: int = chz.field(default=1, doc="CPU threads", validator=chz.validators.gt(0))


def state_bytes(config: PreTrainedConfig) -> int:
    """Bytes of a sequence's state, with weights in bfloat16."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return backends.state_bytes(model, config)


def kv_bytes(config: Any) -> int:
    """Bytes of a token's keys and values in bfloat16; latent attention is cached expanded."""
    layers = list(getattr(config, "layers_block_type", None) or config.layer_types).count("full_attention")
    if getattr(config, "kv_lora_rank", None):
        return (
            layers
            * config.num_attention_heads
            * 2
            * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return layers * config.num_key_value_heads * 2 * 2 * head


def cost_table() -> list[list[str]]:
    """Memory that a sequence of each released model needs."""
    rows = [
        ["model", "state of a sequence", "KV cache of a token", "as much as tokens", "at once in 2 GiB", "in 32 GiB"]
    ]
    for name, shapes in RELEASED.items():
        config: Any = AutoConfig.for_model(**shapes)
        state, kv = state_bytes(config), kv_bytes(config)
        at_once = [min(512, max(8, space // state) // 2) for space in (DEFAULT_KV_BYTES_CPU, 32 << 30)]
        shown = f"{state / 2**20:.1f} MiB" if state >= 2**20 else f"{state / 2**10:.0f} KiB"
        rows.append([name, shown, f"{kv / 2**10:.0f} KiB", f"{state / kv:,.0f}", *map(str, at_once)])
    return rows


def write_model(model_type: str, folder: Path, changed: Mapping[str, Any]) -> Any:
    """A random model whose next token has an entropy like a trained one's; `changed`: fields of its config that differ from the
    common ones. Returns it in float64.

    bfloat16 represents its weights exactly, so what is compared differs in arithmetic only.
    """
    fields = {**_COMMON_FIELDS, **changed}
    fields = {key: value for key, value in fields.items() if value is not None or key == "bos_token_id"}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32)
        tokens = torch.tensor([random_tokens(VOCABULARY, PROBED_TOKENS, 0)])
        model.get_output_embeddings().weight.mul_(sharpness(model.eval()(tokens, use_cache=False).logits[0]))
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return load_plain(folder)


def logprobs_of_samples(folder: Path, home: Path, plain: Any) -> tuple[Logprobs, Logprobs, Logprobs]:
    """Logprobs of the same sampled tokens: the sampler's, the trainer's, and those of plain transformers."""
    collected: tuple[list[float], list[float], list[float]] = ([], [], [])
    with ServiceClient(home=home) as service:
        trainer = service.create_lora_training_client(str(folder), rank=4, seed=0).result()
        sampler = service.create_sampling_client(base_model=str(folder)).result()
        for length in PROMPTS:
            prompt = random_tokens(VOCABULARY - 40, length, seed=length)
            params = tinker.SamplingParams(max_tokens=NEW_TOKENS, seed=0, stop=[])
            response = sampler.sample(tinker.ModelInput.from_ints(prompt), SAMPLES, params).result()
            data = [_datum([*prompt, *sequence.tokens]) for sequence in response.sequences]
            scored = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
            for sequence, output in zip(response.sequences, scored, strict=True):
                assert sequence.logprobs is not None
                collected[0].extend(sequence.logprobs)
                collected[1].extend(output["logprobs"].to_numpy()[length - 1 :].tolist())
                collected[2].extend(_plain_logprobs(plain, [*prompt, *sequence.tokens])[length - 1 :])
    sampled, trained, exact = (np.array(values, dtype=np.float64) for values in collected)
    return sampled, trained, exact


def _datum(tokens: Sequence[int]) -> tinker.Datum:
    inputs = {
        "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
        "weights": tinker.TensorData.from_numpy(np.ones(len(tokens) - 1, dtype=np.float32)),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


@torch.no_grad()
def _plain_logprobs(plain: Any, tokens: Sequence[int]) -> list[float]:
    ids = torch.tensor([list(tokens)])
    return plain(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()


def error_rows(model_type: str) -> list[list[str]]:
    """A row for each dtype."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="tinker-states-") as name:
        folder = Path(name)
        plain = write_model(model_type, folder / "model", SMALL[model_type])
        for dtype in DTYPES:
            with environment(CommonConfig(dtype=dtype, threads=torch.get_num_threads())):
                sampled, trained, exact = logprobs_of_samples(folder / "model", folder / dtype, plain)
            pairs = ((sampled, trained), (sampled, exact), (trained, exact))
            rows.append(
                [
                    model_type,
                    dtype,
                    *(spread(one - other) for one, other in pairs),
                    f"{(sampled - trained).mean():.0e}",
                ]
            )
    return rows


def spread(differences: Logprobs) -> str:
    sizes = np.abs(differences)
    return f"{sizes.mean():.0e} / {np.quantile(sizes, 0.999):.0e}"


def main(config: Config) -> None:
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    print(f"{markdown_table(cost_table())}\n", flush=True)
    head = ["model type", "dtype", "sampler and trainer", "sampler and exact", "trainer and exact", "KL v1"]
    print(markdown_table([head, *(row for model_type in SMALL for row in error_rows(model_type))]))


if __name__ == "__main__":
    run_benchmark(main)
