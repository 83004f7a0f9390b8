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

from tinker_local_backend.engine.sampler import RowParams, next_tokens

_VllmSampler: Any = importlib.import_module("vllm.v1.sample.sampler").Sampler


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
            self._batch = sampling_metadata, _row_params(sampling_metadata, rows, logits.device)
        outputs = self._runner.input_batch.req_output_token_ids
        # Only vLLM's warm-up passes have rows that are in no batch.
        lengths = [len(outputs[i] or ()) if i < len(outputs) else 0 for i in range(rows)]
        tokens_R, logprobs_R, tempered_RV = next_tokens(logits, self._batch[1], np.array(lengths, dtype=np.uint64))
        logprobs_RV = torch.log_softmax(tempered_RV, dim=-1)
        return tokens_R, logprobs_RV.scatter_(1, tokens_R[:, None], logprobs_R[:, None])


def _row_params(metadata: Any, rows: int, device: torch.device) -> RowParams:
    def numbers(values: torch.Tensor | None, otherwise: float) -> list[Any]:
        return [otherwise] * rows if values is None else values[:rows].tolist()

    generators = metadata.generators  # a greedy row has none and needs none
    return RowParams(
        numbers(metadata.temperature, 0.0),
        numbers(metadata.top_k, -1),
        numbers(metadata.top_p, 1.0),
        [generators[i].initial_seed() if i in generators else 0 for i in range(rows)],
        device,
    )


class WorkerExtension:
    """Mixed into vLLM's workers (its argument worker_extension_cls)."""

    model_runner: Any

    def use_our_sampling(self) -> None:
        """After loading, in each of vLLM's processes."""
        self.model_runner.sampler = TokenSampler(self.model_runner)
