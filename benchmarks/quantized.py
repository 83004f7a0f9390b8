"""Quantised weights: memory of models on a GPU, and difference of sampler and trainer (docs/models.md).

    python -m benchmarks.quantized

The first table is computed from the shapes of released models, by the engine's own functions. For the second, a random model of
four layers samples with each value of TINKER_LOCAL_QUANTIZATION, and the trainer scores the samples. It needs the extra
`quantized`.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chz
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.config import CommonConfig, environment, run_benchmark
from benchmarks.states import DTYPES, Logprobs, logprobs_of_samples, write_model
from tinker_cookbook.models.shapes import shapes_of
from tinker_cookbook.utils.misc_utils import markdown_table
from tinker_local_backend.engine.model.footprint import Footprint, footprint
from tinker_local_backend.engine.model.memory_plan import RANK, of_card
from tinker_local_backend.engine.model.quantization import VARIABLE

MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B",
    "Qwen/Qwen3-30B-A3B",
)
CARDS = (24, 48, 80, 141)
MADE = ("nf4", "int8", "fp8")


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m benchmarks.quantized`."""

    threads: int = chz.field(default=1, doc="CPU threads", validator=chz.validators.gt(0))


def footprint_of(name: str, quantization: str | None) -> Footprint:
    """Footprint of a released model, created on the meta device in bfloat16."""
    shapes = shapes_of(name)
    assert shapes is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shapes), dtype=torch.bfloat16)
    return footprint(model, quantization, RANK)


def cell(size: Footprint, gib: int) -> str:
    """Tokens of the KV cache, and of the longest sequence in training; "-" if the model does not fit."""
    plan = of_card(gib, size)
    return "-" if plan.missing else f"{plan.kv_tokens // 1000:,}k / {plan.longest_tokens // 1000:,}k"


def memory_table() -> list[list[str]]:
    """A row for each model and format: its weights, and what fits next to them."""
    rows = [["model", "weights", "GiB", *(f"{gib} GB" for gib in CARDS)]]
    for name in MODELS:
        for quantization in (None, "int8", "nf4"):
            size = footprint_of(name, quantization)
            cells = [cell(size, gib) for gib in CARDS]
            rows.append([name, quantization or "bfloat16", f"{size.weights / 2**30:.1f}", *cells])
    return rows


@contextmanager
def quantization(value: str) -> Iterator[None]:
    """Inside the context models are loaded with this value of TINKER_LOCAL_QUANTIZATION."""
    before = os.environ.pop(VARIABLE, None)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def kl_of(sampled: Logprobs, trained: Logprobs) -> tuple[float, float]:
    """KL of the sampler from the trainer: the mean of sampled minus trained, and an estimate that is never negative."""
    difference = sampled - trained
    return float(difference.mean()), float((np.expm1(-difference) + difference).mean())


def kl_rows() -> list[list[str]]:
    """A row for each format and dtype."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="tinker-quantized-") as name:
        plain = write_model("qwen3", Path(name) / "model", {})
        for made in ("none", *MADE):
            for dtype in DTYPES:
                common = CommonConfig(dtype=dtype, threads=torch.get_num_threads())
                with environment(common), quantization(made):
                    home = Path(name) / f"{made}-{dtype}"
                    sampled, trained, exact = logprobs_of_samples(Path(name) / "model", home, plain)
                mean, estimate = kl_of(sampled, trained)
                largest = np.abs(sampled - trained).max()
                lost = kl_of(sampled, exact)[1]
                rows.append([made, dtype, f"{mean:.0e}", f"{estimate:.0e}", f"{largest:.0e}", f"{lost:.0e}"])
    return rows


def main(config: Config) -> None:
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    print(f"{markdown_table(memory_table())}\n", flush=True)
    head = ["weights", "dtype", "KL v1", "KL v3", "largest difference", "KL v3 to plain weights"]
    print(markdown_table([head, *kl_rows()]))


if __name__ == "__main__":
    run_benchmark(main)
