"""A service without a model that waits for set times: any number of samples at once, one training pass after the other.

Replies are one token, drawn from seed, prompt and weights. Weights are a number, the count of optimizer steps.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker.types import (
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

from tinker_cookbook.renderers.datum_text import to_ints
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.seeds import derive_seed

VOCABULARY = 8
LOGPROB = -float(np.log(VOCABULARY))
"""logprob of every token, for sampler and trainer"""


@dataclass(frozen=True)
class ScriptedSampler:
    weights: int
    seconds: float
    model: str

    async def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams, **options: Any
    ) -> SampleResponse:
        """The replies, after `seconds`."""
        await asyncio.sleep(self.seconds)
        seed, prompt_text = sampling_params.seed or 0, str(to_ints(prompt))
        drawn = [derive_seed(seed, prompt_text, self.weights) % VOCABULARY for _ in range(num_samples)]
        logprobs = np.array([LOGPROB], dtype=np.float32)
        sequences = [
            SampledSequence(
                stop_reason="stop",
                sequence_id=str(i),
                tokens_np=np.array([token], dtype=np.int32),
                logprobs_np=logprobs,
            )
            for i, token in enumerate(drawn)
        ]
        return SampleResponse(sequences=sequences)

    def get_tokenizer(self) -> Any:
        return get_tokenizer(self.model)


class ScriptedTrainer:
    """Trains on one pass after the other, each for its share of `train_seconds`, which a whole batch takes."""

    def __init__(self, model: str, sample_seconds: float, train_seconds: float, batch: int):
        self.model, self.sample_seconds = model, sample_seconds
        self._seconds_of_a_datum = train_seconds / batch
        self.pass_ends = 0.0
        """end of the last submitted pass, on the event loop's clock"""
        self.weights = 0

    def forward_backward(self, data: Sequence[tinker.Datum], *args: Any, **options: Any) -> Awaitable[Any]:
        now = asyncio.get_running_loop().time()
        self.pass_ends = max(self.pass_ends, now) + self._seconds_of_a_datum * len(data)
        return asyncio.create_task(_at(self.pass_ends, _output(data)))

    def optim_step(self, optim_params: tinker.AdamParams) -> Awaitable[OptimStepResponse]:
        self.weights += 1
        return asyncio.create_task(_at(self.pass_ends, OptimStepResponse(metrics={})))

    async def save_state(self, name: str, ttl_seconds: int | None = None) -> SaveWeightsResponse:
        return SaveWeightsResponse(path=f"tinker://scripted/weights/{name}")

    async def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> SaveWeightsForSamplerResponse:
        return SaveWeightsForSamplerResponse(path=f"tinker://scripted/sampler_weights/{name}")

    def save_weights_and_get_sampling_client(self, **options: Any) -> Awaitable[ScriptedSampler]:
        return asyncio.create_task(_at(self.pass_ends, ScriptedSampler(self.weights, self.sample_seconds, self.model)))

    def get_tokenizer(self) -> Any:
        return get_tokenizer(self.model)


@dataclass(frozen=True)
class ScriptedService:
    sample_seconds: float
    train_seconds: float
    batch: int
    """datums of a whole batch"""

    async def create_lora_training_client(self, base_model: str, *args: Any, **options: Any) -> ScriptedTrainer:
        return ScriptedTrainer(base_model, self.sample_seconds, self.train_seconds, self.batch)


async def _at(time: float, value: Any) -> Any:
    await asyncio.sleep(max(0.0, time - asyncio.get_running_loop().time()))
    return value


def _output(data: Sequence[tinker.Datum]) -> tinker.ForwardBackwardOutput:
    lengths = [datum.loss_fn_inputs["target_tokens"].to_numpy().size for datum in data]
    outputs = [{"logprobs": tinker.TensorData.from_numpy(np.full(n, LOGPROB, dtype=np.float32))} for n in lengths]
    return tinker.ForwardBackwardOutput(loss_fn_output_type="logprobs", loss_fn_outputs=outputs, metrics={})
