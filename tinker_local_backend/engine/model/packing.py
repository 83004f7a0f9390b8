"""Token sequences laid end to end for one forward pass, with a prefix that several of them share stored only once.

The samples of one prompt, the rounds of one conversation and the questions under one few-shot header repeat a prefix. Its
hidden states are the same in all of them, so a pass computes them once and every continuation attends to the one copy; in
training the gradients of all continuations meet there. Nothing changes but the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.model.attention import Segment

MIN_SHARED = 8
"""Shorter common prefixes are not worth a segment of their own."""


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences (by index) whose first `prefix` tokens are equal; `tokens` of them are left when the prefix is kept once."""

    members: tuple[int, ...]
    prefix: int
    tokens: int


@dataclass
class Packed:
    """One pass: tokens and their positions, the segments of the attention plan, and where each sequence's tokens lie.

    `rows[i]` maps token j of the i-th given sequence to its row of the pass.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    rows: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions (T,) int64."""
        # torch.tensor takes six times as long with a list.
        both = (torch.from_numpy(np.array(ids, dtype=np.int64)) for ids in (self.tokens, self.positions))
        tokens_T, positions_T = (ids_T.to(device) for ids_T in both)
        return tokens_T, positions_T

    def append(
        self,
        tokens: Sequence[int],
        before: int = 0,
        prefix: tuple[int, int] | None = None,
        table: torch.Tensor | None = None,
    ) -> npt.NDArray[np.int64]:
        """Add a stretch of a sequence of which `before` tokens come earlier (see Segment). Returns its rows of the pass."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(before, before + len(tokens)))
        if tokens:
            self.segments.append(Segment(start, start + len(tokens), before, prefix, table))
        return np.arange(start, start + len(tokens))


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length  # the first difference lies in low .. high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def prefix_groups(sequences: Sequence[tuple[int, ...]]) -> list[PrefixGroup]:
    """Divide sequences into groups with a common prefix so that few tokens are left.

    Greedy over the sorted sequences: a sequence joins its neighbour's group when that removes more tokens than it gives up by
    shortening the group's prefix. The result depends on the sequences alone.
    """
    groups: list[PrefixGroup] = []
    members: list[int] = []
    prefix = 0

    for i in sorted(range(len(sequences)), key=lambda i: (sequences[i], i)):
        if members:
            common = shared_prefix(sequences[members[-1]], sequences[i])
            shorter = common if len(members) == 1 else min(prefix, common)
            if shorter >= MIN_SHARED and len(members) * shorter > (len(members) - 1) * prefix:
                members.append(i)
                prefix = shorter
                continue
            groups.append(_group(sorted(members), prefix, sequences))
        members, prefix = [i], len(sequences[i])
    if members:
        groups.append(_group(sorted(members), prefix, sequences))
    return groups


def pack(sequences: Sequence[tuple[int, ...]], groups: Sequence[PrefixGroup], into: Packed | None = None) -> Packed:
    """Lay out the sequences of these groups, behind what `into` holds already."""
    packed = into or Packed()
    for group in groups:
        start = len(packed.tokens)
        head = packed.append(sequences[group.members[0]][: group.prefix])
        prefix = (start, start + group.prefix) if group.prefix else None
        for i in group.members:
            tail = packed.append(sequences[i][group.prefix :], group.prefix, prefix)
            packed.rows[i] = np.concatenate([head, tail])
    return packed


def micro_batches(
    sequences: Sequence[tuple[int, ...]], token_budget: int, at_least: int = 1
) -> list[list[PrefixGroup]]:
    """Divide sequences into passes of at most `token_budget` tokens each (a single longer sequence is a pass of its own).

    There are at least `at_least` passes, if there are as many sequences. A sequence is never split.
    """
    passes: list[list[PrefixGroup]] = []
    used = 0
    for group in prefix_groups(sequences):
        for part in _split_to_budget(group, sequences, token_budget):
            if not passes or used + part.tokens > token_budget:
                passes.append([])
                used = 0
            passes[-1].append(part)
            used += part.tokens
    while len(passes) < min(at_least, len(sequences)):
        index = max(range(len(passes)), key=lambda i: sum(len(group.members) for group in passes[i]))
        passes[index : index + 1] = _halve(passes[index], sequences)
    return passes


def _group(members: Sequence[int], prefix: int, sequences: Sequence[tuple[int, ...]]) -> PrefixGroup:
    """These sequences, with their prefix stored once; one alone has none to share."""
    prefix = prefix if len(members) > 1 else 0
    return PrefixGroup(tuple(members), prefix, prefix + sum(len(sequences[i]) - prefix for i in members))


def _split_to_budget(group: PrefixGroup, sequences: Sequence[tuple[int, ...]], token_budget: int) -> list[PrefixGroup]:
    if group.tokens <= token_budget:
        return [group]
    parts: list[list[int]] = []
    used = 0
    for i in group.members:
        own = len(sequences[i]) - group.prefix
        if not parts or used + own > token_budget:
            parts.append([])
            used = group.prefix
        parts[-1].append(i)
        used += own
    return [_group(members, group.prefix, sequences) for members in parts]


def _halve(groups: Sequence[PrefixGroup], sequences: Sequence[tuple[int, ...]]) -> list[list[PrefixGroup]]:
    """Two passes out of one, with half of its sequences each."""
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
