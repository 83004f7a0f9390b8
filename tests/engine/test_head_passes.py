"""How often the head reads and writes all logits of a chunk: on a GPU each time takes as long as its memory needs for them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinker_local_backend.engine.model import head as head_module
from tinker_local_backend.engine.model.head import HeadWeights, Scorer

ROWS, VOCABULARY, WIDTH, RANK = 5, 97, 4, 4


class Passes(TorchDispatchMode):
    """Counts the tensors as large as a chunk's logits that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in func.name() or "scatter" in func.name() or "gather" in func.name():
            return result  # the last two touch a few numbers of a row
        given = [*args, *(kwargs or {}).values()]
        for argument, value in zip(func._schema.arguments, given, strict=False):
            if _is_large(value):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                self.writes += writes
                self.reads += not (writes and argument.kwarg_only)  # out= is only written
        if not any(argument.alias_info for argument in func._schema.arguments):
            self.writes += _is_large(result)
        return result


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() >= ROWS * VOCABULARY


def of_head(**fields: Any) -> HeadWeights:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(size, generator=generator) for size in ((VOCABULARY, WIDTH), (RANK, WIDTH), (VOCABULARY, RANK))
    )
    return HeadWeights(weight, **{"a": a, "b": b, "scale": 0.5, **fields})


def passes(head: HeadWeights, temperature: float, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    monkeypatch.setattr(head_module, "_exp_", torch.Tensor.exp_)  # as on a GPU
    monkeypatch.setattr(head_module, "for_onednn", lambda *_: False)
    generator = torch.Generator().manual_seed(1)
    hidden, targets = torch.randn(ROWS, WIDTH, generator=generator), torch.arange(ROWS)[:, None]
    with Passes() as counted:
        Scorer(head, temperature).logprobs_and_gradient(hidden, targets, lambda s, e, lp: -torch.ones_like(lp))
    return counted.reads, counted.writes


def test_a_chunk_is_read_nine_times_and_written_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by the product, the adapter's, the shift by the largest, exp, and the slopes; read by the last four, the largest,
    the sum, and three products back. In 16 bits a copy for the product with the weights comes on top."""
    assert passes(of_head(), 1.0, monkeypatch) == (9, 5)
    assert passes(of_head(a=None, b=None), 1.0, monkeypatch) == (6, 4)


@pytest.mark.parametrize("fields", [{}, {"a": None, "b": None, "multiplier": 0.4}], ids=["adapter", "multiplier"])
def test_a_temperature_costs_no_pass_beside_what_multiplies_anyway(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    head = of_head(**fields)
    assert passes(head, 0.7, monkeypatch) == passes(head, 1.0, monkeypatch)


def test_a_multiplier_costs_none_beside_an_adapter_and_a_cap_takes_temperature_and_multiplier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert passes(of_head(multiplier=0.5), 0.7, monkeypatch) == passes(of_head(), 1.0, monkeypatch)
    capped = passes(of_head(softcap=30.0), 1.0, monkeypatch)
    assert passes(of_head(softcap=30.0, multiplier=0.5), 0.7, monkeypatch) == capped


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.4])
@pytest.mark.parametrize("adapter", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_are_those_of_float64(
    temperature: float, adapter: bool, multiplier: float, softcap: float | None, bias: bool
) -> None:
    fields: dict[str, Any] = {} if adapter else {"a": None, "b": None}
    head = of_head(
        multiplier=multiplier, softcap=softcap, bias=torch.linspace(-1, 1, VOCABULARY) if bias else None, **fields
    )
    generator = torch.Generator().manual_seed(2)
    hidden, targets = torch.randn(ROWS, WIDTH, generator=generator), torch.arange(2 * ROWS).view(ROWS, 2)
    slopes = torch.randn(ROWS, 2, generator=generator)
    found, gradient = Scorer(head, temperature).logprobs_and_gradient(hidden, targets, lambda s, e, lp: slopes[s:e])

    inputs = [tensor.double().requires_grad_() for tensor in (hidden, head.a, head.b) if tensor is not None]
    logits = inputs[0] @ head.weight.double().t()
    if adapter:
        logits = logits + head.scale * (inputs[0] @ inputs[1].t()) @ inputs[2].t()
    logits = multiplier * (logits + (head.bias.double() if head.bias is not None else 0.0))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = (logits / temperature).log_softmax(-1).gather(1, targets)
    wanted = torch.autograd.grad((expected * slopes.double()).sum(), inputs)
    np.testing.assert_allclose(found, expected.detach(), atol=2e-6)
    for mine, theirs in zip([gradient.hidden, *gradient.head], wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
