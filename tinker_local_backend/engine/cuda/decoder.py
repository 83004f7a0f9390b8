"""Bursts of captured decode steps: one graph per batch size, captured when it is first needed."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.cuda.adapter_slots import AdapterSlots
from tinker_local_backend.engine.cuda.graphs import Graphs
from tinker_local_backend.engine.cuda.step import DecodeRow, StepState, decode_step
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.kv_cache import KVCache
from tinker_local_backend.engine.sampling.constraints import Bits
from tinker_local_backend.engine.sampling.pages import pages_for

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
"""Sizes of captured batches. A batch runs in the next larger one; the other rows are idle."""

BURST = 8
"""Steps between two reads by the host."""


@dataclass(frozen=True, eq=False)
class Burst:
    """The tokens and logprobs of R rows in a burst of S steps. Values after a row's last token are undefined."""

    tokens: npt.NDArray[np.int64]
    """(S, R)"""
    logprobs: npt.NDArray[np.float64]
    """(S, R), of float32 precision"""
    among: npt.NDArray[np.float64] | None
    """(S, R): logprobs among the allowed tokens, if some row has a constraint"""
    tempered: torch.Tensor
    """(R, vocabulary) float32: logits of the last step over the temperature; overwritten by the next burst"""


class Decoder:
    """Runs batches of a model whose KV cache has fixed pages.

    Args:
        max_tokens: length limit of a sequence.
    """

    def __init__(self, model: BaseModel, cache: KVCache, graphs: Graphs, max_tokens: int):
        self._model, self._cache, self._graphs = model, cache, graphs
        self.state = StepState(BUCKETS[-1], pages_for(max_tokens), BURST, model.device)
        self.slots = AdapterSlots(model.products, model.dtype, model.device, model.targets)
        self._captured: dict[tuple[int, bool, bool, int | None], tuple[Callable[[], None], torch.Tensor]] = {}
        """replay and tempered logits of a step, by the arguments of `_capture`"""

    def run(self, rows: Sequence[DecodeRow], steps: int, allowed_RW: Bits | None = None) -> Burst:
        """Decode `steps` tokens (at most BURST) for at most BUCKETS[-1] rows with at most SLOTS adapters.

        The pages of each row must have room for every token that the burst feeds. With `allowed_RW`, the allowed tokens of each
        row, there is one step.
        """
        assert allowed_RW is None or steps == 1
        bucket = BUCKETS[bisect.bisect_left(BUCKETS, len(rows))]
        adapters = [row.request.adapter for row in rows]
        used = [adapter for adapter in adapters if adapter is not None]
        if self.slots.fit(used):
            self._captured.clear()
        slots = self.slots.assign(adapters)
        limited = any(r.request.top_k > 0 or r.request.top_p < 1 or r.request.min_p > 0 for r in rows)
        words = None if allowed_RW is None else allowed_RW.shape[1]
        key = (bucket, bool(used), limited, words)
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        replay, tempered = self._captured[key]
        self.state.load(rows, slots, bucket)
        if allowed_RW is not None:
            self.state.allowed(allowed_RW.shape[1])[: len(rows)].copy_(torch.from_numpy(allowed_RW))
        for _ in range(steps):
            replay()
        results = self.state.results[:steps, : len(rows)].cpu().numpy()
        among = None if allowed_RW is None else results[..., 2]
        return Burst(results[..., 0].astype(np.int64), results[..., 1], among, tempered[: len(rows)])

    def _capture(
        self, bucket: int, adapted: bool, limited: bool, words: int | None
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture a step. All rows are idle meanwhile, so the steps that it runs change nothing."""
        logger.debug("capturing a decode step of %d rows", bucket)

        def step() -> torch.Tensor:
            slots = self.slots if adapted else None
            return decode_step(self._model, self._cache, self.state, slots, bucket, limited, words)

        self.state.clear()
        if words is not None:
            self.state.allowed(words)
        return self._graphs.capture(step)
