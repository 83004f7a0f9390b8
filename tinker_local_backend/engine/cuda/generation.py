"""A generator that decodes in bursts of captured steps over a KV cache of fixed pages.

No step is in flight between two calls of `step`, so the base class admits, cancels and yields to training as usual. Tokens after
a stop are dropped: about half a burst per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from tinker_local_backend.engine.cuda.adapter_slots import SLOTS, layouts_of
from tinker_local_backend.engine.cuda.decoder import BUCKETS, BURST, Decoder
from tinker_local_backend.engine.cuda.graphs import Graphs
from tinker_local_backend.engine.cuda.step import DecodeRow
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.sampling.constraints import masks_of
from tinker_local_backend.engine.sampling.decode_batch import DecodeBatch, Running, record_topk
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, pages_for


class BurstGenerator(Generator):
    """A Generator whose decode steps are captured by `graphs`.

    With `exact_rows` every step has this number of rows and every prompt is prefilled alone, so that a sample's bits depend only
    on its request, if equally sized products have this property (docs/gpu.md).
    """

    fixed_pages = True
    tokens_per_step = BURST
    step_overhead = 64

    def __init__(
        self,
        model: BaseModel,
        kv_budget_tokens: int,
        random_seed: Callable[[], int],
        graphs: Graphs,
        prefill_tokens: int | None = None,
        max_running: int = BUCKETS[-1],
        exact_rows: int | None = None,
    ):
        most = min(max_running, exact_rows or BUCKETS[-1])
        super().__init__(model, kv_budget_tokens, random_seed, prefill_tokens, most)
        longest = min(model.context_length, kv_budget_tokens)
        self.decoder = Decoder(model, self._cache, graphs, longest, exact_rows)
        self._scheduler.isolates_prompts = exact_rows is not None

    def _emit(self, batch: DecodeBatch, hidden_RH: torch.Tensor) -> None:
        # Sums in an eager choice of tokens depend on the batch size. Skip it: the next step feeds the prompts' last tokens again.
        if not self._scheduler.isolates_prompts:
            super()._emit(batch, hidden_RH)

    def _decode(self) -> None:
        batch = self._batches.next_batch(self._running)
        steps = self._allocate_ahead(batch)
        rows = batch.rows
        self._batches.clear()  # the decoder keeps its own arrays
        self._batches.charge(rows, steps)
        for group in list(_by_slots(rows)):
            self._burst(group, steps)

    def _allocate_ahead(self, batch: DecodeBatch) -> int:
        """Allocate pages for the next steps of every sequence. Returns the steps: fewer than BURST if the pool is nearly full."""
        rows = batch.rows
        # Top-k logprobs are read from a step's logits, which the next step overwrites. The host computes
        # the masks of a constraint after each token, and draws tokens from changed logits.
        steps = 1 if any(map(_needs_the_host, rows)) else BURST
        for row in rows:
            self._free_unseen(row.table, row.length, self._store)
        while steps > 1:
            missing = [
                max(0, pages_for(min(row.length + steps, _end(row))) - row.table.end // PAGE_TOKENS) for row in rows
            ]
            if sum(missing) <= self._pool.available:
                for row, count in zip(rows, missing, strict=True):
                    row.table.pages.extend(self._pool.allocate(count))
                return steps
            steps //= 2
        self._allocate_pages(batch)
        return 1

    def _burst(self, rows: Sequence[Running], steps: int) -> None:
        matchers = [row.matcher for row in rows]
        allowed_RW = masks_of(matchers) if any(matcher is not None for matcher in matchers) else None
        wants_logits = any(row.ticket.request.topk_logprobs or row.logits is not None for row in rows)
        burst = self.decoder.run([_decode_row(row) for row in rows], steps, allowed_RW, wants_logits)
        if burst.tempered is not None:
            record_topk(rows, burst.tempered)
        all_tokens, all_logprobs, all_constrained = burst.tokens, burst.logprobs, burst.constrained
        if burst.tempered is not None and any(row.logits is not None for row in rows):  # then there was one step
            batch = DecodeBatch(rows, self._model.device)
            drawn = batch.draw_changed(burst.tempered, allowed_RW)
            all_tokens, all_logprobs, constrained = (values.cpu().numpy()[None] for values in drawn)
            all_constrained = None if allowed_RW is None else constrained
        active = dict(enumerate(rows))
        for step, (tokens, logprobs) in enumerate(zip(all_tokens, all_logprobs, strict=True)):
            columns = list(active)
            constrained = None if all_constrained is None else all_constrained[step][columns].tolist()
            ended = self._append(
                list(active.values()), tokens[columns].tolist(), logprobs[columns].tolist(), constrained
            )
            ended_ids = {id(row) for row in ended}
            active = {i: row for i, row in active.items() if id(row) not in ended_ids}
            if not active:
                break


def _needs_the_host(row: Running) -> bool:
    return bool(row.ticket.request.topk_logprobs) or row.matcher is not None or row.logits is not None


def _by_slots(running: Sequence[Running]) -> Iterator[list[Running]]:
    """Split the rows into groups whose adapters fit the slots: at most SLOTS, with one layout on routed experts."""
    rows: list[Running] = []
    adapters: dict[int, Adapter] = {}
    for row in running:
        adapter = row.ticket.request.adapter
        added = {} if adapter is None else {id(adapter): adapter}
        together = {**adapters, **added}
        if rows and (len(together) > SLOTS or len(layouts_of(together.values())) > 1):
            yield rows
            rows, together = [], added
        rows.append(row)
        adapters = together
    if rows:
        yield rows


def _end(row: Running) -> int:
    """Position of the last token that `max_tokens` allows, which is never fed."""
    request = row.ticket.request
    return len(request.prompt) + request.max_tokens - 1


def _decode_row(row: Running) -> DecodeRow:
    return DecodeRow(
        request=row.ticket.request,
        token=row.sequence.tokens[-1] if row.sequence.tokens else row.ticket.request.prompt[-1],
        position=row.length,
        end=_end(row),
        pages=[page.slot for page in row.table.pages],
        first_page=row.table.dropped,
        seed=row.seed,
        shift=row.shift,
        drawn=len(row.sequence.tokens),
    )
