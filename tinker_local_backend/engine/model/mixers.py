"""Layers that mix the tokens of a sequence through a state: gated delta rule, KDA, Mamba, short convolution.

A pass has one row of tokens, (1, T). A mixer of transformers takes sequences of one length, (N, length), and reads and writes
their states through four methods of a cache. So its own forward runs on batches of the pass's segments, with a cache that
holds the states of these: none at the start of a sequence, those of a shared prefix, or those in the slots of a StateCache.
Nothing here knows what a mixer computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.lora import Adapter, AdapterRouting, Spans, group_rows
from tinker_local_backend.engine.model.passes import current_pass, running
from tinker_local_backend.engine.model.states import StateCache, StateKey

_METHODS = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}
_CACHE_NAMES = ("cache_params", "past_key_values")

BLOCK = 64
"""Sequences whose lengths are in the same block of so many tokens are padded to the longest, and run as one batch. Kernels
of the delta rule pad to such blocks themselves."""

Ints = npt.NDArray[np.int64]


class MixerCache:
    """What a mixer takes for transformers' cache: the states of the N sequences of one batch.

    Args:
        initial: the state (N, ...) before the batch, of this batch alone: mixers change it in place. None: there is none.
    """

    def __init__(self, initial: Callable[[StateKey], torch.Tensor | None] | None = None):
        self._initial = initial
        self.states: dict[StateKey, torch.Tensor] = {}

    def _get(self, key: StateKey) -> torch.Tensor | None:
        if key not in self.states and self._initial is not None:
            state = self._initial(key)
            if state is not None:
                self.states[key] = state
        return self.states.get(key)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Keep the last `conv_kernel_size` inputs (N, channels, length). Returns them behind those that were kept before."""
        key = StateKey(layer_idx, "conv", state_idx)
        kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before = self._get(key)
        if before is not None:
            conv_states = torch.cat((before, conv_states), dim=-1)
        elif conv_states.shape[-1] < kernel:
            conv_states = nn.functional.pad(conv_states, (kernel - conv_states.shape[-1], 0))
        self.states[key] = conv_states[..., -kernel:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.states[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class _Batch:
    """Segments that a mixer computes together, padded on the right to the longest: (count, length)."""

    count: int
    length: int
    slots: torch.Tensor | None
    """(count,): slots of their initial states"""
    prefixes: torch.Tensor | None
    """(count,): which of the prefixes' states are their initial ones"""
    storing: torch.Tensor | None
    """which of them store their last state,"""
    targets: torch.Tensor | None
    """and in which slots"""
    is_prefix: bool
    """their last states are those of prefixes, in this order"""
    steps: bool
    """token by token, because the mixers go on from a state with one token only"""
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
    """prefixes before the segments behind them"""
    gathered: torch.Tensor | None
    """rows of the pass, batch after batch; where a segment is padded, its last one again. None: in order"""
    inverse: torch.Tensor | None
    """(tokens,): where each row of the pass is among these"""
    states: StateCache | None
    routing: AdapterRouting

    @classmethod
    def of(
        cls, plan: PackedPlan, spans: Spans, routing: AdapterRouting, device: torch.device, continues: bool
    ) -> PackedMixing:
        """
        continues: the mixers go on from a state with any number of tokens. Without, a prefix is computed again for each segment
        behind it.
        """
        tokens = plan.segments[-1].end
        prefixes = {segment.prefix[0] for segment in plan.segments if segment.prefix is not None}
        owners = _owners(spans, tokens)
        order: dict[int, int] = {}
        """which of the prefixes' states belongs to the prefix that begins there"""
        batches: list[_Batch] = []
        rows: list[Ints] = []
        kept: list[npt.NDArray[np.bool_]] = []

        def tensor(values: Sequence[int]) -> torch.Tensor | None:
            return torch.tensor(values, device=device) if values else None

        for members in _grouped(plan.segments, prefixes, continues):
            longest = max(segment.end - segment.start for segment in members)
            if torch.is_grad_enabled() and members[0].prefix is not None:
                longest = max(2, longest)  # one token would take the path of decoding, which has no gradient
            offsets = np.arange(longest)
            starts = np.array([segment.start for segment in members])[:, None]
            lengths = np.array([segment.end for segment in members])[:, None] - starts
            member_rows, member_kept = starts + np.minimum(offsets, lengths - 1), offsets < lengths
            goes_on = members[0].prefix is not None and continues
            if members[0].prefix is not None and not continues:
                before = np.array([range(*segment.prefix) for segment in members if segment.prefix is not None])
                member_rows = np.concatenate([before, member_rows], axis=1)
                member_kept = np.concatenate([np.zeros(before.shape, dtype=np.bool_), member_kept], axis=1)
            longest = member_rows.shape[1]
            rows.append(member_rows.reshape(-1))
            kept.append(member_kept.reshape(-1))
            steps = members[0].state_from is not None and longest > 1 and not continues
            owned = starts[:, 0] if steps else rows[-1]  # a step has one row of each segment
            is_prefix = members[0].start in prefixes and continues
            if is_prefix:
                first = len(order)
                order.update({segment.start: first + i for i, segment in enumerate(members)})
            batches.append(
                _Batch(
                    len(members),
                    longest,
                    slots=tensor([s.state_from for s in members if s.state_from is not None]),
                    prefixes=tensor([order[s.prefix[0]] for s in members if s.prefix is not None]) if goes_on else None,
                    storing=tensor([i for i, s in enumerate(members) if s.state_to is not None]),
                    targets=tensor([s.state_to for s in members if s.state_to is not None]),
                    is_prefix=is_prefix,
                    steps=steps,
                    spans=spans if owners is None else group_rows([owners[row] for row in owned], device),
                )
            )
        gathered, is_kept = np.concatenate(rows), np.concatenate(kept)
        if np.array_equal(gathered, np.arange(tokens)):
            return cls(tokens, batches, None, None, plan.states, routing)
        inverse = np.empty(tokens, dtype=np.int64)
        inverse[gathered[is_kept]] = np.flatnonzero(is_kept)
        gathered_T, inverse_T = (torch.from_numpy(array).to(device) for array in (gathered, inverse))
        return cls(tokens, batches, gathered_T, inverse_T, plan.states, routing)

    def mix(self, forward: Callable[..., Any], cache_name: str, arguments: Mapping[str, Any]) -> Any:
        of_prefixes: list[Mapping[StateKey, torch.Tensor]] = []
        results: list[Any] = []
        by_batch = _map_tokens(self._split, arguments, self.tokens)
        for i, batch in enumerate(self.batches):
            inputs = {name: _pick(value, i) for name, value in by_batch.items()}
            cache = MixerCache(self._initial(batch, of_prefixes)) if batch.has_states else None
            with self.routing.use(batch.spans, self.routing.add):
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
    """Divide segments into batches: those that go on from a state after those that compute it, and one kind of initial state
    in each.

    Only segments whose last state nobody reads may be padded.
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


def _owners(spans: Spans, rows: int) -> list[Adapter | None] | None:
    """The adapter of each row; None if all have the same one."""
    if not spans or (isinstance(spans[0][0], slice) and spans[0][0] == slice(None)):
        return None
    owners: list[Adapter | None] = [None] * rows
    for which, adapter in spans:
        for row in which.tolist() if isinstance(which, torch.Tensor) else range(rows)[which]:
            owners[row] = adapter
    return owners


class _ByBatch(list[torch.Tensor]):
    """A tensor of the pass, for each batch."""


def _map_tokens(change: Callable[[torch.Tensor], Any], value: Any, tokens: int) -> Any:
    """Change every tensor (1, tokens, ...) in the arguments of a mixer."""
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
    """One new token for each sequence of a decode step."""

    states: StateCache
    slots: torch.Tensor
    """(R,): of the sequences' states"""

    def mix(self, forward: Callable[..., Any], cache_name: str, arguments: Mapping[str, Any]) -> Any:
        cache = MixerCache(lambda key: self.states.read(key, self.slots))
        by_row = _map_tokens(lambda x: x.transpose(0, 1), arguments, len(self.slots))
        result = forward(**{**by_row, cache_name: cache})
        for key, state in cache.states.items():
            self.states.write(key, self.slots, state)
        if isinstance(result, tuple):
            return tuple(part.transpose(0, 1) for part in result)
        return result.transpose(0, 1)


class Mixer:
    """Replaces the forward of a module that has states: within a pass, sequences go through it as the pass says."""

    def __init__(self, module: nn.Module):
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._cache_name = next(name for name in _CACHE_NAMES if name in self._signature.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = current_pass()
        if current is None or current.mixing is None:
            return self._forward(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs).arguments
        arguments = {**{name: value for name, value in bound.items() if name != "kwargs"}, **bound.get("kwargs", {})}
        with running(None):  # a mixer in this one gets its batches
            return current.mixing.mix(self._forward, self._cache_name, arguments)


def install_mixers(model: nn.Module) -> list[nn.Module]:
    """Let sequences go through all modules with states as the current pass says. Returns these modules."""
    mixers = [module for module in model.modules() if _has_states(type(module))]
    for module in mixers:
        module.forward = Mixer(module)
    return mixers


def _has_states(kind: type[nn.Module]) -> bool:
    """Whether a module's own code reads or writes states."""
    functions = (
        inspect.unwrap(function)
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for function in vars(base).values()
        if inspect.isfunction(function)
    )
    takes_a_cache = any(name in inspect.signature(kind.forward).parameters for name in _CACHE_NAMES)
    return takes_a_cache and any(_METHODS.intersection(function.__code__.co_names) for function in functions)
