"""Check that logprobs reported while sampling equal those of a teacher-forced pass over the same tokens.

    python -m tinker_local_backend.check_logprobs model=example_data/tiny_chat max_tokens=32
    python -m tinker_local_backend.check_logprobs model=Qwen/Qwen3-4B-Instruct-2507 prompt="What is 7 * 8?" top_p=0.9

Samples a ragged batch at several temperatures under a trained, non-zero adapter, scores every completion again with the
trainer's forward pass at the same temperature, and compares. Prints the differences by temperature and by depth in the
completion, and `ok`; exits with 1 if they exceed the tolerance of the model's dtype. Do not train on a machine or model on
which this fails.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import chz
import numpy as np
import numpy.typing as npt
import tinker
import torch

from tinker_local_backend import environment
from tinker_local_backend.command import parse, run
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.refusals import check_model_name
from tinker_local_backend.sampling_client import SamplingClient
from tinker_local_backend.sampling_params import SamplingParams
from tinker_local_backend.service_client import ServiceClient
from tinker_local_backend.shipped import default_model, shipped_model
from tinker_local_backend.training_client import TrainingClient

PROMPTS = (
    "What is 7 * 8?",
    "Hi",
    "Name three colours and say which one you like best, and why.",
    "Summarise: the bridge over the river was closed on Monday because of ice, and opened again on Tuesday at noon.",
)

FIRST_DEPTHS = 8
"""Tokens in the first range of depths; each next range ends at twice the depth."""


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |sampled - teacher-forced| logprobs over all tokens."""

    mean: float
    p999: float
    """99.9th percentile"""
    largest: float


TOLERANCES = {
    torch.float32: Tolerance(mean=1e-5, p999=1e-4, largest=1e-4),
    # Rounding in bfloat16 can put single tokens far off; a mistake moves the mean of all.
    torch.bfloat16: Tolerance(mean=0.03, p999=0.3, largest=float("inf")),
}


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m tinker_local_backend.check_logprobs`."""

    model: str = chz.field(
        default_factory=default_model,
        munger=lambda self, name: shipped_model(name),
        doc="model directory, hub id or shipped model; default: TINKER_DEBATE_BASE_MODEL, else tiny_chat",
    )
    prompt: str | None = chz.field(default=None, doc="the prompt, as plain text; default: several of different lengths")
    max_tokens: int = chz.field(default=32, doc="tokens per completion", validator=chz.validators.gt(0))
    num_samples: int = chz.field(default=4, doc="completions per prompt", validator=chz.validators.gt(0))
    temperatures: list[float] = chz.field(default_factory=lambda: [1.0, 0.7, 1.5, 0.0], doc="sampling temperatures")
    top_k: int = chz.field(default=-1, doc="sample from the k likeliest tokens only; -1: from all")
    top_p: float = chz.field(default=1.0, doc="sample from the likeliest tokens that make up this mass only")
    min_p: float = chz.field(default=0.0, doc="sample only tokens with this share of the likeliest one's probability")
    rank: int = chz.field(default=8, doc="rank of the adapter", validator=chz.validators.gt(0))
    train_steps: int = chz.field(default=3, doc="optimizer steps that make the adapter non-zero")
    tolerance: float | None = chz.field(
        default=None,
        doc="largest difference accepted; default: by dtype (float32: largest 1e-4; bfloat16: mean 0.03, 99.9% 0.3)",
    )
    seed: int = chz.field(default=0, doc="seed of adapter and samples")


Differences = npt.NDArray[np.float64]
"""|sampled - teacher-forced| logprobs, (completions, max_tokens)."""


def measure(differences: Differences) -> Tolerance:
    """The smallest tolerance that accepts these differences."""
    return Tolerance(float(differences.mean()), float(np.quantile(differences, 0.999)), float(differences.max()))


def violations(differences: Differences, tolerance: Tolerance) -> list[str]:
    """The statistics that exceed the tolerance, or are NaN."""
    measured, limits = vars(measure(differences)), vars(tolerance)
    return [f"{name} {measured[name]:.3e} > {limit:g}" for name, limit in limits.items() if not measured[name] <= limit]


def describe(differences: Differences) -> str:
    m = measure(differences)
    return f"tokens={differences.size}  mean={m.mean:.3e}  p99.9={m.p999:.3e}  largest={m.largest:.3e}"


def train_a_little(client: TrainingClient, prompts: Sequence[Sequence[int]], steps: int) -> None:
    """Take a few steps of cross-entropy on the prompts, so that the adapter is no longer the identity."""
    data = [_datum(tokens, weight=1.0) for tokens in prompts if len(tokens) > 1]
    for _ in range(steps if data else 0):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()


def compare(
    training: TrainingClient,
    sampling: SamplingClient,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    params: tinker.SamplingParams,
) -> Differences:
    """Sample these prompts and score the completions again with the trainer's forward pass at the same temperature.
    Completions must have equal lengths: with stop=[] they have max_tokens."""
    futures = [sampling.sample(tinker.ModelInput.from_ints(list(prompt)), num_samples, params) for prompt in prompts]
    differences = []
    for prompt, future in zip(prompts, futures, strict=True):
        for sequence in future.result().sequences:
            forced = teacher_forced(training, [*prompt, *sequence.tokens], params.temperature)[len(prompt) - 1 :]
            differences.append(np.abs(forced - np.array(sequence.logprobs, dtype=np.float64)))
    return np.stack(differences)


def teacher_forced(client: TrainingClient, tokens: list[int], temperature: float) -> np.ndarray:
    """The trainer's logprobs of tokens[1:]. Greedy samples report logprobs of temperature 1, so 0 counts as 1."""
    data = [_datum(tokens, weight=0.0)]
    output = client.forward(data, "cross_entropy", {"temperature": temperature or 1.0}).result()
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def _datum(tokens: Sequence[int], weight: float) -> tinker.Datum:
    """A datum for cross-entropy, with the same weight at every target."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": tinker.TensorData.from_numpy(np.full(len(tokens) - 1, weight, dtype=np.float32)),
        },
    )


def check(config: Config) -> tuple[Differences, torch.dtype]:
    """Compare, and print the setup and a line per temperature. Returns all differences and the dtype of the weights."""
    check_model_name(config.model)
    with ServiceClient() as service:
        training = service.create_lora_training_client(config.model, rank=config.rank, seed=config.seed).result()
        print(_describe_setup(training._run.model), flush=True)
        tokenizer = training.get_tokenizer()
        prompts = [tokenizer.encode(text) for text in (PROMPTS if config.prompt is None else (config.prompt,))]
        train_a_little(training, prompts, config.train_steps)
        sampling = training.save_weights_and_get_sampling_client().result()
        differences = []
        for temperature in config.temperatures:
            params = SamplingParams(
                max_tokens=config.max_tokens,
                temperature=temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                min_p=config.min_p,
                stop=[],
                seed=config.seed,
            )
            differences.append(compare(training, sampling, prompts, config.num_samples, params))
            print(f"temperature={temperature:g}  {describe(differences[-1])}", flush=True)
        return np.concatenate(differences), training._run.model.dtype


def _describe_setup(model: BaseModel) -> str:
    """One line with the model, its dtype and device, and the versions of the libraries that compute."""
    dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
    if (name := environment.describe()["device_name"]) is not None:
        device += f" ({name})"
    versions = [f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers", "tinker")]
    return f"model {model.name}, dtype {dtype}, device {device}, {', '.join(versions)}, CUDA {torch.version.cuda}"


def main(config: Config) -> None:
    differences, dtype = check(config)
    start, end = 0, FIRST_DEPTHS
    while start < differences.shape[1]:
        print(f"tokens {start}..{end - 1}: {describe(differences[:, start:end])}")
        start, end = end, 2 * end
    tolerance = TOLERANCES[dtype]
    if config.tolerance is not None:
        tolerance = Tolerance(float("inf"), float("inf"), config.tolerance)
    limits = f"mean {tolerance.mean:g}, p99.9 {tolerance.p999:g}, largest {tolerance.largest:g}"
    print(f"max_abs_diff={measure(differences).largest:.3e}  accepted ({str(dtype).removeprefix('torch.')}): {limits}")
    if exceeded := violations(differences, tolerance):
        print(
            f"FAILED: sampler and trainer disagree ({'; '.join(exceeded)}); do not trust probability ratios of this setup",
            file=sys.stderr,
        )
        raise SystemExit(1)
    print("ok")


if __name__ == "__main__":
    run(main, parse(Config))
