"""Runs the sequences of a pass through recurrent layers, in batches of one length.

A pass has one row of tokens, (1, T). The initial states of a batch are empty, those of shared prefixes, or those in slots of a
StateCache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.lora import AdapterRouting, Spans, group_rows, owners_of
from tinker_local_backend.engine.model.mixers import MixerCache
from tinker_local_backend.engine.model.states import StateCache, StateKey

BLOCK = 64
"""Sequences whose lengths round up to the same multiple of BLOCK are padded to the longest and run as one batch. Kernels of the
delta rule pad to such blocks themselves."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Batch:
    """Segments that a mixer computes together, right-padded to the longest: (count, length)."""

    count: int
    length: int
    slots: torch.Tensor | None
    """(count,): slots of their initial states"""
    prefixes: torch.Tensor | None
    """(count,): indices of the prefixes whose states are their initial states"""
    storing: torch.Tensor | None
    """indices of the segments whose last state is stored"""
    targets: torch.Tensor | None
    """the slots of those states"""
    is_prefix: bool
    """the segments are prefixes, whose last states are initial states of others"""
    steps: bool
    """run token by token, because the mixers accept only one token after a state"""
    spans: Spans
    """the adapters of its rows"""

    @property
    def has_states(self) -> bool:
        return not (self.slots is None and self.prefixes is None and self.storing is None and not self.is_prefix)


@dataclass(eq=False)
class PackedMixing:
    """A packed pass: training, prefill, scoring. Built by `of`."""

    tokens: int
    batches: Sequence[_Batch]
    """prefixes before the segments that continue them"""
    gathered: torch.Tensor | None
    """rows of the pass, batch after batch; padding repeats a segment's last row. None: rows are in order"""
    inverse: torch.Tensor | None
    """(tokens,): index of each row of the pass in `gathered`"""
    states: StateCache | None
    routing: AdapterRouting

    @classmethod
    def of(
        cls, plan: PackedPlan, spans: Spans, routing: AdapterRouting, device: torch.device, continues: bool
    ) -> PackedMixing:
        """Plan the batches of a pass.

        continues: the mixers accept any number of tokens after a state. If not, each segment recomputes its prefix.
        """
        tokens = plan.segments[-1].end
        prefixes = {segment.prefix[0] for segment in plan.segments if segment.prefix is not None}
        owners = owners_of(spans, tokens)
        order: dict[int, int] = {}
        """start of a prefix -> its index among the prefixes' states"""
        batches: list[_Batch] = []
        rows: list[Ints] = []
        is_own: list[Bools] = []

        def tensor(values: Sequence[int]) -> torch.Tensor | None:
            return torch.tensor(values, device=device) if values else None

        for members in _grouped(plan.segments, prefixes, continues):
            first = members[0]
            rows_NL, is_own_NL = _rows(members, with_prefix=first.prefix is not None and not continues)
            rows.append(rows_NL.reshape(-1))
            is_own.append(is_own_NL.reshape(-1))
            is_prefix = continues and first.start in prefixes
            if is_prefix:
                before = len(order)
                order.update({segment.start: before + i for i, segment in enumerate(members)})
            steps = not continues and first.state_from is not None and rows_NL.shape[1] > 1
            owned = rows_NL[:, 0] if steps else rows[-1]  # a step has one row of each segment
            initial = [order[s.prefix[0]] for s in members if s.prefix is not None] if continues else []
            batches.append(
                _Batch(
                    *rows_NL.shape,
                    slots=tensor([s.state_from for s in members if s.state_from is not None]),
                    prefixes=tensor(initial),
                    storing=tensor([i for i, s in enumerate(members) if s.state_to is not None]),
                    targets=tensor([s.state_to for s in members if s.state_to is not None]),
                    is_prefix=is_prefix,
                    steps=steps,
                    spans=spans if owners is None else group_rows([owners[row] for row in owned], device),
                )
            )
        gathered, kept = np.concatenate(rows), np.concatenate(is_own)
        if np.array_equal(gathered, np.arange(tokens)):
            return cls(tokens, batches, None, None, plan.states, routing)
        inverse = np.empty(tokens, dtype=np.int64)
        inverse[gathered[kept]] = np.flatnonzero(kept)
        gathered_P, inverse_T = (torch.from_numpy(array).to(device) for array in (gathered, inverse))
        return cls(tokens, batches, gathered_P, inverse_T, plan.states, routing)

    def mix(self, forward: Callable[..., Any], cache_name: str, arguments: Mapping[str, Any]) -> Any:
        of_prefixes: list[Mapping[StateKey, torch.Tensor]] = []
        results: list[Any] = []
        by_batch = _map_tokens(self._split, arguments, self.tokens)
        for i, batch in enumerate(self.batches):
            inputs = {name: _pick(value, i) for name, value in by_batch.items()}
            cache = MixerCache(self._initial(batch, of_prefixes)) if batch.has_states else None
            with self.routing.use(batch.spans):
                if batch.steps:
                    results.append(self._by_step(forward, {**inputs, cache_name: cache}, batch.length))
                else:
                    results.append(forward(**{**inputs, cache_name: cache}))
            if cache is not None and batch.is_prefix:
                of_prefixes.append(cache.states)
            if cache is not None and batch.storing is not None and batch.targets is not None:
                assert self.states is not None
                for key, state in cache.states.items():
                    self.states.write(key, batch.targets, state.index_select(0, batch.storing))
        return self._join(results)

    @staticmethod
    def _by_step(forward: Callable[..., Any], inputs: Mapping[str, Any], length: int) -> Any:
        """Run a batch (count, length, ...) token by token."""
        steps = [forward(**_at_token(inputs, length, i)) for i in range(length)]
        if isinstance(steps[0], tuple):
            return tuple(torch.cat(parts, dim=1) for parts in zip(*steps, strict=True))
        return torch.cat(steps, dim=1)

    def _split(self, x: torch.Tensor) -> _ByBatch:
        """(1, tokens, ...) -> (count, length, ...) of each batch."""
        rows = x[0] if self.gathered is None else x[0].index_select(0, self.gathered)
        parts = rows.split([batch.count * batch.length for batch in self.batches])
        return _ByBatch(
            [part.unflatten(0, (batch.count, batch.length)) for part, batch in zip(parts, self.batches, strict=True)]
        )

    def _initial(
        self, batch: _Batch, of_prefixes: Sequence[Mapping[StateKey, torch.Tensor]]
    ) -> Callable[[StateKey], torch.Tensor | None] | None:
        states, slots, prefixes = self.states, batch.slots, batch.prefixes
        if prefixes is not None:
            return lambda key: torch.cat([part[key] for part in of_prefixes]).index_select(0, prefixes)
        if slots is not None:
            assert states is not None
            return lambda key: states.read(key, slots)
        return None

    def _join(self, results: Sequence[Any]) -> Any:
        """The results of all batches as rows of the pass: (1, tokens, ...)."""
        if isinstance(results[0], tuple):
            return tuple(self._join(parts) for parts in zip(*results, strict=True))
        flat = [result.flatten(0, 1) for result in results]
        rows = flat[0] if len(flat) == 1 else torch.cat(flat)
        return (rows if self.inverse is None else rows.index_select(0, self.inverse))[None]


def _grouped(segments: Sequence[Segment], prefixes: set[int], continues: bool) -> Iterator[list[Segment]]:
    """Divide segments into batches: each batch has one kind of initial state and comes after the batches that compute it.

    Only segments whose last state is not used may be padded.
    """
    groups: dict[tuple[int, bool, bool, int, bool, int], list[Segment]] = {}
    levels: dict[int, int] = {}
    written: dict[int, int] = {}
    """the level that writes a slot"""
    for segment in segments:
        level = 0 if segment.prefix is None else levels[segment.prefix[0]] + 1
        if segment.state_from is not None:
            level = written.get(segment.state_from, -1) + 1
        levels[segment.start] = level
        if segment.state_to is not None:
            written[segment.state_to] = level
        length, is_prefix = segment.end - segment.start, segment.start in prefixes
        is_exact = is_prefix or segment.state_to is not None
        size = length if is_exact else -(-length // BLOCK)
        again = 0 if continues or segment.prefix is None else segment.past
        groups.setdefault((level, is_prefix, segment.state_from is None, size, is_exact, again), []).append(segment)
    for key in sorted(groups, key=lambda key: key[0]):
        yield groups[key]


def _rows(members: Sequence[Segment], with_prefix: bool) -> tuple[Ints, Bools]:
    """The rows of these segments, after their prefixes' rows if those are recomputed; and a mask of the segments' rows."""
    lengths = np.array([segment.end - segment.start for segment in members])[:, None]
    longest = int(lengths.max())
    if torch.is_grad_enabled() and members[0].prefix is not None:
        longest = max(2, longest)  # one token would take the decode path, which has no gradient
    offsets = np.arange(longest)
    rows_NL = np.array([segment.start for segment in members])[:, None] + np.minimum(offsets, lengths - 1)
    is_own_NL = offsets < lengths
    if with_prefix:
        before = np.array([range(*segment.prefix) for segment in members if segment.prefix is not None])
        rows_NL = np.concatenate([before, rows_NL], axis=1)
        is_own_NL = np.concatenate([np.zeros(before.shape, dtype=np.bool_), is_own_NL], axis=1)
    return rows_NL, is_own_NL


class _ByBatch(list[torch.Tensor]):
    """A tensor of the pass, split into batches."""


def _map_tokens(change: Callable[[torch.Tensor], Any], value: Any, tokens: int) -> Any:
    """Apply `change` to every tensor (1, tokens, ...) in the arguments of a mixer."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.shape[:2] == (1, tokens) else value
    if isinstance(value, dict):
        return {name: _map_tokens(change, part, tokens) for name, part in value.items()}
    return tuple(_map_tokens(change, part, tokens) for part in value) if isinstance(value, tuple) else value


def _pick(value: Any, batch: int) -> Any:
    if isinstance(value, _ByBatch):
        return value[batch]
    return tuple(_pick(part, batch) for part in value) if isinstance(value, tuple) else value


def _at_token(value: Any, length: int, token: int) -> Any:
    """One token of all tensors (count, length, ...) in the arguments of a mixer."""
    if isinstance(value, torch.Tensor):
        return value[:, token : token + 1] if value.dim() > 1 and value.shape[1] == length else value
    if isinstance(value, dict):
        return {name: _at_token(part, length, token) for name, part in value.items()}
    return tuple(_at_token(part, length, token) for part in value) if isinstance(value, tuple) else value


@dataclass(eq=False)
class DecodeMixing:
    """A decode step: one new token per sequence."""

    states: StateCache
    slots: torch.Tensor
    """(R,): of the sequences' states"""

    def mix(self, forward: Callable[..., Any], cache_name: str, arguments: Mapping[str, Any]) -> Any:
        cache = MixerCache(lambda key: self.states.read(key, self.slots))
        by_row = _map_tokens(lambda x: x[0].unsqueeze(1), arguments, len(self.slots))
        result = forward(**{**by_row, cache_name: cache})
        for key, state in cache.states.items():
            self.states.write(key, self.slots, state)
        if isinstance(result, tuple):
            return tuple(part.squeeze(1)[None] for part in result)
        return result.squeeze(1)[None]
