"""Prompts on their way into the KV cache: which pages they get, and the passes that compute them.

One prompt is computed once for all its samples, a prefix that several prompts of a pass share once for all of them, and one
that some page still holds not at all. A long prompt is computed in several passes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tinker_local_backend.engine.model.kv_cache import Places
from tinker_local_backend.engine.model.lora import Adapter, Spans, group_rows
from tinker_local_backend.engine.model.packing import Packed, pack, prefix_groups
from tinker_local_backend.engine.sampling.page_store import PageStore
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, Found, PagePool, PageTable, pages_of
from tinker_local_backend.engine.sampling.prompt_scores import PromptScorer
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.tickets import Ticket


@dataclass(eq=False)
class Joining:
    """Some samples of one prompt under one snapshot that begin now; several requests may bring the same prompt."""

    request: SamplingRequest
    entries: list[tuple[Ticket, list[int]]]
    """which samples of which request"""
    store: PageStore
    """where its pages are; those of a prompt that no pool of the generator's could hold are its own"""
    found: Found
    """what the pool held of the prompt; its pages have this as one more reader"""
    end: int
    """tokens of the prompt that the next pass brings to an end"""
    done: int = 0
    """tokens before that pass"""
    stored: bool = True
    """its keys go into pages; not those of a prompt that is only scored, in one pass"""
    in_place: bool = False
    """writes behind `found` in its last page itself, for want of another one"""
    table: PageTable = field(default_factory=PageTable)
    first_written: int = 0
    """tokens before are in pages of another prompt"""
    scorers: list[tuple[Ticket, PromptScorer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = self.found.tokens
        self.table.pages.extend(self.found.pages)

    @property
    def samples(self) -> int:
        return sum(len(indices) for _, indices in self.entries)

    @property
    def whole(self) -> bool:
        """The next pass computes all of the prompt, from nothing."""
        return self.done == 0 and self.complete

    @property
    def complete(self) -> bool:
        """The next pass is the last one."""
        return self.end == len(self.request.prompt)

    def give_back(self) -> None:
        """Release the pages."""
        held = [*self.table.pages]
        if self.found.tail is not None and self.found.tail not in held:
            held.append(self.found.tail)
        self.found, self.table = Found(), PageTable()
        self.store.release(held)


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """Tokens of a pass, which of them use which adapter, where their keys go, and the rows of each prompt's own tokens."""

    packed: Packed
    spans: Spans
    places: Places
    rows: dict[int, np.ndarray]


def lay_out(parts: Sequence[Joining], device: torch.device) -> PrefillPass:
    """One pass over the next piece of each prompt; whole prompts of one snapshot and one origin share their common prefixes.

    Gives the prompts their pages. All have the same store, and its pool must have the pages (see admission.py).
    """
    store = parts[0].store
    packed = Packed()
    rows_of: dict[int, np.ndarray] = {}
    adapters: list[Adapter | None] = []
    # By adapter first: the rows of one are neighbours.
    by_adapter: dict[int, dict[Hashable, list[int]]] = {}
    for i, part in enumerate(parts):
        by_scope = by_adapter.setdefault(id(part.request.adapter), {})
        by_scope.setdefault(part.request.origin.prefixes, []).append(i)
    for members in (members for by_scope in by_adapter.values() for members in by_scope.values()):
        fresh = [i for i in members if parts[i].whole]
        prompts = [parts[i].request.prompt for i in fresh]
        groups = prefix_groups(prompts)
        packed.rows = {}
        pack(prompts, groups, packed)
        rows_of.update({fresh[place]: rows for place, rows in packed.rows.items()})
        for group in groups:
            _take_together(
                [parts[fresh[place]] for place in group.members if parts[fresh[place]].stored],
                group.prefix,
                store.pool,
            )
        for i in members:
            part = parts[i]
            if not part.whole:
                _go_on(part)
                # What was dropped is hidden by the window; a page of its own stands in its place.
                slots = [part.table.pages[0].slot] * part.table.dropped + [page.slot for page in part.table.pages]
                table = torch.tensor(slots[: pages_of(part.end)], device=device)
                rows_of[i] = packed.append(part.request.prompt[part.done : part.end], part.done, table=table)
        adapters.extend([parts[members[0]].request.adapter] * (len(packed.tokens) - len(adapters)))
    packed.rows = rows_of
    store.fit()
    return PrefillPass(packed, group_rows(adapters, device), _places(parts, rows_of, device), rows_of)


def _take_together(parts: Sequence[Joining], prefix: int, pool: PagePool) -> None:
    """Pages for whole prompts that begin with the same `prefix` tokens: whole pages of it are taken once."""
    shared = prefix // PAGE_TOKENS
    for part in parts:
        if part is not parts[0]:
            part.table.pages.extend(parts[0].table.pages[:shared])
            pool.share(part.table.pages)
            part.first_written = shared * PAGE_TOKENS
        part.table.pages.extend(pool.take(pages_of(len(part.request.prompt)) - len(part.table.pages)))


def _go_on(part: Joining) -> None:
    """Pages for the next piece of a prompt of which something is there already."""
    store, pool, tail = part.store, part.store.pool, part.found.tail
    if tail is not None and part.done == part.found.tokens:  # copied before it is written to
        if part.in_place:
            pool.take_over(tail)
            part.table.pages.append(tail)
        else:
            part.table.pages.extend(pool.take())
            store.fit()
            store.cache.copy([tail.slot], [part.table.pages[-1].slot])
            store.release([tail])
        part.found = Found(part.found.pages, None, part.found.tail_tokens)
    missing = pages_of(part.end) - part.table.end // PAGE_TOKENS
    part.table.pages.extend(pool.take(max(0, missing)))
    part.first_written = part.done


def _places(parts: Sequence[Joining], rows_of: dict[int, np.ndarray], device: torch.device) -> Places:
    slots, offsets, rows = ([np.zeros(0, dtype=np.int64)] for _ in range(3))
    for i, part in enumerate(parts):
        if not part.stored:
            continue
        positions = np.arange(part.first_written, part.end)
        table = np.array([page.slot for page in part.table.pages], dtype=np.int64)
        slots.append(table[positions // PAGE_TOKENS - part.table.dropped])
        offsets.append(positions % PAGE_TOKENS)
        rows.append(rows_of[i][positions - part.done])
    arrays = (np.concatenate(parts) for parts in (slots, offsets, rows))
    return Places(*(torch.from_numpy(array).to(device) for array in arrays))
