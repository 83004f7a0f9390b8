"""The local engine as a contender, through the public clients only."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
import tinker
import torch

from benchmarks.workload import (
    PreferencePair,
    TrainingSequence,
    Workload,
    even_fraction,
    random_tokens,
)
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.model.base_model import BaseModel

LEARNING_RATE = 1e-4
DPO_BETA = 0.1
_ADAPTER_STEPS, _ADAPTER_LEARNING_RATE = 2, 1e-2


class LocalEngine:
    """A service client with one adapter on every linear but the head. Use as a context manager."""

    def __init__(self, model: Path | str, rank: int, made: BaseModel | None = None, train_unembed: bool = False):
        self._model = str(model)
        self._stack = ExitStack()
        self.home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tinker-benchmark-")))
        self.service = self._stack.enter_context(ServiceClient(home=self.home))
        if made is not None:
            engine = self.service._engine
            engine.submit("models", lambda: engine.adopt(made)).result()
        self.training: TrainingClient = self.service.create_lora_training_client(
            self._model, rank=rank, seed=0, train_unembed=train_unembed
        ).result()

    @classmethod
    def of(cls, model: BaseModel, rank: int, train_unembed: bool = False) -> LocalEngine:
        """An engine that serves a model from memory."""
        return cls(model.name, rank, model, train_unembed)

    def base_sampler(self) -> SamplingClient:
        return self.service.create_sampling_client(base_model=self._model).result()

    def adapter_sampler(self) -> SamplingClient:
        """A sampler of the current adapter."""
        return self.training.save_weights_and_get_sampling_client().result()

    def save_adapter(self) -> Path:
        """Save the current adapter in PEFT's format, for the peers. Returns its folder."""
        self.training.save_weights_for_sampler("benchmark", overwrite=True).result()
        return next(self.home.rglob("benchmark/adapter_config.json")).parent

    def make_adapter_nonzero(self, workload: Workload) -> None:
        """Take a few steps on uniform random tokens, so that B is not zero and the model stays roughly uniform."""
        tokens = [random_tokens(workload.vocab, 64, seed) for seed in range(8)]
        data = [completion_datum(TrainingSequence(t, prompt_length=1)) for t in tokens]
        for _ in range(_ADAPTER_STEPS):
            self.training.forward_backward(data, "cross_entropy")
            self.training.optim_step(tinker.AdamParams(learning_rate=_ADAPTER_LEARNING_RATE)).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def sample_workload(
    client: SamplingClient, workload: Workload, round_number: int
) -> list[list[tinker.SampledSequence]]:
    """Sample with one request per prompt, all submitted at once. Returns sequences_P_G, with logprobs."""
    futures = [
        client.sample(
            tinker.ModelInput.from_ints(prompt),
            workload.group_size,
            tinker.SamplingParams(
                max_tokens=workload.max_new_tokens, temperature=1.0, stop=workload.stops, seed=1000 * round_number + i
            ),
        )
        for i, prompt in enumerate(workload.prompts_P)
    ]
    return [list(future.result().sequences) for future in futures]


def count_tokens(sequences_P_G: Sequence[Sequence[tinker.SampledSequence]]) -> int:
    """Number of completion tokens; each must have a logprob."""
    total = 0
    for group in sequences_P_G:
        for sequence in group:
            if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
                raise AssertionError("the engine returned tokens without logprobs")
            total += len(sequence.tokens)
    return total


def completion_datum(sequence: TrainingSequence) -> tinker.Datum:
    """Cross-entropy on the completion: weight 0 where the target is a prompt token, 1 elsewhere."""
    weights = np.zeros(len(sequence.tokens) - 1, dtype=np.float32)
    weights[sequence.prompt_length - 1 :] = 1.0
    return _datum(sequence.tokens, weights=weights)


def _datum(tokens: Sequence[int], **arrays: np.ndarray) -> tinker.Datum:
    inputs = {"target_tokens": np.array(tokens[1:], dtype=np.int64), **arrays}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


def train_step(training: TrainingClient, data: list[tinker.Datum]) -> None:
    """Forward, backward and one AdamW step."""
    training.forward_backward(data, "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()


def policy_step(training: TrainingClient, data: list[tinker.Datum], custom: bool) -> None:
    """As `train_step` with importance_sampling, built-in or as a custom loss."""
    if custom:
        training.forward_backward_custom(data, importance_sampling)
    else:
        training.forward_backward(data, "importance_sampling")
    training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()


def importance_sampling(
    data: list[tinker.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The engine's loss of this name: -sum of ratio * advantage over the tokens of all datums."""
    total = torch.zeros(())
    for datum, current in zip(data, logprobs, strict=True):
        sampled, advantages = (datum.loss_fn_inputs[key].to_torch().to(current) for key in ("logprobs", "advantages"))
        total = total.to(current.device) - ((current - sampled).exp() * advantages).sum()
    return total, {}


def policy_data(
    workload: Workload, sequences_P_G: Sequence[Sequence[tinker.SampledSequence]]
) -> tuple[list[tinker.Datum], int]:
    """Datums for importance_sampling with group-centred rewards as advantages, and the number of completion tokens.

    Advantages are divided by the total number of completion tokens, so the loss is a mean as in the other tools.
    """
    total = count_tokens(sequences_P_G)
    data = []
    for prompt, group in zip(workload.prompts_P, sequences_P_G, strict=True):
        rewards_G = [even_fraction(sequence.tokens) for sequence in group]
        mean = sum(rewards_G) / len(rewards_G)
        for reward, sequence in zip(rewards_G, group, strict=True):
            tokens = [*prompt, *sequence.tokens]
            advantages = np.zeros(len(tokens) - 1, dtype=np.float32)
            logprobs = np.zeros(len(tokens) - 1, dtype=np.float32)
            advantages[len(prompt) - 1 :] = (reward - mean) / total
            logprobs[len(prompt) - 1 :] = sequence.logprobs
            data.append(_datum(tokens, advantages=advantages, logprobs=logprobs))
    return data, total


class GrpoLoop:
    """GRPO, one step at a time: sample, reward, train, and take a new snapshot for the next step."""

    def __init__(self, engine: LocalEngine, workload: Workload):
        self._training = engine.training
        self._workload = workload
        self._sampler = engine.adapter_sampler()

    def step(self, round_number: int) -> int:
        """One step; returns the number of sampled tokens."""
        sequences_P_G = sample_workload(self._sampler, self._workload, round_number)
        data, tokens = policy_data(self._workload, sequences_P_G)
        self._training.forward_backward(data, "importance_sampling")
        self._training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE))
        self._sampler = self._training.save_weights_and_get_sampling_client().result()
        return tokens


class DpoLoop:
    """DPO (Rafailov et al. 2023, equation 7), one step at a time on the same pairs, with the base model as reference."""

    def __init__(self, engine: LocalEngine, pairs: Sequence[PreferencePair]):
        self._training = engine.training
        self._reference = engine.base_sampler()
        answers = [(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
        self._prompt_lengths = [len(prompt) for prompt, _ in answers]
        self._sequences = [[*prompt, *answer] for prompt, answer in answers]
        self._data = [
            completion_datum(TrainingSequence(tokens, length))
            for tokens, length in zip(self._sequences, self._prompt_lengths, strict=True)
        ]

    def step(self, round_number: int) -> int:
        """Compute reference logprobs, loss and gradient, and take a step. Returns the number of tokens of the pairs."""
        futures = [self._reference.compute_logprobs(tinker.ModelInput.from_ints(s)) for s in self._sequences]
        reference = [
            sum(lp for lp in future.result()[length:] if lp is not None)
            for future, length in zip(futures, self._prompt_lengths, strict=True)
        ]

        def loss(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            policy = torch.stack([lp[n - 1 :].sum() for lp, n in zip(logprobs, self._prompt_lengths, strict=True)])
            rewards = DPO_BETA * (policy - torch.tensor(reference, device=policy.device))
            margins = rewards[0::2] - rewards[1::2]
            return -torch.nn.functional.logsigmoid(margins).mean(), {"margin": float(margins.detach().mean())}

        self._training.forward_backward_custom(self._data, loss)
        self._training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE)).result()
        return sum(len(sequence) for sequence in self._sequences)


def sampling_against_training(engine: LocalEngine, sampler: SamplingClient, workload: Workload) -> tuple[float, float]:
    """(KL v1, largest difference) of sampled logprobs and those of the trainer's forward pass on the same tokens.

    KL v1 is the mean of log q - log p over sampled tokens, with sampler q and trainer p; both have the same weights.
    """
    sequences_P_G = sample_workload(sampler, workload, round_number=1)
    data = [
        completion_datum(TrainingSequence([*prompt, *sequence.tokens], len(prompt)))
        for prompt, group in zip(workload.prompts_P, sequences_P_G, strict=True)
        for sequence in group
    ]
    scored = engine.training.forward(data, "cross_entropy").result().loss_fn_outputs
    sampled = [np.array(sequence.logprobs) for group in sequences_P_G for sequence in group]
    difference = np.concatenate(
        [q - output["logprobs"].to_numpy()[-len(q) :] for q, output in zip(sampled, scored, strict=True)]
    )
    return float(difference.mean()), float(np.abs(difference).max())


def sampled_datum(prompt: Sequence[int], sequence: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    """A sample with its provenance, as in rl_loop of tinker-cookbook 0.6.1: targets inside the prompt are 0."""
    tokens, logprobs, before, name = list(sequence.tokens), sequence.logprobs, len(prompt) - 1, sequence.sequence_id
    assert logprobs is not None
    inputs = {
        "target_tokens": np.array([0] * before + tokens),
        "logprobs": np.array([0.0] * before + list(logprobs), dtype=np.float32),
        "advantages": np.array([0.0] * before + [advantage] * len(tokens), dtype=np.float32),
    }
    plain = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={key: tinker.TensorData.from_numpy(value) for key, value in inputs.items()},
    )
    from_prompt, from_sample = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    return plain.with_provenance(
        model_input=[
            from_prompt(sequence_id=name, length=before + 1),
            from_sample(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            from_prompt(sequence_id=name, offset=1, length=before),
            from_sample(sequence_id=name, length=len(tokens)),
        ],
    )
