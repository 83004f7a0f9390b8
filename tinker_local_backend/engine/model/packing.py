"""Pack token sequences end to end for one forward pass, with shared prefixes stored once.

The samples of one prompt, the rounds of one conversation and the questions under one few-shot header share a prefix. Its
hidden states are the same in all of them, so a pass computes them once and every continuation attends to that copy; in
training the gradients of all continuations add up there. Only the order of summation changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.model.attention import Segment

MIN_SHARED = 8
"""Shorter common prefixes are not worth a separate segment."""


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences (by index) whose first `prefix` tokens are equal; `tokens` counts them with the prefix stored once."""

    members: tuple[int, ...]
    prefix: int
    tokens: int


@dataclass
class Packed:
    """One pass: tokens, their positions, the segments of the attention plan, and the rows of each sequence.

    `rows[i]` maps token j of the i-th given sequence to its row of the pass.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    rows: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions (T,) int64."""
        # torch.tensor of a list takes six times as long.
        both = (torch.from_numpy(np.array(ids, dtype=np.int64)) for ids in (self.tokens, self.positions))
        tokens_T, positions_T = (ids_T.to(device) for ids_T in both)
        return tokens_T, positions_T

    def append(
        self,
        tokens: Sequence[int],
        past: int = 0,
        prefix: tuple[int, int] | None = None,
        table: torch.Tensor | None = None,
        state_from: int | None = None,
        state_to: int | None = None,
    ) -> npt.NDArray[np.int64]:
        """Add a segment of a sequence, after its first `past` tokens (see Segment). Returns its rows of the pass."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(past, past + len(tokens)))
        if tokens:
            self.segments.append(Segment(start, start + len(tokens), past, prefix, table, state_from, state_to))
        return np.arange(start, start + len(tokens))


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length  # the first difference is in low .. high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def prefix_groups(sequences: Sequence[tuple[int, ...]]) -> list[PrefixGroup]:
    """Group sequences by common prefix, to minimise the packed tokens.

    Greedy over the sorted sequences: a sequence joins its neighbour's group if that saves more tokens than the shorter prefix
    costs. The result depends on the sequences alone.
    """
    groups: list[tuple[list[int], int]] = []
    for i in sorted(range(len(sequences)), key=lambda i: (sequences[i], i)):
        if groups:
            members, prefix = groups[-1]
            shorter = min(prefix, shared_prefix(sequences[members[-1]], sequences[i]))
            if shorter >= MIN_SHARED and len(members) * shorter > (len(members) - 1) * prefix:
                members.append(i)
                groups[-1] = members, shorter
                continue
        groups.append(([i], len(sequences[i])))
    return [_group(sorted(members), prefix, sequences) for members, prefix in groups]


def pack(
    sequences: Sequence[tuple[int, ...]],
    groups: Sequence[PrefixGroup],
    into: Packed | None = None,
    state_to: Callable[[Sequence[int], int], int | None] = lambda members, tokens: None,
) -> Packed:
    """Pack the sequences of these groups, after the tokens of `into`.

    state_to: the slot for the state after so many tokens of these sequences (see Segment).
    """
    packed = into or Packed()
    for group in groups:
        start = len(packed.tokens)
        to = state_to(group.members, group.prefix) if group.prefix else None
        head = packed.append(sequences[group.members[0]][: group.prefix], state_to=to)
        prefix = (start, start + group.prefix) if group.prefix else None
        for i in group.members:
            rest = sequences[i][group.prefix :]
            to = state_to((i,), len(sequences[i])) if rest else None
            tail = packed.append(rest, group.prefix, prefix, state_to=to)
            packed.rows[i] = np.concatenate([head, tail])
    return packed


def micro_batches(
    sequences: Sequence[tuple[int, ...]], token_budget: int, at_least: int = 1
) -> list[list[PrefixGroup]]:
    """Divide sequences into passes of at most `token_budget` tokens each; a longer sequence gets a separate pass.

    Makes at least `at_least` passes, if there are as many sequences. Sequences are never split.
    """
    passes: list[list[PrefixGroup]] = []
    used = 0
    for group in prefix_groups(sequences):
        for fitting in _split_to_budget(group, sequences, token_budget):
            if not passes or used + fitting.tokens > token_budget:
                passes.append([])
                used = 0
            passes[-1].append(fitting)
            used += fitting.tokens
    while len(passes) < min(at_least, len(sequences)):
        index = max(range(len(passes)), key=lambda i: sum(len(group.members) for group in passes[i]))
        passes[index : index + 1] = _halve(passes[index], sequences)
    return passes


def _group(members: Sequence[int], prefix: int, sequences: Sequence[tuple[int, ...]]) -> PrefixGroup:
    """A group of these sequences; a single one shares no prefix."""
    prefix = prefix if len(members) > 1 else 0
    return PrefixGroup(tuple(members), prefix, prefix + sum(len(sequences[i]) - prefix for i in members))


def _split_to_budget(group: PrefixGroup, sequences: Sequence[tuple[int, ...]], token_budget: int) -> list[PrefixGroup]:
    if group.tokens <= token_budget:
        return [group]
    splits: list[list[int]] = []
    used = 0
    for i in group.members:
        tail = len(sequences[i]) - group.prefix
        if not splits or used + tail > token_budget:
            splits.append([])
            used = group.prefix
        splits[-1].append(i)
        used += tail
    return [_group(members, group.prefix, sequences) for members in splits]


def _halve(groups: Sequence[PrefixGroup], sequences: Sequence[tuple[int, ...]]) -> list[list[PrefixGroup]]:
    """Split a pass into two, with half of its sequences each."""
    total = sum(len(group.members) for group in groups)
    halves: list[list[PrefixGroup]] = [[], []]
    placed = 0
    for group in groups:
        room = max(0, total // 2 - placed)
        for half, members in zip(halves, (group.members[:room], group.members[room:]), strict=True):
            if members:
                half.append(_group(members, group.prefix, sequences))
        placed += len(group.members)
    return halves
