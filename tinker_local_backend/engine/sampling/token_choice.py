"""From logits to the next token: random numbers, temperature, top-k, top-p, min-p, greedy, and the reported logprob.

The reported logprob is that of softmax(logits / temperature) before top-k, top-p and min-p; at temperature 0 the choice is
greedy and the logprob is that of temperature 1. The hosted service reports the same, and the losses expect it. The reported
logprob also ignores constraints (constraints.py), penalties and biases (logit_rules.py).

Random numbers are counter-based: a shared generator would make a sequence's tokens depend on what else is in the batch. Here
every sequence has a 64-bit seed, and position i of its completion always gets the same uniform number. The mixer is SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").

vLLM's processes import this file too, in an environment with numpy and torch but without this project's packages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from tinker_local_backend.engine.sampling.truncation import truncated

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _finalize(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, float64 with 52 random bits, so that u * total < total also after rounding."""
    with np.errstate(over="ignore"):  # wrap-around is intended
        bits = _finalize(_finalize(seeds_R) + (positions_R + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def mix_seed(*parts: int) -> int:
    """A 64-bit seed from any number of integers; order matters. Used for sample i of a request with a given seed."""
    state = 0
    for part in parts:  # as _finalize, but on one integer: numpy would take twenty times as long
        z = (state + int(_GOLDEN) + part) & _MASK
        z = ((z ^ (z >> 30)) * int(_MIX_1)) & _MASK
        z = ((z ^ (z >> 27)) * int(_MIX_2)) & _MASK
        state = z ^ (z >> 31)
    return state


MIN_DIVISOR = 1e-30
"""Minimum divisor of logits: a smaller one would overflow. The choice is greedy long before."""

BLOCK = 512
"""Tokens per block of the two-stage search in a large vocabulary."""

ONE_STAGE = 2048
"""Largest vocabulary that is searched in one stage."""


Truncate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`truncation.truncated`, or an equivalent function."""


@dataclass(frozen=True, eq=False)
class Rules:
    """Sampling parameters on the device, one value per row: divisors, top_p and min_p float32, greedy bool, top_k int64.

    The flags skip work that no row needs: greedy choice, limits, and the division if all temperatures are 1 (`all_plain`).
    """

    divisors_R: torch.Tensor
    greedy_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    any_greedy: bool = True
    any_limit: bool = True
    all_plain: bool = False
    truncate: Truncate = truncated
    """applies the limits"""


class RowParams:
    """Sampling parameters of the rows of a batch, computed once and used until the batch changes.

    temperatures, top_k, top_p, min_p: one number per row; top_k <= 0, top_p >= 1 and min_p 0 mean no limit, temperature 0
    means greedy.
    """

    def __init__(
        self,
        temperatures: npt.ArrayLike,
        top_k: npt.ArrayLike,
        top_p: npt.ArrayLike,
        min_p: npt.ArrayLike,
        seeds: npt.ArrayLike,
        device: torch.device,
        truncate: Truncate = truncated,
    ):
        self.seeds_R = np.asarray(seeds, dtype=np.uint64)
        divisors_R = divisors_of(temperatures)
        top_p_R, min_p_R = np.asarray(top_p, dtype=np.float32), np.asarray(min_p, dtype=np.float32)
        greedy_R, top_k_R = np.asarray(temperatures) == 0, np.asarray(top_k, dtype=np.int64)
        self.rules = Rules(
            *(torch.from_numpy(array).to(device) for array in (divisors_R, greedy_R, top_k_R, top_p_R, min_p_R)),
            any_greedy=bool(greedy_R.any()),
            any_limit=bool((top_k_R > 0).any() or (top_p_R < 1).any() or (min_p_R > 0).any()),
            all_plain=bool((divisors_R == 1).all()),
            truncate=truncate,
        )


def divisors_of(temperatures: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The divisors of the logits: greedy rows are scored at temperature 1."""
    temperatures = np.asarray(temperatures, dtype=np.float64)
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, and all tokens are equally likely
        return np.where(temperatures > 0, np.maximum(temperatures, MIN_DIVISOR), 1.0).astype(np.float32)


def next_tokens(
    logits_RV: torch.Tensor, params: RowParams, positions_R: npt.NDArray[np.uint64]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits_RV: (rows, vocabulary) float32.
        positions_R: index of the drawn token in its completion, per row.

    Returns:
        tokens (rows,) int64, logprobs (rows,) float32, and the tempered logits (rows, vocabulary), not normalised.
    """
    draws_R = torch.from_numpy(uniforms(params.seeds_R, positions_R)).to(logits_RV.device)
    return choose(logits_RV, params.rules, draws_R)


def next_allowed_tokens(
    logits_RV: torch.Tensor,
    params: RowParams,
    positions_R: npt.NDArray[np.uint64],
    allowed_RW: npt.NDArray[np.int32],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `next_tokens`, among the tokens allowed by these bits. Returns the results of `choose_allowed`."""
    device = logits_RV.device
    draws_R = torch.from_numpy(uniforms(params.seeds_R, positions_R)).to(device)
    return choose_allowed(logits_RV, params.rules, draws_R, torch.from_numpy(allowed_RW).to(device))


def next_changed_tokens(
    tempered_RV: torch.Tensor,
    changed_RV: torch.Tensor,
    is_changed_R: npt.NDArray[np.bool_],
    params: RowParams,
    positions_R: npt.NDArray[np.uint64],
    allowed_RW: npt.NDArray[np.int32] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `choose_changed`, with numpy arrays."""
    device = tempered_RV.device
    draws_R = torch.from_numpy(uniforms(params.seeds_R, positions_R)).to(device)
    allowed = None if allowed_RW is None else torch.from_numpy(allowed_RW).to(device)
    is_changed = torch.from_numpy(is_changed_R).to(device)
    return choose_changed(tempered_RV, changed_RV, is_changed, params.rules, draws_R, allowed)


def choose(
    logits_RV: torch.Tensor, rules: Rules, draws_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `next_tokens`, with the uniform numbers (rows,) float64 to draw with. Does not synchronise with the device."""
    tempered_RV = tempered(logits_RV, rules)
    tokens_R, logprobs_R = _draw(tempered_RV, rules, draws_R)
    return tokens_R, logprobs_R, tempered_RV


def tempered(logits_RV: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Logits divided by the temperatures."""
    return logits_RV if rules.all_plain else logits_RV / rules.divisors_R[:, None]


def choose_allowed(
    logits_RV: torch.Tensor, rules: Rules, draws_R: torch.Tensor, allowed_RW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `choose`, among the tokens whose bits are set in allowed_RW: int32, bit i % 32 of word i // 32 is that of token i.

    A row in which all bits are set gets the token and the logprob of `choose`, bit for bit.

    Returns:
        tokens, logprobs and tempered logits as from `choose` (the logprobs ignore the bits), and the logprobs (rows,) float32
        among the allowed tokens.
    """
    tempered_RV = tempered(logits_RV, rules)
    tokens_R, constrained_R = _draw(_masked(tempered_RV, allowed_RW), rules, draws_R)
    # From the logits: the probability of an allowed token may underflow to zero, and its logarithm must stay finite.
    whole_R = tempered_RV.gather(1, tokens_R[:, None])[:, 0] - torch.logsumexp(tempered_RV, dim=-1)
    return tokens_R, torch.where((allowed_RW == -1).all(dim=-1), constrained_R, whole_R), tempered_RV, constrained_R


def choose_changed(
    tempered_RV: torch.Tensor,
    changed_RV: torch.Tensor,
    is_changed_R: torch.Tensor,
    rules: Rules,
    draws_R: torch.Tensor,
    allowed_RW: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw from the changed logits, and report the logprobs of the tempered ones.

    A row without changes and with all bits set gets the token and the logprob of `choose`, bit for bit.

    Returns:
        tokens, logprobs, and the logprobs (rows,) float32 among the allowed tokens, as `choose_allowed` does.
    """
    masked_RV = changed_RV if allowed_RW is None else _masked(changed_RV, allowed_RW)
    tokens_R, constrained_R = _draw(masked_RV, rules, draws_R)
    whole_R = tempered_RV.gather(1, tokens_R[:, None])[:, 0] - torch.logsumexp(tempered_RV, dim=-1)
    if allowed_RW is None:
        logprobs_R = torch.where(is_changed_R, whole_R, constrained_R)
        return tokens_R, logprobs_R, logprobs_R
    is_whole_R = ~is_changed_R & (allowed_RW == -1).all(dim=-1)
    constrained_R = torch.where(is_changed_R, allowed_logprobs(tempered_RV, tokens_R, allowed_RW), constrained_R)
    return tokens_R, torch.where(is_whole_R, constrained_R, whole_R), constrained_R


def allowed_logprobs(tempered_RV: torch.Tensor, tokens_R: torch.Tensor, allowed_RW: torch.Tensor) -> torch.Tensor:
    """The logprobs (rows,) float32 of given tokens among the allowed ones (see `choose_allowed`); -inf where not allowed."""
    masked_RV = _masked(tempered_RV, allowed_RW)
    return torch.log_softmax(masked_RV, dim=-1).gather(1, tokens_R[:, None])[:, 0]


def _masked(tempered_RV: torch.Tensor, allowed_RW: torch.Tensor) -> torch.Tensor:
    """-inf for the tokens whose bits are not set."""
    # A lookup table of eight bools per byte: shifting bits takes ten times as long.
    table = torch.arange(256, device=allowed_RW.device)[:, None] >> torch.arange(8, device=allowed_RW.device) & 1
    bytes_N = (~allowed_RW).view(torch.uint8).view(-1).int()
    forbidden_N = table.bool().view(torch.int64).view(-1).index_select(0, bytes_N).view(torch.bool)
    return tempered_RV.masked_fill(forbidden_N.view(len(allowed_RW), -1)[:, : tempered_RV.shape[1]], -torch.inf)


def _draw(tempered_RV: torch.Tensor, rules: Rules, draws_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and their logprobs before top-k, top-p and min-p."""
    probs_RV = torch.softmax(tempered_RV, dim=-1)
    if rules.any_limit:
        limited_RV = rules.truncate(probs_RV, rules.top_k_R, rules.top_p_R, rules.min_p_R)
        tokens_R, _ = _invert(limited_RV, draws_R)
        mass_R = probs_RV.sum(dim=-1, dtype=torch.float64)
    else:
        tokens_R, mass_R = _invert(probs_RV, draws_R)
    if rules.any_greedy:
        tokens_R = torch.where(rules.greedy_R, tempered_RV.argmax(dim=-1), tokens_R)
    # torch's softmax (not its log_softmax) is off by up to 1e-4 for 150,000 tokens. Dividing by the exact sum corrects the
    # probabilities; the logarithm of a drawn one is exact enough (1e-6).
    probs_R = probs_RV.gather(1, tokens_R[:, None])[:, 0]
    return tokens_R, (probs_R / mass_R).log().float()


def _invert(probs_RV: torch.Tensor, draws_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token whose cumulative mass exceeds draws_R times the total mass, and that total (rows,) in float64.

    Masses are summed in float64: in float32 the rare half of a large vocabulary could never be drawn. A large vocabulary is
    searched in two stages: first a block, by the blocks' masses (each summed in float32), then a token within it.
    """
    # right=True: the first index whose cumulative mass exceeds the target, so tokens without mass are never chosen. Only a
    # row of NaN runs past the end; its logprob stays NaN, which the caller reports.
    draws_R1 = draws_R[:, None]
    rows, vocabulary = probs_RV.shape
    if vocabulary <= ONE_STAGE:
        upto_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
        mass_R1 = upto_RV[:, -1:]
        tokens_R1 = torch.searchsorted(upto_RV, draws_R1 * mass_R1, right=True)
        return tokens_R1[:, 0].clamp(max=vocabulary - 1), mass_R1[:, 0]
    padding = -vocabulary % BLOCK
    blocks_RNB = (F.pad(probs_RV, (0, padding)) if padding else probs_RV).view(rows, -1, BLOCK)
    mass_RN = blocks_RNB.sum(dim=-1).double()  # few numbers each, so float32 is enough and saves a copy of the row
    upto_RN = mass_RN.cumsum(dim=-1)
    target_R1 = draws_R1 * upto_RN[:, -1:]
    block_R1 = torch.searchsorted(upto_RN, target_R1, right=True).clamp(max=upto_RN.shape[1] - 1)
    mass_R1 = mass_RN.gather(1, block_R1)
    share_R1 = ((target_R1 - upto_RN.gather(1, block_R1) + mass_R1) / mass_R1).clamp(0.0, 1 - 2.0**-52)
    index_R1B = block_R1[:, :, None].expand(-1, -1, BLOCK)
    within_RB = blocks_RNB.gather(1, index_R1B)[:, 0].cumsum(dim=-1, dtype=torch.float64)
    offset_R1 = torch.searchsorted(within_RB, share_R1 * within_RB[:, -1:], right=True).clamp(max=BLOCK - 1)
    return (block_R1 * BLOCK + offset_R1)[:, 0].clamp(max=vocabulary - 1), upto_RN[:, -1]
