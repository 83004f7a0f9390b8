"""Bursts of captured decode steps: one graph per batch size, captured on first use."""

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
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.sampling.constraints import Bits
from tinker_local_backend.engine.sampling.pages import pages_for

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
"""Sizes of captured batches. A batch is padded to the next larger size with idle rows."""

BURST = 8
"""Steps between two reads by the host."""

_Kind = tuple[int, bool, bool, int | None, bool]
"""Kind of a step: number of rows, whether they have adapters, whether they have top-k, top-p or min-p, words of the allowed
tokens, whether the step returns logits."""


@dataclass(frozen=True, eq=False)
class Burst:
    """The tokens and logprobs of R rows in a burst of S steps. Values after a row's last token are undefined."""

    tokens: npt.NDArray[np.int64]
    """(S, R)"""
    logprobs: npt.NDArray[np.float64]
    """(S, R), of float32 precision"""
    constrained: npt.NDArray[np.float64] | None
    """(S, R): logprobs among the allowed tokens, if some row has a constraint"""
    tempered: torch.Tensor | None
    """(R, vocabulary) float32, if requested: logits / temperature of the last step; overwritten by the next burst"""


class Decoder:
    """Runs batches of a model whose KV cache has fixed pages.

    Args:
        max_tokens: length limit of a sequence.
        exact_rows: fixed number of rows of every step, which then always applies top-k, top-p and min-p; None: as needed.
    """

    def __init__(
        self, model: BaseModel, cache: KVCache, graphs: Graphs, max_tokens: int, exact_rows: int | None = None
    ):
        self._exact_rows = exact_rows
        self._model, self._cache, self._graphs = model, cache, graphs
        self.state = StepState(BUCKETS[-1], pages_for(max_tokens), BURST, model.device)
        self.slots = AdapterSlots(model.products, model.dtype, model.device, model.targets)
        self._captured: dict[_Kind, tuple[Callable[[], None], torch.Tensor]] = {}
        """arguments of `_capture` -> (replay, result)"""
        self._epoch = graphs.epoch
        self._grown: list[int] = []
        """rows of the captured steps that were larger than all earlier ones"""

    def run(
        self, rows: Sequence[DecodeRow], steps: int, allowed_RW: Bits | None = None, wants_logits: bool = False
    ) -> Burst:
        """Decode `steps` tokens (at most BURST) for at most BUCKETS[-1] rows with at most SLOTS adapters.

        The pages of each row must have room for all input tokens of the burst. `allowed_RW`: bits of the allowed tokens, for a
        single step. `wants_logits`: return the logits of the last step, for which each captured step then keeps memory.
        """
        assert allowed_RW is None or steps == 1
        bucket = self._exact_rows or BUCKETS[bisect.bisect_left(BUCKETS, len(rows))]
        adapters = [row.request.adapter for row in rows]
        used = [adapter for adapter in adapters if adapter is not None]
        if self.slots.fit(used):
            self._graphs.release()
        slots = self.slots.assign(adapters)
        limited = self._exact_rows is not None or any(
            r.request.top_k > 0 or r.request.top_p < 1 or r.request.min_p > 0 for r in rows
        )
        words = None if allowed_RW is None else allowed_RW.shape[1]
        replay, tempered = self._step((bucket, bool(used), limited, words, wants_logits))
        self.state.load(rows, slots, bucket)
        if allowed_RW is not None:
            self.state.allowed(allowed_RW.shape[1])[: len(rows)].copy_(torch.from_numpy(allowed_RW))
        for _ in range(steps):
            replay()
        results = self.state.results[:steps, : len(rows)].cpu().numpy()
        constrained = None if allowed_RW is None else results[..., 2]
        last = tempered[: len(rows)] if wants_logits else None
        return Burst(results[..., 0].astype(np.int64), results[..., 1], constrained, last)

    def _step(self, kind: _Kind) -> tuple[Callable[[], None], torch.Tensor]:
        """The captured step of this kind; captures it on first use."""
        if kind not in self._captured and sum(self._grown) > kind[0] > max(self._grown):
            # Smaller batches were captured first, whose memory this one cannot reuse. Drop them: they will reuse this one's.
            self._graphs.release()
        if self._epoch != self._graphs.epoch:
            self._captured.clear()
            self._grown.clear()
            self._epoch = self._graphs.epoch
        if kind not in self._captured:
            self._captured[kind] = self._capture(*kind)
            if kind[0] > max(self._grown, default=0):
                self._grown.append(kind[0])
        return self._captured[kind]

    def _capture(
        self, bucket: int, adapted: bool, limited: bool, words: int | None, wants_logits: bool
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture a step. All rows are idle meanwhile, so running it has no effect.

        Raises RuntimeError if it fails; later captures may succeed.
        """
        logger.debug("capturing a decode step of %d rows", bucket)

        def step() -> torch.Tensor:
            slots = self.slots if adapted else None
            tempered = decode_step(self._model, self._cache, self.state, slots, bucket, limited, words)
            return tempered if wants_logits else self.state.results  # logits that are not returned free their memory

        self.state.clear()
        if words is not None:
            self.state.allowed(words)
        try:
            return self._graphs.capture(step)
        except Exception as error:
            if out_of_memory(error):  # the generator continues with fewer rows
                raise
            why = f"{type(error).__name__}: {error}"
            raise RuntimeError(
                f"capturing a decode step of {bucket} rows failed ({why}); TINKER_LOCAL_CUDA=eager samples without capturing"
            ) from error
