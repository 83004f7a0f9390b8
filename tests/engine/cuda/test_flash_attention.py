"""The package flash-attn-4 in large passes: with a double in its place, which has its arguments and its rule for windows."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.stand_ins import graphs_for
from tests.engine.cuda.test_varlen import masked_attention, packed_groups, random_tensors, with_gradients
from tests.engine.devices import here
from tinker_local_backend.engine.cuda import flash_attention
from tinker_local_backend.engine.cuda.execution import FLASH, ON, CudaExecution
from tinker_local_backend.engine.cuda.flash_attention import missing
from tinker_local_backend.engine.cuda.selfcheck import CHECKS, run_checks
from tinker_local_backend.engine.cuda.varlen import VarlenPlan
from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.paged_attention import LayerAttention
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.sampling.pages import pages_for

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Double:
    """`flash_attn_varlen_func` in plain torch, sequence by sequence; `factor` is what is wrong with it."""

    def __init__(self) -> None:
        self.calls, self.factor = 0, 1.0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int | None, int | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        assert causal and window_size[1] is None, "the later end of a window is that of a causal call"
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
        outs = []
        for n in range(len(cu_seqlens_q) - 1):
            query = q[cu_seqlens_q[n] : cu_seqlens_q[n + 1]]
            key, value = (x[cu_seqlens_k[n] : cu_seqlens_k[n + 1]] for x in (k, v))
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
            rows = torch.arange(len(query), device=q.device)[:, None] + len(key) - len(query)  # aligned at the end
            behind = rows - torch.arange(len(key), device=q.device)[None, :]
            seen = (behind >= 0) & (behind <= (len(key) if window_size[0] is None else window_size[0]))
            scores = torch.einsum("thd,khd->htk", query.double(), key.double()) * softmax_scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outs.append(torch.einsum("htk,khd->thd", weights, value.double()))
        return (torch.cat(outs) * self.factor).to(q.dtype), torch.zeros(q.shape[1], len(q))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", SimpleNamespace(flash_attn_varlen_func=double))
    return double


@pytest.mark.parametrize("window", [None, 1, 5])
def test_results_and_gradients_are_those_of_a_masked_matrix(
    double: Double, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(flash_attention, "MIN_SCORES", 12)
    packed = packed_groups([(9, [3, 1, 7]), (0, [6])])
    layer = LayerAttention(0, 0.3, None, window)
    plan = VarlenPlan.of(PackedPlan(packed.segments), CPU, flash=True)
    tensors = random_tensors(len(packed.tokens), seed=4)
    found = with_gradients(lambda q, k, v: plan.attend(layer, q, k, v), tensors)
    wanted = with_gradients(lambda q, k, v: masked_attention(packed, layer, q, k, v), tensors)
    assert double.calls == 1
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("lengths", "flash", "used"),
    [([1024] * 16, True, True), ([1024] * 15, True, False), ([4096], True, True), ([4096], False, False)],
)
def test_small_passes_keep_torchs_kernel(lengths: list[int], flash: bool, used: bool) -> None:
    assert VarlenPlan.of(PackedPlan.whole(lengths), CPU, flash).flash is used


@pytest.mark.parametrize("past", [60_000, 500])
def test_a_turn_of_a_long_conversation_is_large(past: int) -> None:
    table = torch.zeros(pages_for(past), dtype=torch.int64)
    plan = PackedPlan([Segment(0, 400, past, table=table)])
    assert VarlenPlan.of(plan, CPU, flash=True).flash is (past == 60_000)


def test_later_tokens_are_refused() -> None:
    empty = torch.zeros(1, 1, 8)
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="attention is causal"):
        flash_attention.attend(empty, empty, empty, lengths, lengths, 1, 1, scale=1.0, window_size=(-1, -1))


def test_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(GPU) == "flash-attn-4 is not installed"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace() if name == "flash_attn.cute" else None
    )
    assert missing(CPU) == "it needs a GPU"
    for capability, why in (((9, 0), None), ((10, 3), None), ((8, 9), "it has no kernels for compute capability 8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert missing(GPU) == why


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_it_is_compared_at_start_and_turned_off_where_it_is_wrong(
    double: Double, tied_model: str, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    monkeypatch.setattr(flash_attention, "missing", lambda device: None)
    model: BaseModel = load_model(tied_model, here().device, torch.bfloat16)
    execution = CudaExecution(model, graphs_for(model.device))
    assert execution.runs(FLASH)
    double.factor = factor
    (check,) = [check for check in CHECKS if check.part == FLASH]
    monkeypatch.setattr("tinker_local_backend.engine.cuda.selfcheck.CHECKS", (check,))
    (found,) = run_checks(model, execution)
    assert double.calls > 0 and (found.failure is None) == (factor == 1.0)
    assert execution.parts()[FLASH] == (ON if factor == 1.0 else f"off: {found.failure}")


def test_a_float32_model_keeps_the_segments(tied_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "missing", lambda device: None)
    model = load_model(tied_model, here().device, torch.float32)
    assert CudaExecution(model, graphs_for(model.device)).parts()[FLASH] == "off: it needs 16 bits"
