"""Passes of models with other attention: ALiBi, chunked, sparse, or custom code.

attention.py replaces only the attention function, which suffices if a model passes it queries, keys and values once per layer.
For all other models transformers' forward runs unchanged on batches of equal sequences, (N, length), with its masks and with a
cache that reads and writes our pages and slots. This works for any attention but is slower: a batch has segments of one length
that begin at one position, and a decode step gathers the keys of its sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Cache

from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.kv_cache import KVSlots, LayerShape
from tinker_local_backend.engine.model.lora import AdapterRouting, Spans, group_rows, owners_of
from tinker_local_backend.engine.model.mixers import LayerStates, MixerCache, class_code
from tinker_local_backend.engine.model.paged_attention import DecodePlan, Ints
from tinker_local_backend.engine.model.states import StateCache, StateKey

Keys = tuple[torch.Tensor, torch.Tensor]
"""Keys (N, kv_heads, T, key_dim) and values (N, kv_heads, T, value_dim) of a layer."""

_CALLS = {"update", "update_indexer"}


class _Layer(LayerStates):
    """Adds the part of a cache layer that the indexers of Qwen 4 and GLM 5 read."""

    def __init__(self, cache: SequenceCache, index: int):
        super().__init__(cache, index)
        self._cache, self._index = cache, index
        self.indexer_position_ids: torch.Tensor | None = getattr(cache, "position_ids", None)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._index)

    @property
    def keys(self) -> torch.Tensor:
        """On the meta device, because indexers read only its shape."""
        return torch.empty(len(self._cache.tokens), 1, self.get_seq_length(), 1, device="meta")


class _Layers(list[Any]):
    """transformers' list of layers. Its length is 0, so that no layer appears to have a window, but every index has an item."""

    def __init__(self, cache: SequenceCache):
        super().__init__()
        self._cache = cache

    def __getitem__(self, index: Any) -> Any:
        return _Layer(self._cache, index)


class SequenceCache(MixerCache, Cache):
    """Stands in for transformers' cache: keys and states of N sequences with `past` tokens before the batch.

    Args:
        tokens: of the batch, (N, length).
        before: returns a layer's keys of the past tokens.
        write: stores a layer's keys of the batch.
        initial: the states before the batch (see MixerCache).
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        past: int,
        before: Callable[[int], Keys],
        write: Callable[[int, Keys], None],
        initial: Callable[[StateKey], torch.Tensor | None] | None,
    ):
        MixerCache.__init__(self, initial)
        Cache.__init__(self, layers=_Layers(self))
        self.tokens, self.past = tokens, past
        self._before, self._write = before, write
        if past:  # Qwen 4 before transformers 5.18 checks whether the cache has them
            self.position_ids = torch.arange(past, device=tokens.device).expand(3, len(tokens), past)
        self.new: dict[int, Keys] = {}
        """of the batch, by layer"""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Keys:
        """Store the keys of the batch. Returns the past keys followed by the new ones."""
        new = key_states, value_states
        self.new[layer_idx] = new
        self._write(layer_idx, new)
        if self.past == 0:
            return new
        keys, values = self._before(layer_idx)
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """The same for the keys (N, T, dim) of a layer's indexer, which are stored as a layer of negative index."""
        keys = indexer_key_states[:, None]
        return self.update(keys, keys[..., :1], -1 - layer_idx)[0][:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past + (self.new[layer_idx][0].shape[2] if layer_idx in self.new else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.past + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.past > 0


@dataclass(frozen=True, eq=False)
class OriginalForward:
    """Runs the passes of a model through transformers' forward."""

    body: nn.Module
    routing: AdapterRouting
    device: torch.device

    def hidden_states(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PackedPlan | DecodePlan, spans: Spans
    ) -> torch.Tensor:
        """Final hidden states (T, hidden) of T packed tokens."""
        if isinstance(plan, DecodePlan):
            return self._decode(tokens_T, positions_T, plan, spans)
        return self._packed(tokens_T, positions_T, plan, spans)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SequenceCache) -> torch.Tensor:
        """tokens, positions (N, length) -> (N, length, hidden)"""
        takes_positions = "position_ids" in inspect.signature(self.body.forward).parameters
        more = {"position_ids": positions} if takes_positions else {}
        return self.body(input_ids=tokens, past_key_values=cache, use_cache=False, **more).last_hidden_state

    def _packed(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PackedPlan, spans: Spans
    ) -> torch.Tensor:
        owners = owners_of(spans, len(tokens_T))
        prefixes: dict[int, tuple[SequenceCache, int]] = {}
        """start of a prefix -> the cache with its keys, and its index there"""
        results, gathered = [], []
        for members in _batches(plan.segments):
            first, length = members[0], members[0].end - members[0].start
            rows = np.array([range(segment.start, segment.end) for segment in members])
            index = torch.from_numpy(rows).to(self.device)
            cache = SequenceCache(
                tokens_T[index],
                first.past,
                _keys_before(plan, members, prefixes),
                self._writer(plan, index.flatten()),
                _states_before(plan.states, members, prefixes, self.device),
            )
            of_batch = spans if owners is None else group_rows([owners[row] for row in rows.flat], self.device)
            with self.routing.use(of_batch):
                results.append(self._run(tokens_T[index], positions_T[index], cache).reshape(len(members) * length, -1))
            gathered.append(index.flatten())
            prefixes.update({segment.start: (cache, i) for i, segment in enumerate(members)})
            storing = [(i, segment.state_to) for i, segment in enumerate(members) if segment.state_to is not None]
            if storing and plan.states is not None:
                rows_of, slots = torch.tensor(storing, device=self.device).unbind(1)
                for key, state in cache.states.items():
                    plan.states.write(key, slots, state.index_select(0, rows_of))
        return torch.cat(results).index_select(0, torch.cat(gathered).argsort())

    def _writer(self, plan: PackedPlan, rows: torch.Tensor) -> Callable[[int, Keys], None]:
        """Returns a function that stores the keys of these rows of the pass in the plan's pages."""
        chosen: KVSlots | None = None
        if plan.kv_slots is not None:
            slots, offsets = plan.kv_slots.slots, plan.kv_slots.offsets
            of_entry = plan.kv_slots.rows
            of_entry = torch.arange(len(slots), device=self.device) if of_entry is None else of_entry
            index_of_row = torch.full((plan.segments[-1].end,), -1, device=self.device)
            index_of_row[rows] = torch.arange(len(rows), device=self.device)
            entries = (index_of_row[of_entry] >= 0).nonzero().flatten()
            chosen = KVSlots(slots[entries], offsets[entries], index_of_row[of_entry[entries]])

        def write(layer: int, new: Keys) -> None:
            keys, values = new
            plan.shapes[layer] = keys.shape[1], LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
            if plan.cache is not None and chosen is not None:
                plan.cache.write(layer, chosen, _by_head(keys), _by_head(values))

        return write

    def _decode(
        self, tokens_R: torch.Tensor, positions_R: torch.Tensor, plan: DecodePlan, spans: Spans
    ) -> torch.Tensor:
        """Batches sequences of one length, so that no model needs padding masks."""
        owners = owners_of(spans, len(tokens_R))
        results, gathered = [], []
        for length in np.unique(plan.lengths_R):
            rows = np.flatnonzero(plan.lengths_R == length)
            index = torch.from_numpy(rows).to(self.device)
            cache = self._decoding(tokens_R[index, None], plan, int(length), rows, index)
            of_batch = spans if owners is None else group_rows([owners[row] for row in rows], self.device)
            with self.routing.use(of_batch):
                results.append(self._run(tokens_R[index, None], positions_R[index, None], cache)[:, 0])
            gathered.append(index)
            if plan.states is not None and plan.state_slots is not None:
                for key, state in cache.states.items():
                    plan.states.write(key, plan.state_slots[index], state)
        return torch.cat(results).index_select(0, torch.cat(gathered).argsort())

    @staticmethod
    def _decoding(
        tokens: torch.Tensor, plan: DecodePlan, length: int, rows: Ints, index: torch.Tensor
    ) -> SequenceCache:
        """The cache of the sequences in these rows, which have `length` tokens."""
        slots, offsets = plan.tables.keys_of(rows, length)
        into = KVSlots(plan.kv_slots.slots[index], plan.kv_slots.offsets[index])
        states, state_slots = plan.states, plan.state_slots

        def before(layer: int) -> Keys:
            keys, values = (stored[slots, :, offsets].transpose(1, 2) for stored in plan.cache.layer(layer))
            return keys, values

        def write(layer: int, new: Keys) -> None:
            plan.cache.write(layer, into, _by_head(new[0]), _by_head(new[1]))

        def initial(key: StateKey) -> torch.Tensor | None:
            return None if states is None or state_slots is None else states.read(key, state_slots[index])

        return SequenceCache(tokens, length, before, write, initial)


def has_custom_attention(module: nn.Module) -> bool:
    """Whether the code of a module itself writes keys to a cache."""
    return any(
        _CALLS.intersection(code.co_names) and {"past_key_values", "layer_past"}.intersection(code.co_varnames)
        for code in class_code(type(module))
    )


def _batches(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Group segments of one length, with equally many past tokens from the same kind of source. Prefixes come before the segments
    that read them, because they have fewer past tokens.
    """
    groups: dict[tuple[int, int, bool, bool, int], list[Segment]] = {}
    for segment in segments:
        prefix = 0 if segment.prefix is None else segment.prefix[1] - segment.prefix[0]
        kind = segment.past, segment.end - segment.start, segment.table is None, segment.state_from is None, prefix
        groups.setdefault(kind, []).append(segment)
    for kind in sorted(groups):
        yield groups[kind]


def _keys_before(
    plan: PackedPlan, members: Sequence[Segment], prefixes: Mapping[int, tuple[SequenceCache, int]]
) -> Callable[[int], Keys]:
    def before(layer: int) -> Keys:
        if members[0].prefix is not None:
            cache, index = _prefix_of(members, prefixes)
            keys, values = (part.index_select(0, index.to(part.device)) for part in cache.new[layer])
        else:
            assert plan.cache is not None
            read = [plan.cache.read(layer, s.table, s.past) for s in members if s.table is not None]
            keys, values = (torch.cat(parts) for parts in zip(*read, strict=True))
        return keys, values

    return before


def _states_before(
    states: StateCache | None,
    members: Sequence[Segment],
    prefixes: Mapping[int, tuple[SequenceCache, int]],
    device: torch.device,
) -> Callable[[StateKey], torch.Tensor | None] | None:
    if members[0].prefix is not None:
        cache, index = _prefix_of(members, prefixes)
        return lambda key: cache.states[key].index_select(0, index.to(cache.states[key].device))
    if states is not None and members[0].state_from is not None:
        slots = torch.tensor([segment.state_from for segment in members], device=device)
        return lambda key: states.read(key, slots)
    return None


def _prefix_of(
    members: Sequence[Segment], prefixes: Mapping[int, tuple[SequenceCache, int]]
) -> tuple[SequenceCache, torch.Tensor]:
    """The cache of the batch with their prefixes, and the prefixes' indices in it."""
    entries = [prefixes[segment.prefix[0]] for segment in members if segment.prefix is not None]
    return entries[0][0], torch.tensor([index for _, index in entries])


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """(N, heads, T, dim) -> (heads, N * T, dim)"""
    return x.transpose(0, 1).flatten(1, 2)
