"""Token sampling inside vLLM with the engine's code: its logprobs (vllm_rules.py says how vLLM's differ) and random numbers.

Imported in vLLM's processes only.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from tinker_local_backend.engine.cuda import ops
from tinker_local_backend.engine.sampling.token_choice import RowParams, next_tokens
from tinker_local_backend.engine.sampling.truncation import truncated

_VllmSampler: Any = importlib.import_module("vllm.v1.sample.sampler").Sampler

# A diverged adapter leaves NaN in KV cache pages, and attention spreads it from masked positions (0 * NaN) to the next sequence
# that uses the page. vLLM can zero allocated pages, but by default does so only for some models.
_cache_config: Any = importlib.import_module("vllm.v1.kv_cache_interface").KVCacheConfig
_cache_config.needs_kv_cache_zeroing = property(lambda self: True)


class TokenSampler(_VllmSampler):
    """Replaces the sampler of a vLLM model runner."""

    def __init__(self, runner: Any):
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner = runner
        self._batch: tuple[Any, RowParams] | None = None

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (rows,) int64 and logprobs (rows, vocabulary) float32, from logits (rows, vocabulary) float32."""
        rows = len(logits)
        if self._batch is None or self._batch[0] is not sampling_metadata:
            # vLLM makes a new metadata object when the batch changes.
            extras = [_extra(request) for request in self._requests(rows)]
            self._batch = sampling_metadata, _row_params(sampling_metadata, extras, logits.device)
        lengths = [0 if request is None else len(request.output_token_ids) for request in self._requests(rows)]
        tokens_R, logprobs_R, tempered_RV = next_tokens(logits, self._batch[1], np.array(lengths, dtype=np.uint64))
        logprobs_RV = torch.log_softmax(tempered_RV, dim=-1)
        return tokens_R, logprobs_RV.scatter_(1, tokens_R[:, None], logprobs_R[:, None])

    def _requests(self, rows: int) -> list[Any]:
        """vLLM's request of each row; None for the extra rows of its warm-up passes."""
        names = self._runner.input_batch.req_ids
        return [self._runner.requests[names[i]] if i < len(names) else None for i in range(rows)]


def _extra(request: Any) -> tuple[int, float]:
    """(seed, min_p) from extra_args, because vLLM's own fields for them do not work here.

    vLLM's seed crashes it on a CPU when a prompt is prefilled in chunks ("Generator does not use offset"); its min_p changes the
    logits before they reach this sampler.
    """
    return (0, 0.0) if request is None else tuple(request.sampling_params.extra_args[key] for key in ("seed", "min_p"))


def _row_params(metadata: Any, extras: list[tuple[int, float]], device: torch.device) -> RowParams:
    rows = len(extras)

    def numbers(values: torch.Tensor | None, default: float) -> list[Any]:
        return [default] * rows if values is None else values[:rows].tolist()

    return RowParams(
        numbers(metadata.temperature, 0.0),
        numbers(metadata.top_k, -1),
        numbers(metadata.top_p, 1.0),
        [min_p for _, min_p in extras],
        [seed for seed, _ in extras],
        device,
        truncated if device.type == "cpu" else ops.truncate,  # which does not synchronise
    )


class WorkerExtension:
    """Mixed into vLLM's workers (its argument worker_extension_cls)."""

    model_runner: Any

    def use_our_sampling(self) -> None:
        """Install the sampler. Called after loading, in each of vLLM's processes."""
        self.model_runner.sampler = TokenSampler(self.model_runner)
