"""SamplingClient: a frozen snapshot of a model that can be sampled from, with the SDK's method names."""

from __future__ import annotations

import itertools
import uuid
from typing import NoReturn

import numpy as np
import tinker
from transformers import PreTrainedTokenizerBase

from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.generation import SamplingResult
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.requests import SamplingRequest, prompt_tokens, sampling_request
from tinker_local_backend.errors import RequestError
from tinker_local_backend.futures import EngineFuture, MappedFuture


class SamplingClient:
    """An immutable snapshot: training after its creation changes nothing in it. Several may serve at once.

    Made on the engine's worker, by ServiceClient.create_sampling_client or TrainingClient.save_weights_and_get_sampling_client.
    """

    def __init__(self, engine: Engine, owner: object, model: BaseModel, adapter: Adapter | None):
        self._engine = engine
        self._owner = owner  # keeps the service client, and with it the engine, alive
        self._model = model
        self._adapter = adapter
        self._kv_budget = engine.kv_budget(model.name)
        self._id = uuid.uuid4().hex
        self._counter = itertools.count()

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: tinker.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> EngineFuture[tinker.types.SampleResponse]:
        """Complete a prompt `num_samples` times.

        Logprobs are those of softmax(logits / temperature) before top-k and top-p; at temperature 0 the choice is greedy and
        they are those of temperature 1. A seed gives the same tokens whatever else is sampled at the time; sample i of a
        request draws from its own stream. The five arguments after `include_prompt_logprobs` are the hosted service's; the
        local engine refuses them when they are set.

        Raises:
            RequestError: a field is out of range or not offered; the message names it.
        """
        self._engine.check_open()
        hosted_only = {
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "target_prompt_logprobs": target_prompt_logprobs,
            "prompt_alt_tokens_k": prompt_alt_tokens_k,
            "prompt_logprobs_last_n": prompt_logprobs_last_n,
        }
        for name, value in hosted_only.items():
            if value:
                raise RequestError(
                    f"{name}={value!r} is not offered by the local engine; leave it out, or use backend=tinker"
                )
        request = sampling_request(
            self._model,
            self._adapter,
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            self._kv_budget,
        )
        return MappedFuture(self._engine.sample(self._model.name, request), self._response)

    def _response(self, result: SamplingResult) -> tinker.types.SampleResponse:
        return tinker.types.SampleResponse(
            sequences=[
                tinker.SampledSequence(
                    stop_reason=sequence.stop_reason,
                    sequence_id=f"{self._id}:{next(self._counter)}",
                    tokens_np=np.array(sequence.tokens, dtype=np.int32),
                    logprobs_np=np.array(sequence.logprobs, dtype=np.float32),
                )
                for sequence in result.sequences
            ],
            prompt_logprobs_np=_as_array(result.prompt_logprobs),
        )

    async def sample_async(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: tinker.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> tinker.types.SampleResponse:
        """`await sample(...)`, as older scripts spell it."""
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(self, prompt: tinker.ModelInput) -> EngineFuture[list[float | None]]:
        """Logprob of each prompt token given those before it, at temperature 1; length N, the first is None."""
        self._engine.check_open()
        tokens = prompt_tokens(prompt, self._model)
        request = SamplingRequest(tokens, self._adapter, num_samples=0, max_tokens=0, prompt_logprobs=True)
        return MappedFuture(self._engine.sample(self._model.name, request), _only_prompt_logprobs)

    async def compute_logprobs_async(self, prompt: tinker.ModelInput) -> list[float | None]:
        """`await compute_logprobs(...)`, as older scripts spell it."""
        return await self.compute_logprobs(prompt)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._model.tokenizer

    def get_base_model(self) -> str:
        return self._model.name

    async def get_base_model_async(self) -> str:
        """`get_base_model()`, as older scripts spell it."""
        return self._model.name

    def __reduce__(self) -> NoReturn:
        raise RequestError(
            "a local SamplingClient lives in the engine's process and cannot be pickled; save_weights_for_sampler and make "
            "one from the path in the other process"
        )


def _only_prompt_logprobs(result: SamplingResult) -> list[float | None]:
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs


def _as_array(logprobs: list[float | None] | None) -> np.ndarray | None:
    """float32, NaN where there is no logprob."""
    return None if logprobs is None else np.array([np.nan if lp is None else lp for lp in logprobs], dtype=np.float32)
