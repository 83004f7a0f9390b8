"""Top-k, min-p and top-p, without sorting the whole vocabulary if its most likely tokens suffice.

The tokens that are kept are the first ones in order of falling probability (ties: lower index first). So two numbers determine
them: the threshold, which is the least probability kept, and how many tokens of exactly this probability are kept.

Masses are summed as integers, multiples of QUANTUM, which is exact in any order: the GPU kernel (cuda/choice_kernels.py) and a
CPU keep the same tokens of the same probabilities.

vLLM's processes import this file too, in an environment with numpy and torch but without this project's packages.
"""

from __future__ import annotations

import torch

QUANTUM = 2.0**-60
"""float32 probabilities are exact multiples of it down to 2^-36, and the sum of a row fits in int64."""

CANDIDATES = 1024
"""Most likely tokens of a row to try first. topk takes a twentieth of the time of sorting 152,000 tokens (on a CPU)."""


def truncated(
    probs_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor
) -> torch.Tensor:
    """The probabilities of the tokens that are kept, not renormalised, and zero for the others.

    Removes tokens with less than min_p times the largest probability, tokens outside the top k, and then tokens outside the
    smallest set whose mass reaches top_p of the remaining mass, in vLLM's order. The most likely token is always kept.

    Args:
        probs_RV: (rows, vocabulary) float32, not negative.
        top_k_R: (rows,) int64; 0 or less: no limit.
        top_p_R, min_p_R: (rows,) float32; 1 or more and 0: no limit.

    Returns:
        (rows, vocabulary) float32. Synchronises with the device to find the rows that need a sort; `sorted_truncated` does not.
    """
    limited_R = (top_k_R > 0) | (top_p_R < 1) | (min_p_R > 0)
    if not bool(limited_R.all()):
        (rows_L,) = limited_R.nonzero(as_tuple=True)
        limits = (top_k_R[rows_L], top_p_R[rows_L], min_p_R[rows_L])
        return probs_RV.index_copy(0, rows_L, truncated(probs_RV[rows_L], *limits))
    vocabulary = probs_RV.shape[1]
    if vocabulary <= 2 * CANDIDATES:
        return sorted_truncated(probs_RV, top_k_R, top_p_R, min_p_R)
    k_R = _counts(top_k_R, vocabulary)
    floor_R = min_p_R * probs_RV.amax(dim=-1)
    top_RN = probs_RV.topk(CANDIDATES, dim=-1).values
    left_R = _quanta(probs_RV).masked_fill_(probs_RV < floor_R[:, None], 0).sum(dim=-1)
    within_R = k_R <= CANDIDATES
    threshold_R, ties_R = _threshold(top_RN, k_R, top_p_R, floor_R, torch.where(within_R, -1, left_R))
    known_R = (within_R | (k_R == vocabulary)) & (threshold_R > top_RN[:, -1])
    # With min_p alone, all tokens above the floor are kept, however many they are.
    all_R = (k_R == vocabulary) & (top_p_R >= 1)
    threshold_R, ties_R = threshold_R.masked_fill(all_R, -1.0), ties_R.masked_fill(all_R, vocabulary)
    result_RV = _kept(probs_RV, threshold_R, ties_R, floor_R)
    (rows_L,) = (~(known_R | all_R)).nonzero(as_tuple=True)
    if len(rows_L):
        limits = (top_k_R[rows_L], top_p_R[rows_L], min_p_R[rows_L])
        result_RV.index_copy_(0, rows_L, sorted_truncated(probs_RV[rows_L], *limits))
    return result_RV


def sorted_truncated(
    probs_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor
) -> torch.Tensor:
    """As `truncated`, by sorting every row; does not synchronise with the device."""
    sorted_RV = probs_RV.sort(dim=-1, descending=True).values
    k_R, floor_R = _counts(top_k_R, probs_RV.shape[1]), min_p_R * sorted_RV[:, 0]
    threshold_R, ties_R = _threshold(sorted_RV, k_R, top_p_R, floor_R, torch.full_like(k_R, -1))
    return _kept(probs_RV, threshold_R, ties_R, floor_R)


def _counts(top_k_R: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.where(top_k_R > 0, top_k_R, vocabulary).clamp(max=vocabulary)


def _quanta(probs: torch.Tensor) -> torch.Tensor:
    return (probs * (1 / QUANTUM)).long()


def _threshold(
    sorted_RN: torch.Tensor, k_R: torch.Tensor, top_p_R: torch.Tensor, floor_R: torch.Tensor, mass_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold (R,) and the number of tokens of that probability to keep (R,) int64, from the most likely tokens.

    mass_R: int64 mass of the tokens that top-k and min-p keep; -1: all of them are in `sorted_RN`.
    """
    ranks_N = torch.arange(sorted_RN.shape[1], device=sorted_RN.device)
    left_RN = (ranks_N < k_R[:, None]) & (sorted_RN >= floor_R[:, None])
    quanta_RN = torch.where(left_RN, _quanta(sorted_RN), 0)
    upto_RN = quanta_RN.cumsum(dim=-1)
    mass_R = torch.where(mass_R < 0, upto_RN[:, -1], mass_R)
    limit_R = (top_p_R.double() * mass_R.double()).ceil().long().clamp(min=1)
    keep_RN = left_RN & ((upto_RN - quanta_RN < limit_R[:, None]) | (top_p_R >= 1)[:, None])
    count_R1 = keep_RN.sum(dim=-1, keepdim=True)
    threshold_R1 = sorted_RN.gather(1, (count_R1 - 1).clamp(min=0))  # of a row of NaN no token is kept
    return threshold_R1[:, 0], (count_R1 - (sorted_RN > threshold_R1).sum(dim=-1, keepdim=True))[:, 0]


def _kept(
    probs_RV: torch.Tensor, threshold_R: torch.Tensor, ties_R: torch.Tensor, floor_R: torch.Tensor
) -> torch.Tensor:
    tied_RV = probs_RV == threshold_R[:, None]
    keeps_RV = (probs_RV > threshold_R[:, None]) | (tied_RV & (tied_RV.cumsum(dim=-1) <= ties_R[:, None]))
    return torch.where(keeps_RV & (probs_RV >= floor_R[:, None]), probs_RV, 0.0)
