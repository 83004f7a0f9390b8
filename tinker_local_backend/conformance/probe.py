"""The SDK clients of a check, and small data that every model accepts."""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tinker

logger = logging.getLogger(__name__)

RANK = 8
FIRST_ID, IDS = 20, 200
"""First id and number of the token ids in the data: every vocabulary has them."""
CLOSE_SECONDS = 10.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Target:
    """The server under test.

    Args:
        model: the base model's name there.
        tokenizer: where its tokenizer is loaded from; None: the one that the server names.
        tolerance: bound on the mean |difference| between logprobs of the same tokens from two different passes.
    """

    base_url: str
    api_key: str
    model: str
    tokenizer: str | None = None
    tolerance: float = 0.05

    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.base_url, api_key=self.api_key)


@dataclass
class Probe:
    """The clients of one check. Use `with`, which closes their session."""

    target: Target
    name: str
    """name of the check, and of its session"""
    label: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """differs between runs, for names that must be new"""

    @cached_property
    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(
            base_url=self.target.base_url,
            api_key=self.target.api_key,
            user_metadata={"conformance": self.label},
            display_name=f"conformance {self.name}",
        )

    @cached_property
    def rest(self) -> tinker.RestClient:
        return self.target.rest()

    def trainer(self, seed: int = 1, **options: Any) -> tinker.TrainingClient:
        """A new LoRA client of rank RANK."""
        options = {"rank": RANK, **options}
        return self.service.create_lora_training_client(self.target.model, seed=seed, **options).result()

    def trained(self, steps: int = 3, seed: int = 1) -> tinker.TrainingClient:
        """A client whose weights differ from the base model's."""
        trainer = self.trainer(seed)
        for _ in range(steps):
            train(trainer)
        return trainer

    def base_sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=self.target.model).result()

    @cached_property
    def context_length(self) -> int | None:
        """Context length in tokens, from the server's capabilities; None if they do not state it."""
        models = self.rest.get_server_capabilities().result().supported_models
        return next((model.max_context_length for model in models if model.model_name == self.target.model), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if "service" in self.__dict__:
            with contextlib.suppress(Exception):  # the check already has its result
                self.service.close("success").result(CLOSE_SECONDS)


def token_ids(length: int, seed: int = 0) -> list[int]:
    return (FIRST_ID + np.random.default_rng(seed).integers(0, IDS, length)).tolist()


def prompt(tokens: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(tokens)


def tensor(values: Any, dtype: Any = "float32") -> tinker.TensorData:
    array = np.asarray(values)
    return tinker.TensorData(data=array.flatten().tolist(), dtype=dtype, shape=list(array.shape))


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    """Position i predicts tokens[i + 1]; every array of `inputs` has len(tokens) - 1 rows."""
    targets = inputs.pop("target_tokens", tokens[1:])
    arrays = {"target_tokens": tensor(targets, "int64"), **{name: tensor(array) for name, array in inputs.items()}}
    return tinker.Datum(model_input=prompt(tokens[:-1]), loss_fn_inputs=arrays)


def supervised(tokens: list[int], weights: Any = None) -> tinker.Datum:
    return datum(tokens, weights=np.ones(len(tokens) - 1) if weights is None else weights)


DATA = [supervised(token_ids(length, seed)) for seed, length in enumerate((12, 30, 7))]


def train(trainer: tinker.TrainingClient, data: list[tinker.Datum] | None = None, rate: float = 1e-3) -> float:
    """Take a step of cross-entropy. Returns the loss before it."""
    output = trainer.forward_backward(DATA if data is None else data, "cross_entropy")
    step = trainer.optim_step(tinker.AdamParams(learning_rate=rate))
    step.result()
    return output.result().metrics["loss:sum"]


def logprobs_of(output: tinker.ForwardBackwardOutput, index: int = 0) -> Floats:
    return output.loss_fn_outputs[index]["logprobs"].to_numpy().astype(np.float64)


def forward_logprobs(trainer: tinker.TrainingClient, tokens: list[int]) -> Floats:
    """Logprobs of tokens[1:], by the trainer's forward pass."""
    return logprobs_of(trainer.forward([supervised(tokens)], "cross_entropy").result())


def sampling_params(**options: Any) -> tinker.SamplingParams:
    """By default sixteen tokens at temperature 1, without stops."""
    return tinker.SamplingParams(**{"max_tokens": 16, "temperature": 1.0, "stop": [], **options})
