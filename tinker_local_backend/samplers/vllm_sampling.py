"""How vLLM draws tokens for us. Imported in vLLM's processes only.

vLLM's own sampler reports either logprobs that ignore the temperature or such that are renormalised after top-k and top-p.
This one draws and reports with the engine's code: softmax(logits / temperature) before any limit, and for a seed the random
numbers that the engine's own sampler would use at the same place of a completion.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from tinker_local_backend.engine.sampling.token_choice import RowParams, next_tokens

_VllmSampler: Any = importlib.import_module("vllm.v1.sample.sampler").Sampler

# A diverged adapter leaves NaN in the pages of the KV cache, and attention lets it through from masked positions (0 * NaN) to
# whoever gets the page next. vLLM can clear pages that are given out, which it does for some models only.
_cache_config: Any = importlib.import_module("vllm.v1.kv_cache_interface").KVCacheConfig
_cache_config.needs_kv_cache_zeroing = property(lambda self: True)


class TokenSampler(_VllmSampler):
    """Takes the place of the sampler of a vLLM model runner."""

    def __init__(self, runner: Any):
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner = runner
        self._batch: tuple[Any, RowParams] | None = None

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (rows,) int64 and logprobs (rows, vocabulary) float32 of logits (rows, vocabulary) float32."""
        rows = len(logits)
        if self._batch is None or self._batch[0] is not sampling_metadata:
            # vLLM makes another object when the batch changes.
            ours = [_extra(request) for request in self._requests(rows)]
            self._batch = sampling_metadata, _row_params(sampling_metadata, ours, logits.device)
        lengths = [0 if request is None else len(request.output_token_ids) for request in self._requests(rows)]
        tokens_R, logprobs_R, tempered_RV = next_tokens(logits, self._batch[1], np.array(lengths, dtype=np.uint64))
        logprobs_RV = torch.log_softmax(tempered_RV, dim=-1)
        return tokens_R, logprobs_RV.scatter_(1, tokens_R[:, None], logprobs_R[:, None])

    def _requests(self, rows: int) -> list[Any]:
        """What vLLM knows of each row's request. Only its warm-up passes have rows that are no request's."""
        names = self._runner.input_batch.req_ids
        return [self._runner.requests[names[i]] if i < len(names) else None for i in range(rows)]


def _extra(request: Any) -> tuple[int, float]:
    """(seed, min_p), which do not go through vLLM's own fields.

    With its seed, a prompt that is prefilled in pieces ends a vLLM on a CPU ("Generator does not use offset"); its min_p is a
    processor of logits that are no longer the whole distribution.
    """
    return (0, 0.0) if request is None else tuple(request.sampling_params.extra_args[key] for key in ("seed", "min_p"))


def _row_params(metadata: Any, ours: list[tuple[int, float]], device: torch.device) -> RowParams:
    rows = len(ours)

    def numbers(values: torch.Tensor | None, otherwise: float) -> list[Any]:
        return [otherwise] * rows if values is None else values[:rows].tolist()

    return RowParams(
        numbers(metadata.temperature, 0.0),
        numbers(metadata.top_k, -1),
        numbers(metadata.top_p, 1.0),
        [min_p for _, min_p in ours],
        [seed for seed, _ in ours],
        device,
    )


class WorkerExtension:
    """Mixed into vLLM's workers (its argument worker_extension_cls)."""

    model_runner: Any

    def use_our_sampling(self) -> None:
        """After loading, in each of vLLM's processes."""
        self.model_runner.sampler = TokenSampler(self.model_runner)
