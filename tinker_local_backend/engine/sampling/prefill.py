"""Prefill: the pages that admitted prompts get, and the passes that compute them.

A prompt is computed once for all its samples, a prefix that several prompts of a pass share once for all of them, and a
cached prefix not at all. A long prompt is computed in chunks, one in each pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tinker_local_backend.engine.model.kv_cache import KVSlots
from tinker_local_backend.engine.model.lora import Adapter, Spans, group_rows
from tinker_local_backend.engine.model.packing import Packed, pack, prefix_groups
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, PagePool, PageStore, PageTable, pages_for
from tinker_local_backend.engine.sampling.prefix_cache import PrefixMatch
from tinker_local_backend.engine.sampling.prompt_scores import PromptScorer
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import Ticket


@dataclass(eq=False)
class PrefillTask:
    """A prompt to compute under one snapshot, and the samples that start from it. Several requests may have the same prompt."""

    request: SamplingRequest
    entries: list[tuple[Ticket, list[int]]]
    """which samples of which request"""
    store: PageStore
    """where its pages are: the shared store, or its own for a prompt that is too long for that one"""
    match: PrefixMatch
    """the cached prefix; this task is a reader of its pages"""
    end: int
    """tokens that are computed after the next pass"""
    done: int = field(init=False)
    """tokens that are computed before it"""
    stored: bool = True
    """its keys go into pages; False for a prompt that is only scored, in one pass"""
    in_place: bool = False
    """appends to the cached tail page itself, because no page is left for a copy"""
    table: PageTable = field(default_factory=PageTable)
    first_written: int = 0
    """the first token whose keys it writes: those before are in shared pages"""
    scorers: list[tuple[Ticket, PromptScorer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = self.match.tokens
        self.table.pages.extend(self.match.pages)

    @property
    def samples(self) -> int:
        return sum(len(indices) for _, indices in self.entries)

    @property
    def whole(self) -> bool:
        """The next pass computes the whole prompt."""
        return self.done == 0 and self.complete

    @property
    def complete(self) -> bool:
        """The next pass is the last one."""
        return self.end == len(self.request.prompt)

    def free(self) -> None:
        pages = [*self.table.pages]
        if self.match.tail is not None and self.match.tail not in pages:
            pages.append(self.match.tail)
        self.match, self.table = PrefixMatch(), PageTable()
        self.store.free(pages)


def plan_pass(tasks: Sequence[PrefillTask], device: torch.device) -> tuple[Packed, Spans, KVSlots]:
    """Plan one pass over the next chunk of each prompt. Whole prompts of one snapshot and scope share their common prefixes.

    Allocates the pages. All tasks have the same store, whose pool must have room for them (scheduler.py checks that).

    Returns the tokens, with the rows of each task, their adapters, and the slots of their keys.
    """
    store = tasks[0].store
    packed = Packed()
    rows_of: dict[int, np.ndarray] = {}
    adapters: list[Adapter | None] = []
    # By adapter first: the rows of one are neighbours.
    by_adapter: dict[int, dict[Hashable, list[int]]] = {}
    for i, task in enumerate(tasks):
        by_scope = by_adapter.setdefault(id(task.request.adapter), {})
        by_scope.setdefault(task.request.origin.prefixes, []).append(i)
    for members in (members for by_scope in by_adapter.values() for members in by_scope.values()):
        fresh = [i for i in members if tasks[i].whole]
        prompts = [tasks[i].request.prompt for i in fresh]
        groups = prefix_groups(prompts)
        packed.rows = {}
        pack(prompts, groups, packed)
        rows_of.update({fresh[i]: rows for i, rows in packed.rows.items()})
        for group in groups:
            grouped = [tasks[fresh[i]] for i in group.members]
            _allocate_shared([task for task in grouped if task.stored], group.prefix, store.pool)
        for i in members:
            task = tasks[i]
            if not task.whole:
                _continue(task)
                # Dropped pages are outside the window; another page of the sequence fills their entries.
                slots = [task.table.pages[0].slot] * task.table.dropped + [page.slot for page in task.table.pages]
                table = torch.tensor(slots[: pages_for(task.end)], device=device)
                rows_of[i] = packed.append(task.request.prompt[task.done : task.end], task.done, table=table)
        adapters.extend([tasks[members[0]].request.adapter] * (len(packed.tokens) - len(adapters)))
    packed.rows = rows_of
    store.resize()
    return packed, group_rows(adapters, device), _kv_slots(tasks, rows_of, device)


def _allocate_shared(tasks: Sequence[PrefillTask], prefix: int, pool: PagePool) -> None:
    """Allocate pages for whole prompts with a common prefix of so many tokens, whose full pages are shared."""
    shared = prefix // PAGE_TOKENS
    for task in tasks:
        if task is not tasks[0]:
            task.table.pages.extend(tasks[0].table.pages[:shared])
            pool.share(task.table.pages)
            task.first_written = shared * PAGE_TOKENS
        task.table.pages.extend(pool.allocate(pages_for(len(task.request.prompt)) - len(task.table.pages)))


def _continue(task: PrefillTask) -> None:
    """Allocate pages for the next chunk of a prompt whose first tokens are computed."""
    store, pool, tail = task.store, task.store.pool, task.match.tail
    if tail is not None and task.done == task.match.tokens:  # copy it before writing to it
        if task.in_place:
            pool.make_writable(tail)
            task.table.pages.append(tail)
        else:
            task.table.pages.extend(pool.allocate())
            store.resize()
            store.cache.copy([tail.slot], [task.table.pages[-1].slot])
            store.free([tail])
        task.match = PrefixMatch(task.match.pages, None, task.match.tail_tokens)
    missing = pages_for(task.end) - task.table.end // PAGE_TOKENS
    task.table.pages.extend(pool.allocate(max(0, missing)))
    task.first_written = task.done


def _kv_slots(tasks: Sequence[PrefillTask], rows_of: dict[int, np.ndarray], device: torch.device) -> KVSlots:
    slots, offsets, rows = ([np.zeros(0, dtype=np.int64)] for _ in range(3))
    for i, task in enumerate(tasks):
        if not task.stored:
            continue
        positions = np.arange(task.first_written, task.end)
        table = np.array([page.slot for page in task.table.pages], dtype=np.int64)
        slots.append(table[positions // PAGE_TOKENS - task.table.dropped])
        offsets.append(positions % PAGE_TOKENS)
        rows.append(rows_of[i][positions - task.done])
    arrays = (np.concatenate(parts) for parts in (slots, offsets, rows))
    return KVSlots(*(torch.from_numpy(array).to(device) for array in arrays))
