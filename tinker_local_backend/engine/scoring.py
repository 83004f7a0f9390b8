"""Logprobs of given tokens from hidden states, in chunks: the (tokens x vocabulary) matrix never exists as a whole."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.lora import Adapter

CHUNK_ELEMENTS = 1 << 22
"""Logits held at a time: 4 M floats, 16 MB in float32."""


def target_logprobs(
    model: BaseModel,
    hidden_TH: torch.Tensor,
    targets_TK: torch.Tensor,
    adapter: Adapter | None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Logprobs (T, K) float32 of K target ids per position under softmax(logits / temperature).

    With gradients enabled each chunk is recomputed in the backward pass, so memory stays that of one chunk.
    """

    def score(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.logits(hidden, adapter)
        if temperature != 1.0:
            logits = logits / temperature
        return logits.gather(1, targets) - logits.logsumexp(dim=-1, keepdim=True)

    rows = max(1, CHUNK_ELEMENTS // model.vocab_size)
    chunks = zip(hidden_TH.split(rows), targets_TK.split(rows), strict=True)
    if not torch.is_grad_enabled() or hidden_TH.shape[0] <= rows:
        return torch.cat([score(hidden, targets) for hidden, targets in chunks])
    scored = [checkpoint(score, hidden, targets, use_reentrant=False) for hidden, targets in chunks]
    return torch.cat(scored)  # pyright: ignore[reportCallIssue, reportArgumentType]


def packed_prompt_logprobs(
    model: BaseModel, hidden_TH: torch.Tensor, prompt: tuple[int, ...], adapter: Adapter | None
) -> list[float | None]:
    """Logprob of each prompt token given those before it, at temperature 1; the first has no context and is None."""
    if len(prompt) == 1:
        return [None]
    targets = torch.tensor(prompt[1:], device=hidden_TH.device)[:, None]
    return [None, *target_logprobs(model, hidden_TH[:-1], targets, adapter)[:, 0].tolist()]
