"""Scores of a prompt: logprobs, the most likely tokens, those of given tokens, and draws at every position."""

from __future__ import annotations

import numpy as np
import torch

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.scoring import chunk_rows
from tinker_local_backend.engine.sampling.noise import mix_seed
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import PromptScores, diverged
from tinker_local_backend.engine.sampling.token_choice import RowParams, next_tokens

ALTERNATIVES_STREAM = 0xA17E
"""Keeps the draws at prompt positions apart from those of the completions, which use the same request seed."""


class PromptScorer:
    """Scores a prompt at temperature 1 from its hidden states, which may come in several pieces.

    Draws are at the request's temperature.
    """

    def __init__(self, model: BaseModel, request: SamplingRequest, seed: int):
        self._model, self._request, self._seed = model, request, seed
        scoring, length = request.scoring, len(request.prompt)
        self.scores = scores = PromptScores()
        if scoring.logprobs:
            scores.logprobs = np.full(length, np.nan, dtype=np.float32)
        if scoring.topk:
            scores.topk = _table(length, scoring.topk)
        if scoring.targets is not None:
            scores.targets = np.zeros(scoring.targets.shape, dtype=np.float32)
        if scoring.alternatives:
            scores.alternatives = _table(length - 1, scoring.alternatives)
        self._first_scored = 1 if scoring.last_n is None else max(1, length - scoring.last_n)
        everywhere = scoring.targets is not None or scoring.alternatives
        self._first_row = 0 if everywhere else self._first_scored - 1
        self._seen = 0

    def add(self, hidden_NH: torch.Tensor) -> None:
        """The hidden states of the next N tokens. Raises RequestError if the model gives NaN."""
        offset, self._seen = self._seen, self._seen + len(hidden_NH)
        last = min(self._seen, len(self._request.prompt) - 1)  # hidden state i predicts token i + 1
        rows = chunk_rows(self._model)
        for start in range(max(offset, self._first_row), last, rows):
            end = min(start + rows, last)
            self._score(start, end, self._model.logits(hidden_NH[start - offset : end - offset], self._request.adapter))

    def _score(self, start: int, end: int, logits: torch.Tensor) -> None:
        request, scoring, scores = self._request, self._request.scoring, self.scores
        logprobs = torch.log_softmax(logits, dim=-1)
        if torch.isnan(logprobs[:, 0]).any():
            raise diverged(f"at prompt positions {start + 1}..{end}")
        skipped = max(0, self._first_scored - 1 - start)
        scored, window = logprobs[skipped:], slice(start + skipped + 1, end + 1)
        if scores.logprobs is not None and len(scored):
            tokens = torch.tensor(request.prompt[window], device=scored.device)[:, None]
            scores.logprobs[window] = scored.gather(1, tokens)[:, 0].cpu().numpy()
        if scores.topk is not None and len(scored):
            values, ids = scored.topk(min(scoring.topk, self._model.vocab_size), dim=-1)
            scores.topk[0][window, : ids.shape[1]] = ids.cpu().numpy()
            scores.topk[1][window, : ids.shape[1]] = values.cpu().numpy()
        if scoring.targets is not None and scores.targets is not None:
            wanted = torch.from_numpy(scoring.targets[start:end]).to(logprobs.device)
            values = torch.where(wanted >= 0, logprobs.gather(1, wanted.clamp(min=0)), 0.0)
            scores.targets[start:end] = values.cpu().numpy()
        if scores.alternatives is not None:
            positions = np.arange(start, end, dtype=np.uint64)
            for column in range(scoring.alternatives):
                seed = mix_seed(self._seed, ALTERNATIVES_STREAM, column)
                columns = ([value] * len(positions) for value in (request.temperature, -1, 1.0, 0.0, seed))
                ids, values, _ = next_tokens(logits, RowParams(*columns, device=logits.device), positions)
                scores.alternatives[0][start:end, column] = ids.cpu().numpy()
                scores.alternatives[1][start:end, column] = values.cpu().numpy()


def _table(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, columns), dtype=np.int64), np.full((rows, columns), np.nan, dtype=np.float32)
