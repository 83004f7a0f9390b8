"""From logits to the next token: temperature, top-k, top-p, greedy, and the logprob that is reported for it.

The reported logprob is that of softmax(logits / temperature) before top-k and top-p cut it; at temperature 0 the choice is
greedy and the logprob is that of temperature 1. This is what the hosted service reports and what the losses expect.
"""

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.engine.noise import uniforms


def next_tokens(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    seeds_R: npt.NDArray[np.uint64],
    positions_R: npt.NDArray[np.uint64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits_RV: (rows, vocabulary) float32.
        temperatures_R, top_k_R, top_p_R: per row; top_k <= 0 and top_p >= 1 mean no limit.
        seeds_R, positions_R: what the row's random number is made of (see noise.py).

    Returns:
        tokens (rows,) int64 and logprobs (rows,) float32.
    """
    greedy_R = temperatures_R == 0
    logprobs_RV = torch.log_softmax(logits_RV / torch.where(greedy_R, 1.0, temperatures_R)[:, None], dim=-1)
    probs_RV = logprobs_RV.exp()
    if bool(((top_k_R > 0) | (top_p_R < 1)).any()):
        probs_RV = _truncate(probs_RV, top_k_R, top_p_R)
    cumulative_RV = probs_RV.cumsum(dim=-1)
    draws_R = torch.from_numpy(uniforms(seeds_R, positions_R)).to(logits_RV.device)
    # right=True: the first index whose cumulative mass exceeds the draw, so a token of probability 0 is never chosen.
    tokens_R = torch.searchsorted(cumulative_RV, draws_R[:, None] * cumulative_RV[:, -1:], right=True)[:, 0]
    # Only a row of NaN runs past the end; it keeps its NaN logprob, which the caller reports.
    tokens_R = tokens_R.clamp(max=logits_RV.shape[-1] - 1)
    if bool(greedy_R.any()):
        tokens_R = torch.where(greedy_R, logits_RV.argmax(dim=-1), tokens_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]


def _truncate(probs_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Zero the mass outside the top k tokens and outside the smallest set whose mass reaches top_p (k first, then p)."""
    vocabulary = probs_RV.shape[-1]
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(vocabulary, device=probs_RV.device)
    k_R = torch.where(top_k_R > 0, top_k_R, vocabulary)
    sorted_RV = torch.where(ranks_V[None] < k_R[:, None], sorted_RV, 0.0)
    mass_before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    # The mass is measured within what top-k left; the most likely token always stays.
    limit_R = top_p_R * sorted_RV.sum(dim=-1)
    keep_RV = (mass_before_RV < limit_R[:, None]) | (ranks_V == 0)[None] | (top_p_R >= 1)[:, None]
    kept_RV = torch.where(keep_RV, sorted_RV, 0.0)
    return torch.zeros_like(probs_RV).scatter(1, order_RV, kept_RV)
