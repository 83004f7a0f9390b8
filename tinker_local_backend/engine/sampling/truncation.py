"""What top-k, min-p and top-p leave of a distribution, without sorting a vocabulary where a part of it tells.

The tokens that stay are a beginning of all tokens in order of falling probability, of equal ones the lower index first. So two
numbers say which stay: the least probability among them, the border, and how many tokens that have just this one stay.

Masses are added up as integers, multiples of QUANTUM, which is exact in any order: a GPU's kernel (cuda/choice_kernels.py) and a
CPU keep the same tokens of the same probabilities.

vLLM's processes import this file too, in an environment that has numpy and torch and none of this project's packages.
"""

from __future__ import annotations

import torch

QUANTUM = 2.0**-60
"""Probabilities of float32 are exact multiples of it down to 2^-36, and a whole row adds up within int64."""

CANDIDATES = 1024
"""Tokens of a row that are looked at first. Finding them takes a twentieth of the time of sorting 152,000 (on a CPU)."""


def truncated(
    probs_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor
) -> torch.Tensor:
    """The mass of the tokens that stay, and zero for the others.

    Those go that have less than a share min_p of the likeliest one's probability, those outside the top k, and then those outside
    the smallest set whose mass reaches top_p of what is left, in the order of vLLM. The likeliest token always stays.

    Args:
        probs_RV: (rows, vocabulary) float32, not negative.
        top_k_R: (rows,) int64; 0 or less: no limit.
        top_p_R, min_p_R: (rows,) float32; 1 or more and 0: no limit.

    Returns:
        (rows, vocabulary) float32. Asks the device which rows need more than their likeliest tokens; `sorted_truncated` does not.
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
    likeliest_RN = probs_RV.topk(CANDIDATES, dim=-1).values
    left_R = _quanta(probs_RV).masked_fill_(probs_RV < floor_R[:, None], 0).sum(dim=-1)
    within_R = k_R <= CANDIDATES
    border_R, ties_R = _border(likeliest_RN, k_R, top_p_R, floor_R, torch.where(within_R, -1, left_R))
    known_R = (within_R | (k_R == vocabulary)) & (border_R > likeliest_RN[:, -1])
    # All that are not below the floor stay, however many they are.
    all_R = (k_R == vocabulary) & (top_p_R >= 1)
    border_R, ties_R = border_R.masked_fill(all_R, -1.0), ties_R.masked_fill(all_R, vocabulary)
    result_RV = _kept(probs_RV, border_R, ties_R, floor_R)
    (rows_L,) = (~(known_R | all_R)).nonzero(as_tuple=True)
    if len(rows_L):
        limits = (top_k_R[rows_L], top_p_R[rows_L], min_p_R[rows_L])
        result_RV.index_copy_(0, rows_L, sorted_truncated(probs_RV[rows_L], *limits))
    return result_RV


def sorted_truncated(
    probs_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor
) -> torch.Tensor:
    """As `truncated`, by sorting every row; reads nothing back from the device."""
    sorted_RV = probs_RV.sort(dim=-1, descending=True).values
    k_R, floor_R = _counts(top_k_R, probs_RV.shape[1]), min_p_R * sorted_RV[:, 0]
    border_R, ties_R = _border(sorted_RV, k_R, top_p_R, floor_R, torch.full_like(k_R, -1))
    return _kept(probs_RV, border_R, ties_R, floor_R)


def _counts(top_k_R: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.where(top_k_R > 0, top_k_R, vocabulary).clamp(max=vocabulary)


def _quanta(probs: torch.Tensor) -> torch.Tensor:
    return (probs * (1 / QUANTUM)).long()


def _border(
    sorted_RN: torch.Tensor, k_R: torch.Tensor, top_p_R: torch.Tensor, floor_R: torch.Tensor, mass_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The border (R,) and how many tokens stay that have its probability (R,) int64, from the likeliest tokens.

    mass_R: int64 of the tokens that top-k and min-p leave; -1: these are all in `sorted_RN`.
    """
    ranks_N = torch.arange(sorted_RN.shape[1], device=sorted_RN.device)
    left_RN = (ranks_N < k_R[:, None]) & (sorted_RN >= floor_R[:, None])
    quanta_RN = torch.where(left_RN, _quanta(sorted_RN), 0)
    upto_RN = quanta_RN.cumsum(dim=-1)
    mass_R = torch.where(mass_R < 0, upto_RN[:, -1], mass_R)
    limit_R = (top_p_R.double() * mass_R.double()).ceil().long().clamp(min=1)
    keep_RN = left_RN & ((upto_RN - quanta_RN < limit_R[:, None]) | (top_p_R >= 1)[:, None])
    count_R1 = keep_RN.sum(dim=-1, keepdim=True)
    border_R1 = sorted_RN.gather(1, (count_R1 - 1).clamp(min=0))  # no token stays of a row of NaN
    return border_R1[:, 0], (count_R1 - (sorted_RN > border_R1).sum(dim=-1, keepdim=True))[:, 0]


def _kept(probs_RV: torch.Tensor, border_R: torch.Tensor, ties_R: torch.Tensor, floor_R: torch.Tensor) -> torch.Tensor:
    tied_RV = probs_RV == border_R[:, None]
    stays_RV = (probs_RV > border_R[:, None]) | (tied_RV & (tied_RV.cumsum(dim=-1) <= ties_R[:, None]))
    return torch.where(stays_RV & (probs_RV >= floor_R[:, None]), probs_RV, 0.0)
