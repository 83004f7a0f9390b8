"""Do the logprobs reported while sampling equal those of a teacher-forced pass over the same tokens?

    python -m tinker_local_backend.check_logprobs model=example_data/tiny_chat max_tokens=32

Samples a ragged batch at several temperatures under a trained, non-zero adapter, scores every completion again with the
trainer's forward pass at the same temperature, and compares. Prints max_abs_diff and `ok`, or exits with 1 beyond the
tolerance. Do not train on a machine or model on which this fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import chz
import numpy as np
import tinker

from tinker_local_backend.errors import LocalBackendError
from tinker_local_backend.rest_client import TINY_CHAT
from tinker_local_backend.sampling_client import SamplingClient
from tinker_local_backend.service_client import ServiceClient
from tinker_local_backend.training_client import TrainingClient

PROMPTS = (
    "What is 7 * 8?",
    "Hi",
    "Name three colours and say which one you like best, and why.",
    "Summarise: the bridge over the river was closed on Monday because of ice, and opened again on Tuesday at noon.",
)


@chz.chz(typecheck=True)
class Config:
    """Keys of `python -m tinker_local_backend.check_logprobs`."""

    model: str = chz.field(default=str(TINY_CHAT), doc="model directory or hub id")
    max_tokens: int = chz.field(default=32, doc="longest completion", validator=chz.validators.gt(0))
    num_samples: int = chz.field(default=4, doc="completions per prompt", validator=chz.validators.gt(0))
    temperatures: list[float] = chz.field(default_factory=lambda: [1.0, 0.7, 1.5, 0.0], doc="sampling temperatures")
    rank: int = chz.field(default=8, doc="rank of the adapter", validator=chz.validators.gt(0))
    train_steps: int = chz.field(default=3, doc="optimizer steps that make the adapter non-zero")
    tolerance: float = chz.field(default=1e-4, doc="largest difference accepted (fp32: 1e-4; bf16: about 0.1)")
    seed: int = chz.field(default=0, doc="seed of adapter and samples")


def train_a_little(client: TrainingClient, prompts: Sequence[Sequence[int]], steps: int) -> None:
    """A few steps of cross-entropy on the prompts, so that the adapter is no longer the identity."""
    data = [_datum(tokens, weight=1.0) for tokens in prompts if len(tokens) > 1]
    for _ in range(steps):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()


def max_abs_diff(
    training: TrainingClient,
    sampling: SamplingClient,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    config: Config,
) -> tuple[float, int]:
    """Largest |sampled - teacher-forced| logprob over all sampled tokens at one temperature, and how many there were."""
    params = tinker.SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=config.seed)
    futures = [
        sampling.sample(tinker.ModelInput.from_ints(list(prompt)), config.num_samples, params) for prompt in prompts
    ]
    worst, count = 0.0, 0
    for prompt, future in zip(prompts, futures, strict=True):
        for sequence in future.result().sequences:
            assert sequence.logprobs is not None
            forced = teacher_forced(training, [*prompt, *sequence.tokens], temperature)[len(prompt) - 1 :]
            worst = max(worst, float(np.abs(forced - np.array(sequence.logprobs)).max()))
            count += len(sequence.tokens)
    return worst, count


def teacher_forced(client: TrainingClient, tokens: list[int], temperature: float) -> np.ndarray:
    """The trainer's logprobs of tokens[1:]. Greedy samples report logprobs of temperature 1, so 0 counts as 1."""
    data = [_datum(tokens, weight=0.0)]
    output = client.forward(data, "cross_entropy", {"temperature": temperature or 1.0}).result()
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def _datum(tokens: Sequence[int], weight: float) -> tinker.Datum:
    """For cross-entropy, with the same weight at every target."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": tinker.TensorData.from_numpy(np.full(len(tokens) - 1, weight, dtype=np.float32)),
        },
    )


def check(config: Config) -> float:
    """Run the comparison, print a line per temperature, and return the largest difference."""
    with ServiceClient() as service:
        training = service.create_lora_training_client(config.model, rank=config.rank, seed=config.seed).result()
        tokenizer = training.get_tokenizer()
        prompts = [tokenizer.encode(text) for text in PROMPTS]
        train_a_little(training, prompts, config.train_steps)
        sampling = training.save_weights_and_get_sampling_client().result()
        worst = 0.0
        for temperature in config.temperatures:
            diff, count = max_abs_diff(training, sampling, prompts, temperature, config)
            print(f"temperature={temperature:g}  tokens={count}  max_abs_diff={diff:.3e}", flush=True)
            worst = max(worst, diff)
    return worst


def main(config: Config) -> None:
    worst = check(config)
    print(f"max_abs_diff={worst:.3e}  tolerance={config.tolerance:g}")
    if not worst <= config.tolerance:
        print("FAILED: sampler and trainer disagree; do not trust probability ratios of this setup", file=sys.stderr)
        raise SystemExit(1)
    print("ok")


if __name__ == "__main__":
    try:
        chz.nested_entrypoint(main, allow_hyphens=True)
    except LocalBackendError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
