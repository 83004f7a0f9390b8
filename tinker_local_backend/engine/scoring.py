"""Logprobs of given tokens from hidden states, in chunks: the (tokens x vocabulary) matrix never exists as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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

    In the backward pass each chunk of logits is computed again, and only for positions whose gradient is not zero.
    """
    parameters = model.head_parameters(adapter)
    result = _TargetLogprobs.apply(model, adapter, temperature, targets_TK, hidden_TH, *parameters)
    assert isinstance(result, torch.Tensor)
    return result


def _score(
    model: BaseModel, adapter: Adapter | None, temperature: float, hidden: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    logits = model.logits(hidden, adapter)
    if temperature != 1.0:
        logits = logits / temperature
    return logits.gather(1, targets) - logits.logsumexp(dim=-1, keepdim=True)


def chunk_rows(model: BaseModel) -> int:
    """Positions whose logits are held at a time."""
    return max(1, CHUNK_ELEMENTS // model.vocab_size)


class _TargetLogprobs(torch.autograd.Function):
    """Scores in chunks without keeping logits; the gradient comes from autograd over one recomputed chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        model: BaseModel,
        adapter: Adapter | None,
        temperature: float,
        targets: torch.Tensor,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.model, ctx.adapter, ctx.temperature, ctx.parameters = model, adapter, temperature, parameters
        ctx.save_for_backward(targets, hidden)
        rows = chunk_rows(model)
        chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([_score(model, adapter, temperature, h, t) for h, t in chunks])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        targets, hidden = ctx.saved_tensors
        needs_hidden = ctx.needs_input_grad[4]
        # The same tensors that forward used, so that adapter.a and adapter.b lead to them.
        parameters: Sequence[torch.Tensor] = ctx.parameters
        hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for index in grad.ne(0).any(dim=1).nonzero()[:, 0].split(chunk_rows(ctx.model)):
            with torch.enable_grad():
                part = hidden[index].requires_grad_(needs_hidden)
                scores = _score(ctx.model, ctx.adapter, ctx.temperature, part, targets[index])
            wanted = [*([part] if needs_hidden else []), *parameters]
            parts = list(torch.autograd.grad(scores, wanted, grad[index]))
            if hidden_grad is not None:
                hidden_grad[index] = parts.pop(0)
            for total, one in zip(totals, parts, strict=True):
                total += one
        return None, None, None, None, hidden_grad, *totals
