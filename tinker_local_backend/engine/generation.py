"""Batched generation with continuous batching: sequences join after a prefill and leave as soon as they end.

`Generator.step()` is one turn of the crank: admit what fits, or else decode one token for every running sequence. One
prompt is prefilled once for all its samples, also when several requests bring the same prompt under the same snapshot.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tinker_local_backend.engine.attention import DecodePlan, PackedPlan
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.lora import Adapter
from tinker_local_backend.engine.noise import derive_seed
from tinker_local_backend.engine.requests import SamplingRequest
from tinker_local_backend.engine.sampler import next_tokens
from tinker_local_backend.engine.scoring import packed_prompt_logprobs
from tinker_local_backend.errors import RequestError


@dataclass
class SampledSequence:
    """One completion: ids with a logprob each. The stop token, when the model emitted one, is the last of them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] = "length"


@dataclass
class SamplingResult:
    """`prompt_logprobs`: one per prompt token, the first None; None when they were not asked for."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


@dataclass(eq=False)
class Ticket:
    """A request on its way. `complete` is told the result or the error; `cancelled` is asked before every step."""

    request: SamplingRequest
    complete: Callable[[SamplingResult | BaseException], None]
    cancelled: Callable[[], bool]
    sequences: list[SampledSequence] = field(default_factory=list)
    prompt_logprobs: list[float | None] | None = None
    seed: int | None = None
    started: int = 0
    """samples that were given a row so far; the rest wait until rows are free"""
    done: int = 0
    finished: bool = False

    @property
    def dropped(self) -> bool:
        """Nobody waits for it any more: its rows are free to go."""
        return self.finished or self.cancelled()

    def finish(self, outcome: SamplingResult | BaseException) -> None:
        """Report the outcome; only the first one counts."""
        if not self.finished:
            self.finished = True
            self.complete(outcome)

    def sample_done(self) -> None:
        """One more sample has ended; after the last one the result goes out."""
        self.done += 1
        if self.done == self.request.num_samples:
            self.finish(SamplingResult(self.sequences, self.prompt_logprobs))


@dataclass(eq=False)
class _Running:
    """A sequence that holds a row of the KV cache."""

    ticket: Ticket
    sequence: SampledSequence
    seed: int
    length: int
    """tokens whose keys are in the cache"""


@dataclass(frozen=True, eq=False)
class _Admitted:
    """Some samples of a request that get their rows now."""

    ticket: Ticket
    count: int


class Generator:
    """Runs sampling requests on a base model. Not thread-safe: the engine's worker thread owns it.

    Args:
        kv_budget_tokens: bound on (sequences x longest) tokens of KV cache; requests beyond it wait.
        prefill_tokens: prompts are prefilled in passes of at most this many tokens.
        random_seed: draws a seed for a request that names none.
    """

    def __init__(
        self,
        model: BaseModel,
        kv_budget_tokens: int,
        random_seed: Callable[[], int],
        prefill_tokens: int = 8192,
        max_running: int = 512,
    ):
        self._model = model
        self.kv_budget_tokens = kv_budget_tokens
        self._cache = model.new_cache(kv_budget_tokens)
        self._random_seed = random_seed
        self._prefill_tokens = prefill_tokens
        self._max_running = max_running
        self._waiting: deque[Ticket] = deque()
        self._running: list[_Running] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

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
            # One pass serves many requests; when it fails (out of memory, say) none of its sequences can go on.
            affected = {id(t): t for t in [*(a.ticket for a in admitted), *(row.ticket for row in self._running)]}
            self._running.clear()
            self._cache.release()
            for ticket in affected.values():
                ticket.finish(error)
        if not self._running and not self._waiting:
            self._cache.release()

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

    def _admit(self, admitted: list[_Admitted]) -> None:
        """Move what fits from the front of the line into `admitted`: whole requests, or as many of one's samples as fit."""
        rows, tokens = len(self._running), 0
        length = max((row.ticket.request.total_length for row in self._running), default=0)
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
            admitted.append(_Admitted(ticket, count))
            ticket.started += count
            rows, length, tokens = rows + count, new_length, tokens + len(request.prompt)
            if count < wanted:
                break
            self._waiting.popleft()
        if rows > len(self._running):
            self._cache.reserve(rows, length, live_rows=len(self._running))

    def _prefill(self, admitted: list[_Admitted]) -> None:
        groups: dict[tuple[int, tuple[int, ...]], list[_Admitted]] = {}
        for entry in admitted:
            request = entry.ticket.request
            groups.setdefault((id(request.adapter), request.prompt), []).append(entry)
        leaders = [group[0].ticket.request for group in groups.values()]
        counts = [sum(entry.count for entry in group) for group in groups.values()]
        first_rows = (len(self._running) + np.cumsum([0, *counts[:-1]])).tolist()

        device = self._model.device
        tokens_T = torch.tensor([t for request in leaders for t in request.prompt], device=device)
        positions_T = torch.cat([torch.arange(len(request.prompt)) for request in leaders]).to(device)
        bounds = [0, *np.cumsum([len(request.prompt) for request in leaders]).tolist()]
        adapters_T = [request.adapter for request in leaders for _ in request.prompt]
        rows = [row if count else None for row, count in zip(first_rows, counts, strict=True)]  # only scored: no row
        hidden_T = self._model.hidden_states(tokens_T, positions_T, PackedPlan(bounds, self._cache, rows), adapters_T)

        for group, start, end in zip(groups.values(), bounds[:-1], bounds[1:], strict=True):
            self._score_prompts(group, hidden_T[start:end])
        fresh = [row for group in groups.values() for entry in group for row in self._new_rows(entry)]
        if not fresh:
            return
        for leader, first_row, count in zip(leaders, first_rows, counts, strict=True):
            for copy in range(1, count):
                self._cache.copy_row(first_row, first_row + copy, len(leader.prompt))
        last_index = torch.tensor([end - 1 for end in bounds[1:]], device=device)
        first_new = len(self._running)
        self._running.extend(fresh)
        self._emit(hidden_T[last_index.repeat_interleave(torch.tensor(counts, device=device))], first_new)

    def _score_prompts(self, group: list[_Admitted], hidden_TH: torch.Tensor) -> None:
        asking = [e.ticket for e in group if e.ticket.request.prompt_logprobs and e.ticket.prompt_logprobs is None]
        if asking:
            request = asking[0].request
            scored = packed_prompt_logprobs(self._model, hidden_TH, request.prompt, request.adapter)
            for ticket in asking:
                ticket.prompt_logprobs = scored
        for entry in group:
            if entry.ticket.request.num_samples == 0:
                entry.ticket.finish(SamplingResult([], entry.ticket.prompt_logprobs))

    def _new_rows(self, entry: _Admitted) -> list[_Running]:
        ticket = entry.ticket
        if ticket.seed is None:
            ticket.seed = ticket.request.seed if ticket.request.seed is not None else self._random_seed()
        first = len(ticket.sequences)
        ticket.sequences.extend(SampledSequence() for _ in range(entry.count))
        return [
            _Running(ticket, ticket.sequences[i], derive_seed(ticket.seed, i), len(ticket.request.prompt))
            for i in range(first, first + entry.count)
        ]

    def _decode(self) -> None:
        rows = self._running
        device = self._model.device
        lengths_R = torch.tensor([row.length for row in rows], device=device)
        longest = max(row.length for row in rows)
        visible = torch.arange(longest + 1, device=device)[None, :] <= lengths_R[:, None]
        plan = DecodePlan(self._cache, len(rows), lengths_R, longest, visible[:, None, None, :])
        tokens_R = torch.tensor([row.sequence.tokens[-1] for row in rows], device=device)
        adapters_R = [row.ticket.request.adapter for row in rows]
        hidden_R = self._model.hidden_states(tokens_R, lengths_R, plan, adapters_R)
        for row in rows:
            row.length += 1
        self._emit(hidden_R, 0)

    def _emit(self, hidden_R: torch.Tensor, first_row: int) -> None:
        """Sample one token for each running row from `first_row` on, and let finished rows go."""
        rows = self._running[first_row:]
        device = self._model.device
        requests = [row.ticket.request for row in rows]
        adapters: list[Adapter | None] = [request.adapter for request in requests]
        tokens_R, logprobs_R = next_tokens(
            self._model.logits(hidden_R, adapters),
            torch.tensor([request.temperature for request in requests], device=device),
            torch.tensor([request.top_k for request in requests], device=device),
            torch.tensor([request.top_p for request in requests], device=device),
            np.array([row.seed for row in rows], dtype=np.uint64),
            np.array([len(row.sequence.tokens) for row in rows], dtype=np.uint64),
        )
        finished: list[int] = []
        for i, (row, token, logprob) in enumerate(zip(rows, tokens_R.tolist(), logprobs_R.tolist(), strict=True)):
            if not math.isfinite(logprob):
                row.ticket.finish(
                    RequestError(
                        f"the model gave no valid distribution after {row.length} tokens (logits with NaN or infinity): "
                        "the adapter's weights have diverged; lower the learning rate or go back to an earlier checkpoint"
                    )
                )
                continue
            row.sequence.tokens.append(token)
            row.sequence.logprobs.append(logprob)
            request = row.ticket.request
            if token in request.stop.token_ids or _ends_with_stop_text(
                row.sequence.tokens, request.stop.texts, self._model.tokenizer
            ):
                row.sequence.stop_reason = "stop"
            elif len(row.sequence.tokens) < request.max_tokens:
                continue
            finished.append(first_row + i)
        # From the back, so that filling a gap with the last row never moves a row that is about to leave.
        done = [self._running[i].ticket for i in finished]
        for i in reversed(finished):
            self._remove_row(i)
        for ticket in done:
            ticket.sample_done()

    def _remove_row(self, index: int) -> None:
        last = len(self._running) - 1
        if index != last:
            self._cache.copy_row(last, index, self._running[last].length)
            self._running[index] = self._running[last]
        self._running.pop()


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
