"""Mixtures of experts: how far the trainer's logprobs are from the sampler's, with routing replay and without.

    python -m benchmarks.routes

Random models of four layers sample in float32 and bfloat16, and the trainer scores the same tokens with the same weights: with
loss_fn_config.route_replay=1 each goes to the experts that it went to when it was sampled.
"""

import tempfile
from pathlib import Path
from typing import Any

import chz
import numpy as np
import tinker
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.architecture_parts import VOCABULARY
from benchmarks.config import CommonConfig, environment, run_benchmark
from benchmarks.ours import sampled_datum
from benchmarks.states import DTYPES, NEW_TOKENS, PROMPTS, SAMPLES, Logprobs, spread, write_model
from benchmarks.workload import random_tokens
from tinker_cookbook.utils.misc_utils import markdown_table
from tinker_local_backend import ServiceClient

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 64}
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "num_experts": 16, "norm_topk_prob": True},
    "gpt_oss": {"num_experts_per_tok": 4, "num_local_experts": 16, "intermediate_size": 64},
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}
"""Random models by model type."""


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m benchmarks.routes`."""

    threads: int = chz.field(default=1, doc="CPU threads", validator=chz.validators.gt(0))


def differences(folder: Path, home: Path) -> tuple[Logprobs, Logprobs]:
    """Sampled minus trained logprobs of the same tokens, without replay and with it."""
    collected: tuple[list[float], list[float]] = ([], [])
    with ServiceClient(home=home) as service:
        client = service.create_lora_training_client(str(folder), rank=4, seed=0).result()
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        for length in PROMPTS:
            prompt = random_tokens(VOCABULARY - 40, length, seed=length)
            params = tinker.SamplingParams(max_tokens=NEW_TOKENS, seed=0, stop=[])
            response = sampler.sample(tinker.ModelInput.from_ints(prompt), SAMPLES, params).result()
            data = [sampled_datum(prompt, sequence, 1.0) for sequence in response.sequences]
            for replay, values in enumerate(collected):
                scored = client.forward(data, "importance_sampling", {"route_replay": replay}).result().loss_fn_outputs
                for datum, output in zip(data, scored, strict=True):
                    sampled, trained = datum.loss_fn_inputs["logprobs"].to_numpy(), output["logprobs"].to_numpy()
                    values.extend((sampled - trained)[length - 1 :].tolist())
    without, replayed = (np.array(values, dtype=np.float64) for values in collected)
    return without, replayed


def rows_of(model_type: str) -> list[list[str]]:
    """A row for each dtype."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="tinker-routes-") as name:
        folder = Path(name)
        write_model(model_type, folder / "model", SMALL[model_type])
        for dtype in DTYPES:
            with environment(CommonConfig(dtype=dtype, threads=torch.get_num_threads())):
                without_and_with = differences(folder / "model", folder / dtype)
            cells = [cell for values in without_and_with for cell in (spread(values), f"{values.mean():.0e}")]
            rows.append([model_type, dtype, *cells])
    return rows


def main(config: Config) -> None:
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    head = ["model type", "dtype", "sampler and trainer", "KL v1", "with replay", "KL v1 with replay"]
    print(markdown_table([head, *(row for model_type in SMALL for row in rows_of(model_type))]))


if __name__ == "__main__":
    run_benchmark(main)
