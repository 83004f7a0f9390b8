"""Batched generation with continuous batching: sequences join after a prefill and leave as soon as they end.

`Generator.step()` is one turn of the crank: admit what fits, or else decode one token for every running sequence. One
prompt is prefilled once for all its samples, a prefix that several prompts share once for all of them, and one that some row
of the cache still holds not at all.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tinker_local_backend.engine.attention import DecodePlan, PackedPlan
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.lora import Adapter, Spans, group_rows
from tinker_local_backend.engine.memory import most_tokens, out_of_memory
from tinker_local_backend.engine.noise import mix_seed
from tinker_local_backend.engine.packing import Packed, pack, prefix_groups
from tinker_local_backend.engine.prefix_cache import PrefixCache
from tinker_local_backend.engine.prompt_scores import score_prompt
from tinker_local_backend.engine.requests import SamplingRequest
from tinker_local_backend.engine.sampler import RowParams, next_tokens
from tinker_local_backend.engine.tickets import SampledSequence, Ticket, diverged
from tinker_local_backend.errors import RequestError, SamplingError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Running:
    """A sequence that holds a row of the KV cache."""

    ticket: Ticket
    sequence: SampledSequence
    seed: int
    length: int
    """tokens whose keys are in the cache"""
    broken: bool = False
    """the model gave NaN: what its row holds must not be used again"""

    @property
    def held(self) -> tuple[int, ...]:
        """Those tokens."""
        prompt = self.ticket.request.prompt
        return (*prompt, *self.sequence.tokens[: self.length - len(prompt)])


@dataclass(eq=False)
class _Admitted:
    """Some samples of one prompt under one snapshot that get their rows now; several requests may bring the same prompt."""

    request: SamplingRequest
    entries: list[tuple[Ticket, int]]
    row: int | None = None
    """the first of its rows; None when the prompt is only scored"""
    cached: int = 0
    """tokens of the prompt whose keys the row already holds"""

    @property
    def count(self) -> int:
        return sum(count for _, count in self.entries)


@dataclass(frozen=True, eq=False)
class _Pass:
    """A prefill: its tokens, which of them use which adapter, and what is copied between rows afterwards."""

    packed: Packed
    spans: Spans
    copies: list[tuple[int, int, int]]
    """(source row, target row, tokens): a shared prefix is computed into one row only"""


@dataclass(frozen=True, eq=False)
class _Batch:
    """What stays the same from one decode step to the next while no sequence joins or leaves."""

    params: RowParams
    spans: Spans
    stop_texts: bool


class Generator:
    """Runs sampling requests on a base model. Not thread-safe: the engine's worker thread owns it.

    Args:
        kv_budget_tokens: bound on (sequences x longest) tokens of KV cache; requests beyond it wait.
        prefill_tokens: prompts are prefilled in passes of at most this many tokens; None: what is fastest on the device.
        random_seed: draws a seed for a request that names none.
    """

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
        self._cache = model.new_cache(kv_budget_tokens)
        self._prefixes = PrefixCache(self._cache)
        self._random_seed = random_seed
        self._prefill_tokens = prefill_tokens or most_tokens(model.device)
        self._max_running = max_running
        self._waiting: deque[Ticket] = deque()
        self._running: list[_Running] = []
        self._batch: _Batch | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """Sequences that hold a row of the cache."""
        return len(self._running)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def forget(self) -> None:
        """Drop the prefixes of ended sequences and, with nothing running, the cache's memory.

        Called before training: memory is needed then, and whatever is sampled afterwards must not depend on what was
        sampled before (a resumed run has none of it).
        """
        self._prefixes.forget(len(self._running))

    @torch.inference_mode()
    def step(self) -> None:
        """Admit and prefill waiting requests if any fits, else decode one token for all running sequences."""
        self._drop_abandoned()
        admitted: list[_Admitted] = []
        try:
            self._admit(admitted)
            if admitted:
                self._prefill(admitted)
            elif self._running:
                self._decode()
        except Exception as error:
            # One pass serves many requests; when it fails none of its sequences can go on.
            tickets = [*(row.ticket for row in self._running), *(t for group in admitted for t, _ in group.entries)]
            affected = list({id(ticket): ticket for ticket in tickets}.values())
            rows = max(len(self._running), sum(group.count for group in admitted))
            self._running.clear()
            self._batch = None
            self.forget()
            self._recover(affected, rows, error)

    def _recover(self, affected: Sequence[Ticket], rows: int, error: Exception) -> None:
        """Out of memory: begin the requests again, fewer at a time. Anything else: each of them gets the error."""
        retry = out_of_memory(error) and (rows > 1 or self._prefill_tokens > 1)
        if not retry:
            # As text: the traceback's frames would keep the failed pass's tensors alive.
            cause = f"{type(error).__name__}: {error}"
            if out_of_memory(error):
                cause += " (use a smaller model or max_tokens, or lower TINKER_LOCAL_KV_CACHE_TOKENS)"
            for ticket in affected:
                ticket.finish(SamplingError(f"a sampling pass failed: {cause}"))
            return
        if rows > 1:  # with fewer, the prompts alone were too much
            self._max_running = rows // 2
        self._prefill_tokens = max(1, self._prefill_tokens // 2)
        logger.warning(
            "out of memory with %d sequences; going on with at most %d, and %d prompt tokens in a pass",
            rows,
            self._max_running,
            self._prefill_tokens,
        )
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        for ticket in reversed(affected):
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            ticket.begin_again()
            self._waiting.appendleft(ticket)

    def fail_all(self, error: BaseException) -> None:
        """Drop everything waiting and running, and tell its owners."""
        tickets = {id(t): t for t in [*self._waiting, *(row.ticket for row in self._running)]}
        self._waiting.clear()
        self._running.clear()
        for ticket in tickets.values():
            ticket.finish(error)

    def _drop_abandoned(self) -> None:
        if any(ticket.dropped for ticket in self._waiting):
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.dropped)
        for row in reversed(range(len(self._running))):
            if self._running[row].ticket.dropped:
                self._remove_row(row)

    # Joining

    def _admit(self, admitted: list[_Admitted]) -> None:
        """Take what fits from the front of the line: whole requests, or as many of one's samples as fit."""
        rows, tokens = len(self._running), 0
        length = max((row.ticket.request.total_length for row in self._running), default=0)
        groups: dict[tuple[int, tuple[int, ...]], _Admitted] = {}
        while self._waiting:
            ticket = self._waiting[0]
            request = ticket.request
            if admitted and tokens + len(request.prompt) > self._prefill_tokens:
                break
            wanted = request.num_samples - ticket.started
            new_length = max(length, request.total_length) if wanted else length
            room = min(self._max_running, self._cache.rows_that_fit(new_length)) - rows
            count = min(wanted, room)
            if wanted and count < 1:
                break
            key = (id(request.adapter), request.prompt)
            if key not in groups:
                groups[key] = _Admitted(request, [])
                admitted.append(groups[key])
                tokens += len(request.prompt)
            groups[key].entries.append((ticket, count))
            ticket.started += count
            if ticket.seed is None:
                ticket.seed = request.seed if request.seed is not None else self._random_seed()
            rows, length = rows + count, new_length
            if count < wanted:
                break
            self._waiting.popleft()
        if rows > len(self._running):
            self._prefixes.make_room(rows, length)

    def _prefill(self, admitted: list[_Admitted]) -> None:
        self._batch = None
        self._claim_rows(admitted)
        plan = self._lay_out(admitted)
        packed = plan.packed
        device = self._model.device
        hidden_TH = self._model.hidden_states(
            torch.tensor(packed.tokens, device=device),
            torch.tensor(packed.positions, device=device),
            PackedPlan(packed.segments, self._cache),
            plan.spans,
        )
        for source, target, tokens in plan.copies:
            self._cache.copy_row(source, target, tokens)
        first_new = len(self._running)
        last_rows: list[int] = []
        for i, group in enumerate(admitted):
            self._score(group, hidden_TH, packed.rows[i])
            if group.row is None:
                continue
            request = group.request
            for row in range(group.row + 1, group.row + group.count):
                self._cache.copy_row(group.row, row, len(request.prompt))
            self._prefixes.hold(group.row, request.adapter, request.prompt)
            last_rows.extend([int(packed.rows[i][-1])] * group.count)
            for ticket, count in group.entries:
                if not ticket.sequences:  # later portions find what its own first one prefilled
                    ticket.cached_tokens = group.cached
                self._running.extend(self._start(ticket, count))
        if last_rows:
            self._emit(hidden_TH[torch.tensor(last_rows, device=device)], first_new)

    def _claim_rows(self, admitted: Sequence[_Admitted]) -> None:
        """Give each group its rows, the first of them with what some row of the cache already holds of the prompt."""
        row = len(self._running)
        end = row + sum(group.count for group in admitted)
        for group in admitted:
            if group.count == 0:
                continue
            group.row = row
            scoring = any(ticket.wants_scores for ticket, _ in group.entries)  # needs every hidden state
            reuse = None if scoring else self._prefixes.find(group.request.adapter, group.request.prompt)
            group.cached = reuse[1] if reuse else 0
            self._prefixes.claim(row, end, reuse)
            for copy in range(row + 1, row + group.count):
                self._prefixes.claim(copy, end, None)
            row += group.count

    def _lay_out(self, admitted: Sequence[_Admitted]) -> _Pass:
        """One pass over what is left of the prompts; those of one snapshot share their common prefixes."""
        packed = Packed()
        rows_of: dict[int, np.ndarray] = {}
        copies: list[tuple[int, int, int]] = []
        adapters: list[Adapter | None] = []
        by_adapter: dict[int, list[int]] = {}
        for i, group in enumerate(admitted):
            by_adapter.setdefault(id(group.request.adapter), []).append(i)
        for members in by_adapter.values():
            fresh = [i for i in members if not admitted[i].cached]
            prompts = [admitted[i].request.prompt for i in fresh]
            groups = prefix_groups(prompts)
            cache_rows = [admitted[i].row for i in fresh]
            packed.rows = {}
            pack(prompts, groups, packed, cache_rows)
            rows_of.update({fresh[place]: rows for place, rows in packed.rows.items()})
            for group in groups:
                holders = [row for place in group.members if (row := cache_rows[place]) is not None]
                copies.extend((holders[0], row, group.prefix) for row in holders[1:] if group.prefix)
            for i in members:
                if cached := admitted[i].cached:
                    rest = admitted[i].request.prompt[cached:]
                    rows_of[i] = packed.append(rest, cached, row=admitted[i].row)
            adapter = admitted[members[0]].request.adapter
            adapters.extend([adapter] * (len(packed.tokens) - len(adapters)))
        packed.rows = rows_of
        return _Pass(packed, group_rows(adapters, self._model.device), copies)

    def _score(self, group: _Admitted, hidden_TH: torch.Tensor, rows: np.ndarray) -> None:
        for ticket, _ in group.entries:
            request = ticket.request
            if ticket.wants_scores:
                assert ticket.seed is not None
                hidden = hidden_TH[torch.from_numpy(rows).to(hidden_TH.device)]
                try:
                    ticket.prompt = score_prompt(self._model, hidden, request, ticket.seed)
                except RequestError as error:
                    ticket.finish(error)
            if request.num_samples == 0:
                ticket.succeed()

    def _start(self, ticket: Ticket, count: int) -> list[_Running]:
        assert ticket.seed is not None
        first = len(ticket.sequences)
        ticket.sequences.extend(SampledSequence() for _ in range(count))
        return [
            _Running(ticket, ticket.sequences[i], mix_seed(ticket.seed, i), len(ticket.request.prompt))
            for i in range(first, first + count)
        ]

    # Going on

    def _decode(self) -> None:
        rows = self._running
        device = self._model.device
        if self._batch is None:
            self._batch = self._new_batch(rows)
        lengths = [row.length for row in rows]
        lengths_R = torch.tensor(lengths, device=device)
        tokens_R = torch.tensor([row.sequence.tokens[-1] for row in rows], device=device)
        plan = DecodePlan(self._cache, len(rows), lengths_R, max(lengths))
        hidden_RH = self._model.hidden_states(tokens_R, lengths_R, plan, self._batch.spans)
        for row in rows:
            row.length += 1
        self._emit(hidden_RH, 0)

    def _new_batch(self, rows: Sequence[_Running]) -> _Batch:
        requests = [row.ticket.request for row in rows]
        params = RowParams(
            [request.temperature for request in requests],
            [request.top_k for request in requests],
            [request.top_p for request in requests],
            [row.seed for row in rows],
            self._model.device,
        )
        spans = group_rows([request.adapter for request in requests], self._model.device)
        return _Batch(params, spans, any(request.stop.texts for request in requests))

    def _emit(self, hidden_RH: torch.Tensor, first_row: int) -> None:
        """Sample one token for each running row from `first_row` on, and let finished rows go."""
        rows = self._running[first_row:]
        batch = self._batch if first_row == 0 and self._batch is not None else self._new_batch(rows)
        positions = np.array([len(row.sequence.tokens) for row in rows], dtype=np.uint64)
        logits_RV = self._model.logits(hidden_RH, batch.spans)
        tokens_R, logprobs_R, tempered_RV = next_tokens(logits_RV, batch.params, positions)
        self._record_topk(rows, tempered_RV)
        finished: list[int] = []
        for i, (row, token, logprob) in enumerate(zip(rows, tokens_R.tolist(), logprobs_R.tolist(), strict=True)):
            if not math.isfinite(logprob):
                row.broken = True
                row.ticket.finish(diverged(f"after {row.length} tokens"))
                continue
            sequence, request = row.sequence, row.ticket.request
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if token in request.stop.token_ids or (
                batch.stop_texts and _ends_with_stop_text(sequence.tokens, request.stop.texts, self._model.tokenizer)
            ):
                sequence.stop_reason = "stop"
            elif len(sequence.tokens) < request.max_tokens:
                continue
            finished.append(first_row + i)
        # From the back, so that filling a gap with the last row never moves a row that is about to leave.
        done = [self._running[i].ticket for i in finished]
        for i in reversed(finished):
            self._remove_row(i)
        for ticket in done:
            ticket.sample_done()

    def _record_topk(self, rows: Sequence[_Running], tempered_RV: torch.Tensor) -> None:
        asking = [i for i, row in enumerate(rows) if row.ticket.request.topk_logprobs]
        if not asking:
            return
        logprobs = torch.log_softmax(tempered_RV[torch.tensor(asking, device=tempered_RV.device)], dim=-1)
        values, ids = logprobs.topk(max(rows[i].ticket.request.topk_logprobs for i in asking), dim=-1)
        for i, own_ids, own_values in zip(asking, ids.cpu().numpy(), values.cpu().numpy(), strict=True):
            k = rows[i].ticket.request.topk_logprobs
            rows[i].sequence.topk.append((own_ids[:k], own_values[:k]))

    def _remove_row(self, index: int) -> None:
        """End a row; what it held stays findable behind the running ones."""
        self._batch = None
        last = len(self._running) - 1
        ended = self._running[index]
        if ended.broken:
            self._prefixes.clear(index)  # before the swap, which leaves the end of a longer row where it is
        if index != last:
            self._prefixes.swap(index, last, ended.length, self._running[last].length)
            self._running[index] = self._running[last]
        self._running.pop()
        if not ended.broken:
            self._prefixes.hold(last, ended.ticket.request.adapter, ended.held)


def _ends_with_stop_text(tokens: list[int], texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the newest token completed a stop string, also across token borders.

    Only the tail can hold a new match: every token adds at least one byte, so as many tokens as the longest stop string
    has bytes (plus a few that decode to nothing by themselves) are enough.
    """
    if not texts:
        return False
    window = max(len(text.encode()) for text in texts) + 8
    tail = tokenizer.decode(tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in tail for text in texts)
