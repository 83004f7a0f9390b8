"""Products by oneDNN are those of torch, and are not used where they are not."""

import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from tinker_local_backend.engine.model import products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


@pytest.fixture(autouse=True)
def decided_anew() -> Iterator[None]:
    products.onednn_is_usable.cache_clear()
    yield
    products.onednn_is_usable.cache_clear()


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(products, "_has_avx512", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [3, 64, 700])
def test_the_product_and_its_gradient_are_right(rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    by_onednn = products.by_onednn
    monkeypatch.setattr(products, "by_onednn", lambda *args: calls.append(1) or by_onednn(*args))
    assert products.onednn_is_faster()
    calls.clear()
    x, weight = random(1, rows, 768).requires_grad_(), random(1024, 768, seed=1)
    bias = random(1024, seed=2) if with_bias else None
    found = products.linear(x, weight, bias)
    upstream = random(1, rows, 1024, seed=3)
    found.backward(upstream)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert x.grad is not None and found.shape == exact.shape
    assert relative(found.detach(), exact.detach()) < 1e-6
    assert relative(x.grad, upstream.double() @ weight.double()) < 1e-6
    with torch.inference_mode():
        assert torch.equal(products.linear(x.detach(), weight, bias), found.detach())
    assert len(calls) == 3


@pytest.mark.usefixtures("amd")
def test_small_products_other_dtypes_and_trained_weights_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.onednn_is_faster()
    monkeypatch.setattr(products, "by_onednn", lambda *args: pytest.fail("used oneDNN"))
    large = random(2048, 1024)
    for x, weight in (
        (random(64, 128), random(128, 128)),
        (random(2, 1024), large),
        (random(8, 1024).double(), large.double()),
        (random(8, 1024), large.clone().requires_grad_()),
    ):
        assert torch.equal(products.linear(x, weight), F.linear(x, weight))


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize("fault", ["wrong", "absent"])
def test_a_build_whose_onednn_is_wrong_or_absent_does_without(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def faulty(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if fault == "absent":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
        return F.linear(x, weight, bias) * (1 + 1e-3)

    monkeypatch.setattr(products, "by_onednn", faulty)
    with caplog.at_level(logging.WARNING):
        assert not products.onednn_is_faster()
    assert "MKL computes the products" in caplog.text
    x, weight = random(8, 1024), random(2048, 1024, seed=1)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))


def test_processors_for_which_mkl_is_made_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_vendor", lambda: "GenuineIntel")
    assert not products.onednn_is_usable()


@pytest.mark.usefixtures("amd")
def test_without_avx512_only_packed_weights_go_through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has_avx512", lambda: False)
    x, weight = random(8, 1024), random(2048, 1024, seed=1)
    assert not products.for_onednn(x, weight)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    copy = products.packed(weight)
    assert copy is not None and copy.is_mkldnn
    packed_product = products.by_packed(x, copy)
    assert packed_product is not None and relative(packed_product, x.double() @ weight.double().t()) < 1e-6


@pytest.mark.usefixtures("amd")
def test_weights_that_onednn_cannot_pack_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory, or because the processor does not multiply in their dtype. Another error is none of this."""
    assert products.onednn_is_faster()
    unsupported = "could not create a primitive descriptor for a reorder", "bf16 path needs the cpu support avx512bw"
    for text in (*unsupported, "something else"):

        def refuse(*arguments: object, text: str = text) -> torch.Tensor:
            raise RuntimeError(text)

        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
        with nullcontext() if text in unsupported else pytest.raises(RuntimeError, match=text):
            assert products.packed(random(512, 512)) is None


def test_an_error_that_is_nan_is_the_worst_wherever_it_stands() -> None:
    errors = [1e-7, math.nan, 1e-3]
    assert {products.worst_error(errors[i:] + errors[:i]) for i in range(3)} == {math.inf}
    assert products.worst_error([1e-7, 1e-3, 1e-5]) == 1e-3


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize("cut", [slice(0, 300), slice(300, 600)], ids=["first half", "second half"])
def test_a_weight_with_gaps_in_memory_is_left_to_mkl(cut: slice) -> None:
    """oneDNN has only its slowest code for a slice of a transposed matrix, as the gradient of B meets it."""
    outputs, x = random(400, 600), random(16, 400, seed=1)
    weight = outputs[:, cut].t()
    assert not products.for_onednn(x, weight)
    assert products.for_onednn(x, weight.contiguous()) and products.for_onednn(x, outputs[:, cut].contiguous().t())
    expected = x.double() @ outputs[:, cut].double()
    assert relative(products.linear(x, weight), expected) < 1e-6
