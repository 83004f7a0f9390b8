"""The tests of the kernels once more, through the emitted code: in bfloat16, which GPUs run and Triton's interpreter cannot.

Tests that name another dtype keep it.
"""

import types
from collections.abc import Callable

import pytest
import torch

from tests.engine.cuda import test_kernels

pytestmark = pytest.mark.compiled


def in_bfloat16(test: Callable[..., None]) -> Callable[..., None]:
    """The same test, whose dtypes are bfloat16 alone."""
    copied = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copied.__doc__, copied.__annotations__ = test.__doc__, test.__annotations__
    marks = [
        pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str).mark if mark.args[:1] == ("dtype",) else mark
        for mark in getattr(test, "pytestmark", [])
    ]
    copied.__dict__["pytestmark"] = marks
    return copied


TESTS = {name: in_bfloat16(test) for name, test in vars(test_kernels).items() if name.startswith("test_")}
globals().update(TESTS)


def test_there_are_some() -> None:
    assert len(TESTS) > 5
