"""Batched generation with continuous batching: sequences join after a prefill and leave as soon as they end.

`Generator.step()` is one turn of the crank: decode one token for every running sequence, then prefill what may join, no more
tokens at a time than keep the running ones from waiting for long. A tenant's requests are taken in the order of their arrival,
tenants in turns (shares.py); so are their tokens where many run (decode_turns.py). A sequence takes pages of the KV cache as it
grows; when none is left, the youngest one begins again later, and draws the same tokens.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.memory import most_tokens, out_of_memory
from tinker_local_backend.engine.model.paged_attention import DecodePlan
from tinker_local_backend.engine.sampling.admission import Admission
from tinker_local_backend.engine.sampling.allowance import Allowance
from tinker_local_backend.engine.sampling.decode_turns import DecodeTurns, youngest_of
from tinker_local_backend.engine.sampling.noise import mix_seed
from tinker_local_backend.engine.sampling.page_store import PageStore
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS, PagePool, PageTable, pages_of
from tinker_local_backend.engine.sampling.prefill import Joining, lay_out
from tinker_local_backend.engine.sampling.prompt_scores import PromptScorer
from tinker_local_backend.engine.sampling.requests import SamplerLimits
from tinker_local_backend.engine.sampling.running import DecodeBatch, Running, record_topk
from tinker_local_backend.engine.sampling.shares import scores, tenant_of
from tinker_local_backend.engine.sampling.stopping import append_token
from tinker_local_backend.engine.sampling.tickets import Ticket, diverged
from tinker_local_backend.engine.sampling.token_choice import next_tokens
from tinker_local_backend.engine.sampling.waits import SamplerStats, WaitTimes
from tinker_local_backend.errors import ReplicaError, RequestError, SamplingError

TOKENS_PER_SCORING = 16
"""That running sequences draw between two passes of prompts that are only scored: such a pass takes as long as many of theirs."""

AHEAD = PAGE_TOKENS // 4
"""Tokens before the end of its last page at which a sequence may get the next one."""


class Generator:
    """Runs sampling requests on a base model. Not thread-safe: the engine's worker thread owns it.

    Args:
        kv_budget_tokens: bound on the tokens of the KV cache, rounded up to whole pages; requests beyond it wait.
        prefill_tokens: prompts are prefilled in passes of at most this many tokens; None: what is fastest on the device.
        random_seed: draws a seed for a request that names none.
    """

    fixed_pages = False  # the KV cache is allocated once
    tokens_per_step = 1
    step_overhead = 8
    """Rows that a step could have besides for the time that it takes before its first one."""

    def __init__(
        self,
        model: BaseModel,
        kv_budget_tokens: int,
        random_seed: Callable[[], int],
        prefill_tokens: int | None = None,
        max_running: int = 512,
    ):
        self._model = model
        self.kv_budget_tokens = kv_budget_tokens
        pages = pages_of(kv_budget_tokens)
        self._cache = model.new_cache(pages if self.fixed_pages else None)
        self._pool = PagePool(pages, self.fixed_pages)
        self._allowance = Allowance(max_running, prefill_tokens or most_tokens(model.device), self._pool.most)
        self._store = PageStore(self._pool, self._cache)
        self._line = Admission(
            self._store, lambda pages: PageStore(PagePool(pages), model.new_cache()), self._allowance, random_seed
        )
        self._running: list[Running] = []
        self._turns = DecodeTurns(self._line.waiting, self.step_overhead, model.heads, model.device)
        self._waits = WaitTimes()
        self._restarts = self._failures = 0
        self._until_scoring = 0
        """tokens that each running sequence draws before the next prompt is only scored"""

    @property
    def busy(self) -> bool:
        return bool(self._line.waiting or self._running or self._line.long)

    @property
    def limits(self) -> SamplerLimits:
        return SamplerLimits(self.kv_budget_tokens)

    @property
    def running(self) -> int:
        """Sequences that have pages of the cache."""
        return len(self._running)

    @property
    def stats(self) -> SamplerStats:
        """May be read on any thread."""
        return SamplerStats(
            waiting=len(self._line.waiting) + len(self._line.long),
            running=len(self._running),
            pages=self._pool.capacity,
            pages_read=self._pool.read,
            pages_idle=self._pool.idle,
            restarts=self._restarts,
            out_of_memory=self._failures,
            longest_wait=self._waits.longest,
            wait_p50=self._waits.quantile(0.5),
            wait_p99=self._waits.quantile(0.99),
        )

    def add(self, ticket: Ticket) -> None:
        self._line.add(ticket)

    def forget(self, tenant: str = "") -> None:
        """Drop the prefixes of a tenant's ended sequences and, with nothing else there, the cache's memory. "": of all tenants.

        Called before training and before a state is saved: training needs memory, and whatever is sampled afterwards must
        not depend on what was sampled before (a resumed run has none of it).
        """
        self._pool.forget(lambda scope: not tenant or not scope or scope[0] in ("", tenant))
        if self._pool.capacity == 0:
            self._cache.resize(0)

    @property
    def tenants(self) -> Collection[str]:
        """Those who wait or run."""
        long = {tenant_of(ticket) for part in self._line.long for ticket, _ in part.entries}
        return {tenant_of(row.ticket) for row in self._running} | long | set(self._line.waiting.tenants)

    @torch.inference_mode()
    def step(self) -> Mapping[str, int]:
        """Decode one token for the running sequences whose turn it is, then prefill waiting requests if any fits.

        Returns how many tokens were computed for each tenant, and what the step itself counts for.
        """
        joining: list[Joining] = []
        self._line.waiting.spent.clear()
        try:
            self._drop_abandoned()
            if self._running:
                self._decode()
            self._make_way()
            if not self._line.others_first(map(tenant_of, {row.ticket for row in self._running})):
                self._line.next_pass(joining, len(self._running), scoring=self._may_score())
            if joining:
                self._prefill(joining)
        except Exception as error:
            # One pass serves many requests; when it fails none of its sequences can go on.
            parts = [*joining, *(part for part in self._line.long if part not in joining)]
            tickets = [*(row.ticket for row in self._running), *(t for part in parts for t, _ in part.entries)]
            affected = sorted({id(t): t for t in tickets}.values(), key=lambda ticket: ticket.order)
            rows = max(len(self._running), sum(part.samples for part in parts))
            self._running, self._line.long = [], []
            self._turns.clear()
            self._model.forget_prepared()
            self._cache.resize(0)
            self._recover(affected, rows, error)
            self._pool.reset()
        else:
            self._allowance.succeeded()
            self._pool.eager = self._allowance.pages
            if not self.busy:  # so that neither memory nor rounding depends on what was sampled before
                self._model.forget_prepared()
        return self._line.waiting.spent

    def _recover(self, affected: Sequence[Ticket], rows: int, error: Exception) -> None:
        """Out of memory: begin the requests again, fewer at a time. Anything else: each of them gets the error."""
        retry = out_of_memory(error) and (rows > 1 or self._allowance.prefill_tokens > 1)
        if not retry:
            # As text: the traceback's frames would keep the failed pass's tensors alive.
            cause, remote = (
                f"a sampling pass failed: {type(error).__name__}: {error}",
                "a sampling pass failed; try again",
            )
            if out_of_memory(error):
                cause += " (use a smaller model or max_tokens, or lower TINKER_LOCAL_KV_CACHE_TOKENS)"
                remote = "there was too little memory for a sampling pass; send shorter prompts or a smaller max_tokens"
            for ticket in affected:
                ticket.finish(error if isinstance(error, ReplicaError) else SamplingError(cause, remote=remote))
            return
        self._failures += 1
        self._allowance.reduce(rows, self._pool.capacity)
        self._pool.eager = self._allowance.pages
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        for ticket in reversed(affected):
            ticket.begin_again()
            self._line.line_up(ticket)

    def fail_all(self, error: BaseException) -> None:
        """Drop everything waiting and running, and tell its owners."""
        tickets = [
            *self._line.waiting,
            *(row.ticket for row in self._running),
            *(t for p in self._line.long for t, _ in p.entries),
        ]
        self._line.waiting.clear()
        self._running, self._line.long = [], []
        self._turns.clear()
        for ticket in {id(t): t for t in tickets}.values():
            ticket.finish(error)

    def _drop_abandoned(self) -> None:
        """Of the running; who waits is looked at when its turn has come, so that a long line costs nothing."""
        dropped = [ticket for ticket in {row.ticket for row in self._running} if ticket.dropped]
        if dropped:
            rows = [row for row in self._running if row.ticket in dropped]
            self._remove(rows)
        for long in [part for part in self._line.long if all(ticket.dropped for ticket, _ in part.entries)]:
            long.give_back()
            self._line.long.remove(long)

    # Sharing

    def _may_score(self) -> bool:
        """Whether prompts that are only scored may be computed now: those that run are due some tokens after each such pass."""
        if not self._running:
            return True
        self._until_scoring = max(0, self._until_scoring - self.tokens_per_step)
        return self._until_scoring == 0

    def _make_way(self) -> None:
        """A tenant who waits and has less than his share of the places or pages gets them from those who have more.

        Their sequences that have drawn least begin again later, and draw the same tokens.
        """
        first = self._line.waiting.first() if self._line.waiting.shared else None
        if first is None:
            return
        tenant, rows = tenant_of(first), Counter(tenant_of(row.ticket) for row in self._running)
        present = rows.keys() | {tenant}
        if len(present) < 2:
            return
        places, pages = self._allowance.running // len(present), self._pool.most // len(present)
        wanted = min(len(first.todo), max(1, places) - rows[tenant])
        needed = min(pages, pages_of(len(first.request.prompt)) + max(0, wanted))
        gone: list[Running] = []
        while self._running:
            too_few = wanted > self._allowance.running - len(self._running)
            too_full = wanted > 0 and needed > self._pool.available
            others = [name for name in rows if name != tenant and rows[name]]
            if not others or not (too_few or too_full):
                break
            most = max(others, key=lambda name: rows[name])
            theirs = [row for row in self._running if tenant_of(row.ticket) == most]
            if not ((too_few and rows[most] > max(1, places)) or sum(len(row.table.pages) for row in theirs) > pages):
                break
            row = min(theirs, key=lambda row: (len(row.sequence.tokens), [-part for part in row.age]))
            rows[most] -= 1
            gone.append(row)
            self._begin_again(row)
        self._turns.remove(gone)

    def _begin_again(self, row: Running) -> None:
        """Later: for now its pages go to others."""
        self._restarts += 1
        self._running.remove(row)
        self._store.release(row.table.pages)
        row.ticket.give_back([row.index])
        self._line.line_up(row.ticket)

    # Joining

    def _prefill(self, joining: Sequence[Joining]) -> None:
        if any(scores(ticket) for part in joining for ticket, _ in part.entries):
            self._until_scoring = TOKENS_PER_SCORING
        for part in joining:
            if part.done == 0 and not part.scorers:
                part.scorers = [
                    (ticket, PromptScorer(self._model, ticket.request, ticket.seed))
                    for ticket, _ in part.entries
                    if ticket.wants_scores and ticket.seed is not None
                ]
        device, cache = self._model.device, joining[0].store.cache
        prefill = lay_out(joining, device)
        packed = prefill.packed
        hidden_TH = self._model.hidden_states(
            *packed.on(device),
            PackedPlan(packed.segments, cache, prefill.places),
            prefill.spans,
        )
        started: list[Running] = []
        last_rows: list[int] = []
        for i, part in enumerate(joining):
            rows = prefill.rows[i]
            spoiled = self._score(part, hidden_TH, rows)
            part.done = part.end
            prompt = part.request.prompt
            if spoiled:
                part.store.spoil(part.table.pages)
            elif part.stored and part.samples and not part.table.dropped:
                whole = len(part.table.pages) if part.complete else part.done // PAGE_TOKENS
                scope = part.request.origin.prefixes
                self._pool.hold(part.request.adapter, prompt[: part.done], part.table.pages[:whole], scope)
            if not part.complete:
                self._drop_unseen(part.table, part.done, part.store)
                continue
            samples = self._start(part)
            started.extend(samples)
            last_rows.extend([int(rows[-1])] * len(samples))
        if started:
            batch = DecodeBatch(started, self._model.heads, device)
            self._emit(batch, hidden_TH[torch.tensor(last_rows, device=device)])
            self._running.extend(batch.rows)
            self._turns.extend(batch)

    def _score(self, part: Joining, hidden_TH: torch.Tensor, rows: np.ndarray) -> bool:
        """Scores of this piece of the prompt. Returns whether the model gave NaN."""
        spoiled = False
        for ticket, scorer in part.scorers:
            if ticket.finished:
                continue
            try:
                scorer.add(hidden_TH[torch.from_numpy(rows).to(hidden_TH.device)])
            except RequestError as error:
                ticket.finish(error)
                spoiled = True
                continue
            if part.complete:
                ticket.prompt = scorer.scores
        for ticket, _ in part.entries:
            if part.complete and ticket.request.num_samples == 0:
                self._served(ticket)
                ticket.succeed()
        return spoiled

    def _start(self, part: Joining) -> list[Running]:
        """Sequences of the samples of a prompt that is there. The first one goes on in its last page, the others in copies."""
        table, length = part.table, len(part.request.prompt)
        begun = length % PAGE_TOKENS > 0
        whole = table.pages[:-1] if begun else table.pages
        running: list[Running] = []
        copies: list[int] = []
        for ticket, indices in part.entries:
            for index in indices:
                own = table
                if running:
                    self._pool.share(whole)
                    own = PageTable([*whole, *(self._pool.take() if begun else [])], table.dropped)
                    copies.extend([own.pages[-1].slot] if begun else [])
                assert ticket.seed is not None
                running.append(Running(ticket, index, ticket.sequences[index], mix_seed(ticket.seed, index), own))
            if indices:
                self._served(ticket)
                if ticket.cached_tokens is None:
                    ticket.cached_tokens = part.found.tokens
        if not running:
            part.store.release(table.pages)
        self._store.fit()
        self._cache.copy([table.pages[-1].slot] * len(copies) if copies else [], copies)
        return running

    def _served(self, ticket: Ticket) -> None:
        if not ticket.served:
            ticket.served = True
            self._waits.add(time.monotonic() - ticket.arrived)

    # Going on

    def _decode(self) -> None:
        batch = self._turns.next_batch(self._running)
        self._make_room(batch)
        if not batch.rows:
            return
        self._turns.charge(batch.rows)
        plan = DecodePlan(self._cache, batch.tables(self._store), batch.lengths_R)
        self._emit(batch, self._model.hidden_states(batch.newest_R, plan.lengths, plan, batch.spans))

    def _make_room(self, batch: DecodeBatch) -> None:
        """A page for each sequence whose last one is full; the youngest make way where the pool has none left.

        Where there are enough, sequences that are about to need one get it now: tables change together and seldom.
        """
        growing = batch.near_end(0)
        if not growing:
            return
        soon = batch.near_end(AHEAD)
        if len(soon) <= self._pool.spare:
            growing = soon
        growing = [batch.rows[place] for place in growing]
        for row in growing:
            self._drop_unseen(row.table, row.length, self._store)
        while len(growing) > self._pool.available:
            if self._line.long_takes_pages:
                self._line.send_back_long()
                continue
            youngest = youngest_of(self._running, self._pool.most)
            self._turns.remove([youngest])
            growing = [row for row in growing if row is not youngest]
            self._begin_again(youngest)
        for row, page in zip(growing, self._pool.take(len(growing)), strict=True):
            row.table.pages.append(page)
        self._store.fit()
        if growing:
            batch.grow(growing)

    def _drop_unseen(self, table: PageTable, length: int, store: PageStore) -> None:
        """Give back the pages that no layer sees from position `length` on."""
        window = self._model.sliding_window
        if window is not None and (gone := table.drop_before(length - window + 1)):
            store.release(gone)

    def _emit(self, batch: DecodeBatch, hidden_RH: torch.Tensor) -> None:
        """Sample one token for each of these rows, and let finished ones go."""
        logits_RV = self._model.logits(hidden_RH, batch.spans)
        tokens_R, logprobs_R, tempered_RV = next_tokens(logits_RV, batch.params, batch.drawn_R)
        if batch.asks_topk:
            record_topk(batch.rows, tempered_RV)
        batch.advance(tokens_R)
        if finished := self._append(batch.rows, tokens_R.tolist(), logprobs_R.tolist()):
            batch.remove(finished)

    def _append(self, rows: Sequence[Running], tokens: Sequence[int], logprobs: Sequence[float]) -> list[Running]:
        """One more token for each of these rows. Those that end with it go, and are returned."""
        finished: list[Running] = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            sequence, request = row.sequence, row.ticket.request
            if not math.isfinite(logprob):
                row.broken = True
                row.ticket.finish(diverged(f"after {row.length + 1} tokens"))
                finished.append(row)
                continue
            if append_token(sequence, token, logprob, request, self._model.tokenizer):
                finished.append(row)
        if finished:
            self._remove(finished)
        for row in finished:
            row.ticket.sample_done()
        return finished

    def _remove(self, rows: Sequence[Running]) -> None:
        """End these sequences; what their pages hold stays findable until somebody needs them."""
        gone = {id(row) for row in rows}
        self._running = [row for row in self._running if id(row) not in gone]
        self._turns.remove(rows)
        for row in rows:
            if row.broken:
                self._store.spoil(row.table.pages)
            elif not row.table.dropped:
                request = row.ticket.request
                self._pool.hold(request.adapter, row.held, row.table.pages, request.origin.prefixes)
            self._store.release(row.table.pages)
