"""Batched generation with continuous batching: sequences join after a prefill and leave as soon as they end.

`Generator.step()` is one turn of the crank: admit what fits, or else decode one token for every running sequence. One
prompt is prefilled once for all its samples, also when several requests bring the same prompt under the same snapshot.
"""

from __future__ import annotations

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
    running: int = 0
    _finished: bool = False

    def finish(self, outcome: SamplingResult | BaseException) -> None:
        """Report the outcome; only the first one counts."""
        if not self._finished:
            self._finished = True
            self.complete(outcome)


@dataclass(eq=False)
class _Running:
    """A sequence that holds a row of the KV cache."""

    ticket: Ticket
    sequence: SampledSequence
    seed: int
    length: int
    """tokens whose keys are in the cache"""


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
        self._drop_cancelled()
        admitted = self._admit()
        try:
            if admitted:
                self._prefill(admitted)
            elif self._running:
                self._decode()
        except Exception as error:
            # One pass serves many requests; when it fails (out of memory, say) none of its sequences can go on.
            affected = {id(t): t for t in [*admitted, *(row.ticket for row in self._running)]}
            self._running.clear()
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

    def _drop_cancelled(self) -> None:
        if any(ticket.cancelled() for ticket in self._waiting):
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.cancelled())
        for row in reversed(range(len(self._running))):
            if self._running[row].ticket.cancelled():
                self._remove_row(row)

    def _admit(self) -> list[Ticket]:
        admitted: list[Ticket] = []
        rows, tokens = len(self._running), 0
        length = max((row.ticket.request.total_length for row in self._running), default=0)
        while self._waiting:
            request = self._waiting[0].request
            new_length = max(length, request.total_length if request.num_samples else 0)
            new_rows = rows + request.num_samples
            alone = not admitted and not self._running
            if not alone and not (self._cache.fits(new_rows, new_length) and new_rows <= self._max_running):
                break
            if admitted and tokens + len(request.prompt) > self._prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
            rows, length, tokens = new_rows, new_length, tokens + len(request.prompt)
        if admitted and rows > len(self._running):
            self._cache.reserve(rows, length, live_rows=len(self._running))
        return admitted

    def _prefill(self, tickets: list[Ticket]) -> None:
        groups: dict[tuple[int, tuple[int, ...]], list[Ticket]] = {}
        for ticket in tickets:
            groups.setdefault((id(ticket.request.adapter), ticket.request.prompt), []).append(ticket)
        leaders = [group[0].request for group in groups.values()]
        fresh: list[_Running] = []
        first_rows: list[int] = []
        for group in groups.values():
            first_rows.append(len(self._running) + len(fresh))
            for ticket in group:
                ticket.sequences = [SampledSequence() for _ in range(ticket.request.num_samples)]
                ticket.running = ticket.request.num_samples
                base = ticket.request.seed if ticket.request.seed is not None else self._random_seed()
                for i, sequence in enumerate(ticket.sequences):
                    fresh.append(_Running(ticket, sequence, derive_seed(base, i), len(ticket.request.prompt)))

        device = self._model.device
        tokens_T = torch.tensor([t for request in leaders for t in request.prompt], device=device)
        positions_T = torch.cat([torch.arange(len(request.prompt)) for request in leaders]).to(device)
        bounds = [0, *np.cumsum([len(request.prompt) for request in leaders]).tolist()]
        adapters_T = [request.adapter for request in leaders for _ in request.prompt]
        keep = bool(fresh)
        plan = PackedPlan(bounds, self._cache if keep else None, first_rows if keep else None)
        if keep:
            # A prompt that is only scored may write into the row of the next one, which overwrites it, or one row past the end.
            self._cache.reserve(max(first_rows) + 1, max(len(r.prompt) for r in leaders), len(self._running))
        hidden_T = self._model.hidden_states(tokens_T, positions_T, plan, adapters_T)

        for group, start, end in zip(groups.values(), bounds[:-1], bounds[1:], strict=True):
            if any(ticket.request.prompt_logprobs for ticket in group):
                request = group[0].request
                scored = packed_prompt_logprobs(self._model, hidden_T[start:end], request.prompt, request.adapter)
                for ticket in group:
                    if ticket.request.prompt_logprobs:
                        ticket.prompt_logprobs = scored
        for ticket in tickets:
            if ticket.running == 0:
                ticket.finish(SamplingResult([], ticket.prompt_logprobs))
        if not fresh:
            return

        hidden_index: list[int] = []
        for group, first_row, end in zip(groups.values(), first_rows, bounds[1:], strict=True):
            samples = sum(ticket.request.num_samples for ticket in group)
            for copy in range(1, samples):
                self._cache.copy_row(first_row, first_row + copy, len(group[0].request.prompt))
            hidden_index.extend([end - 1] * samples)
        first_new = len(self._running)
        self._running.extend(fresh)
        self._emit(hidden_T[torch.tensor(hidden_index, device=device)], first_new)

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
            ticket.running -= 1
            if ticket.running == 0:
                ticket.finish(SamplingResult(ticket.sequences, ticket.prompt_logprobs))

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
