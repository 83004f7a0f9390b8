"""Which tokens top-k, top-p and min-p leave, and how many rows are sorted to find them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.limits import LIMITS, limits_case
from tinker_local_backend.engine.sampling.token_choice import RowParams, next_tokens
from tinker_local_backend.engine.sampling.truncation import CANDIDATES, sorted_truncated, truncated


class Sorts(TorchDispatchMode):
    """Notes the rows and columns of everything that is sorted within, and of everything whose likeliest tokens are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.looked_at: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.sort, torch.ops.aten.argsort):
            self.shapes.append(tuple(args[0].shape))
        if func.overloadpacket is torch.ops.aten.topk:
            self.looked_at.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [truncated, sorted_truncated])
@pytest.mark.parametrize("vocabulary", [7, 700, 3 * CANDIDATES])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0], ids=lambda s: f"spread {s:g}")
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_what_stays_is_what_exact_fractions_say(
    function: Callable[..., torch.Tensor], vocabulary: int, spread: float, step: float
) -> None:
    case = limits_case(vocabulary, spread, step)
    assert torch.equal(function(*case.arguments).cpu(), case.expected())


def test_a_threshold_within_the_candidates_and_one_at_their_end() -> None:
    """Equal tokens on both sides of the last candidate: which of them are candidates is not said."""
    limits = [(CANDIDATES, 1.0, 0.0), (CANDIDATES - 1, 1.0, 0.0), (CANDIDATES + 1, 1.0, 0.0), (0, 0.5, 0.0)]
    for step in (0.0, 0.3):
        case = limits_case(3 * CANDIDATES, 1.0, step, limits)
        assert torch.equal(truncated(*case.arguments).cpu(), case.expected())


def drawn(limits: list[tuple[int, float, float]], spread: float, vocabulary: int = 151_936) -> list[tuple[int, ...]]:
    """What is sorted while a token is drawn for a row with each of these limits."""
    rows = len(limits)
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * spread
    top_k, top_p, min_p = zip(*limits, strict=True)
    params = RowParams([1.0] * rows, top_k, top_p, min_p, range(rows), torch.device("cpu"))
    with Sorts() as sorts:
        next_tokens(logits, params, np.zeros(rows, dtype=np.uint64))
    return sorts.shapes


def test_no_vocabulary_is_sorted_where_the_likeliest_tokens_tell() -> None:
    assert drawn([(50, 1.0, 0.0), (0, 0.9, 0.0), (20, 0.95, 0.0), (0, 1.0, 0.1), (0, 1.0, 0.0)], 6.0) == []


def test_only_rows_that_need_it_are_sorted() -> None:
    """A distribution as flat as this one has more tokens in its nucleus than are looked at."""
    assert drawn([(0, 1.0, 0.0), (0, 0.9, 0.0), (50, 1.0, 0.0), (2000, 1.0, 0.0)], 0.5) == [(2, 151_936)]


def test_rows_without_limits_are_left_as_they_are() -> None:
    case = limits_case(3 * CANDIDATES, 1.0, limits=[(0, 1.0, 0.0), (0, 0.5, 0.0), (-1, 2.0, 0.0)])
    with Sorts() as sorts:
        kept = truncated(*case.arguments)
    assert sorts.looked_at == [(1, 3 * CANDIDATES)]
    assert torch.equal(kept[[0, 2]], case.probs[[0, 2]]) and not torch.equal(kept[1], case.probs[1])


def test_the_same_tokens_stay_alone_and_among_others() -> None:
    case = limits_case(3 * CANDIDATES, 1.0)
    together = truncated(*case.arguments)
    for row in range(len(LIMITS)):
        alone = truncated(*(argument[row : row + 1] for argument in case.arguments))
        assert torch.equal(alone[0], together[row])
