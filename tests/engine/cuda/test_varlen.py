"""One call for all sequences of a pass, against a masked matrix of scores in float64; and against the segments of the engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.drawn import examples
from tests.engine.cuda.cases import relative_error
from tests.engine.devices import here
from tinker_local_backend.engine.cuda import varlen
from tinker_local_backend.engine.cuda.varlen import VarlenPlan, gather_rows
from tinker_local_backend.engine.model.attention import PackedPlan, Segment, packed_attention
from tinker_local_backend.engine.model.kv_cache import PAGE_TOKENS, KVCache, KVSlots, LayerShape
from tinker_local_backend.engine.model.packing import Packed, PrefixGroup, pack
from tinker_local_backend.engine.model.paged_attention import LayerAttention
from tinker_local_backend.engine.model.passes import Pass, running

HEADS, KV, DIM = 4, 2, 8


def packed_groups(groups: Sequence[tuple[int, Sequence[int]]]) -> Packed:
    """For each group the length of its shared prefix and those of what follows it."""
    sequences, found = [], []
    for prefix, tails in groups:
        members = range(len(sequences), len(sequences) + len(tails))
        sequences += [tuple(range(prefix + tail)) for tail in tails]
        found.append(PrefixGroup(tuple(members), prefix, prefix + sum(tails)))
    return pack(sequences, found)


def masked_attention(
    packed: Packed, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """(1, T, H, D): a query sees the keys of its own sequence that are not behind it and within its window."""
    size = len(packed.tokens)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for rows in packed.rows.values():
        at = np.arange(len(rows))
        ahead = at[:, None] - at[None, :]
        visible = (ahead >= 0) & (ahead < (layer.window or len(rows)))
        seen[np.ix_(rows, rows)] |= torch.from_numpy(visible)
    key, value = (tensor.repeat_interleave(HEADS // KV, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(-1, -2) * layer.scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def random_tensors(size: int, seed: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the result, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, size, DIM), (1, KV, size, DIM), (1, KV, size, DIM), (1, size, HEADS, DIM)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def with_gradients(attend: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]


groups = st.lists(
    st.tuples(st.sampled_from([0, 1, 9, 17]), st.lists(st.integers(1, 12), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@examples(20)
@given(groups, st.sampled_from([None, 1, 5, 16]))
def test_results_and_gradients_are_those_of_a_masked_matrix(
    chosen: list[tuple[int, list[int]]], window: int | None
) -> None:
    packed = packed_groups(chosen)
    layer = LayerAttention(0, 0.3, None, window)
    plan = VarlenPlan.of(PackedPlan(packed.segments), torch.device("cpu"))
    tensors = random_tensors(len(packed.tokens), seed=len(packed.tokens))
    found = with_gradients(lambda q, k, v: plan.attend(layer, q, k, v), tensors)
    wanted = with_gradients(lambda q, k, v: masked_attention(packed, layer, q, k, v), tensors)
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-12


def test_windows_count_the_token_itself() -> None:
    """varlen_attn is told of one less than the engine's window, which a window of 1 shows: the result is the token's value."""
    packed = packed_groups([(0, [5])])
    query, key, value, _ = random_tensors(5, seed=0)
    plan = VarlenPlan.of(PackedPlan(packed.segments), torch.device("cpu"))
    out = plan.attend(LayerAttention(0, 1.0, None, 1), query, key, value)
    assert relative_error(out, value.repeat_interleave(2, dim=1).transpose(1, 2)) < 1e-12


def test_it_agrees_with_the_engines_segments_where_the_tests_run() -> None:
    """On a GPU in bfloat16 this is the kernel of torch, with its gradients."""
    dtype = here().dtype if here().device.type == "cpu" else torch.bfloat16
    packed = packed_groups([(20, [3, 30, 1]), (0, [40])])
    tensors = [tensor.to(here().device, dtype) for tensor in random_tensors(len(packed.tokens), seed=1)]

    class Layer(torch.nn.Module):
        layer_idx = 0

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with running(Pass(PackedPlan(packed.segments))):
            return packed_attention(Layer(), q, k, v, None, 0.3, None, 16)[0]

    plan = VarlenPlan.of(PackedPlan(packed.segments), here().device)
    layer = LayerAttention(0, 0.3, None, 16)
    found = with_gradients(lambda q, k, v: plan.attend(layer, q, k, v), tensors)
    for mine, theirs in zip(found, with_gradients(reference, tensors), strict=True):
        assert relative_error(mine, theirs) < (1e-5 if dtype == torch.float32 else 3e-2)


def test_gradients_of_copies_are_summed_in_float32() -> None:
    """In bfloat16 256 + 1 is 256, so a sum of 40 ones on top of it would be lost."""
    packed = packed_groups([(8, [1] * 40)])
    copies = VarlenPlan.of(PackedPlan(packed.segments), here().device).copies
    assert copies is not None
    rows = torch.zeros(len(packed.tokens), 1, dtype=torch.bfloat16, device=here().device, requires_grad=True)
    gathered = gather_rows(rows, copies)
    gradient = torch.ones_like(gathered)
    gradient[0] = 256.0
    (found,) = torch.autograd.grad(gathered, rows, gradient)
    assert float(found[0]) == 296.0 and float(found[1]) == 41.0 and float(found[8]) == 1.0


def test_keys_are_not_copied_where_no_prefix_is_shared() -> None:
    plan = VarlenPlan.of(PackedPlan.whole([3, 7]), torch.device("cpu"))
    assert plan.copies is None and plan.keys.tolist() == plan.queries.tolist() == [0, 3, 10]
    assert (plan.max_queries, plan.max_keys) == (7, 7)


def test_what_the_kernel_cannot_do_is_left_to_the_segments() -> None:
    full, capped = LayerAttention(0, 0.3, None, None), LayerAttention(0, 0.3, 5.0, None)

    def query(dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.empty(1, HEADS, 7, dim, dtype=dtype, device=device)

    with FakeTensorMode():
        assert varlen.suits(full, query(128, torch.bfloat16, "cuda"))
        assert varlen.suits(full, query(128, torch.float32, "cpu"))
        assert not varlen.suits(full, query(128, torch.float32, "cuda"))
        assert not varlen.suits(full, query(512, torch.bfloat16, "cuda"))
        assert not varlen.suits(full, query(12, torch.bfloat16, "cuda"))
        assert not varlen.suits(capped, query(128, torch.bfloat16, "cuda"))
        assert not varlen.suits(replace(full, sinks=torch.zeros(HEADS)), query(128, torch.bfloat16, "cuda"))
    packed = packed_groups([(9, [2, 3])])
    plan = PackedPlan(packed.segments)
    tensors = random_tensors(len(packed.tokens), seed=0)[:3]
    by_call, by_segment = (
        VarlenPlan.of(plan, torch.device("cpu")).attend(capped, *tensors),
        plan.attend(capped, *tensors),
    )
    assert torch.equal(by_call, by_segment)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Heads of queries, keys and values of each call of the kernel. Whatever goes segment by segment is an error."""
    heads: list[tuple[int, ...]] = []
    original = varlen._varlen

    def noted(*tensors: Any, **options: Any) -> torch.Tensor:
        heads.append(tuple(tensor.shape[1] for tensor in tensors[:3]))
        return original(*tensors, **options)

    def refuse(*arguments: Any) -> torch.Tensor:
        raise AssertionError("attention segment by segment")

    monkeypatch.setattr(varlen, "_varlen", noted)
    monkeypatch.setattr(PackedPlan, "attend", refuse)
    return heads


def test_the_kernel_gets_as_many_key_heads_as_there_are(seen: list[tuple[int, ...]]) -> None:
    """It takes fewer than of queries, in every version of torch: nothing is repeated, with shared prefixes or without."""
    layer = LayerAttention(0, 0.3, None, None)
    for packed in (packed_groups([(9, [2, 3])]), packed_groups([(0, [4, 5])])):
        tensors = random_tensors(len(packed.tokens), seed=0)[:3]
        VarlenPlan.of(PackedPlan(packed.segments), torch.device("cpu")).attend(layer, *tensors)
    assert seen == 2 * [(HEADS, KV, KV)] and KV < HEADS


@pytest.mark.parametrize("window", [None, 7])
def test_a_pass_whose_segments_begin_in_the_cache(window: int | None, seen: list[tuple[int, ...]]) -> None:
    """In one call, against a masked matrix over all tokens of each sequence: pieces of prompts, whole ones, a shared prefix."""
    layer = LayerAttention(0, 0.3, None, window)
    cache = KVCache({0: LayerShape(KV, DIM, DIM)}, torch.float64, torch.device("cpu"), 6)
    pasts, news = [PAGE_TOKENS + 3, 0, 5, PAGE_TOKENS], [4, 6, 1, 2]
    tables = [torch.tensor([4, 1]), None, torch.tensor([0]), torch.tensor([5, 3])]
    wholes = [random_tensors(past + new, seed) for seed, (past, new) in enumerate(zip(pasts, news, strict=True))]
    segments, entries, start = [], [], 0
    for past, new, table, whole in zip(pasts, news, tables, wholes, strict=True):
        segments.append(Segment(start, start + new, past, table=table))
        if table is not None:
            for at in range(past):
                for stored, tensor in zip(cache.layer(0), whole[1:3], strict=True):
                    stored[table[at // PAGE_TOKENS], :, at % PAGE_TOKENS] = tensor[0, :, at]
            into = range(past, past + new)
            entries += [(int(table[at // PAGE_TOKENS]), at % PAGE_TOKENS, start + at - past) for at in into]
        start += new
    segments.append(Segment(start, start + 3, 6, prefix=(segments[1].start, segments[1].end)))
    tail = random_tensors(3, seed=9)
    new_rows = [[part[:, :, past:] for part in whole[:3]] for past, whole in zip(pasts, wholes, strict=True)]
    tensors = [torch.cat(parts, dim=2) for parts in zip(*new_rows, tail[:3], strict=True)]
    plan = PackedPlan(segments, cache, KVSlots(*(torch.tensor(column) for column in zip(*entries, strict=True))))
    got = VarlenPlan.of(plan, torch.device("cpu")).attend(layer, *tensors)
    wholes.append([torch.cat((a, b), dim=2) for a, b in zip(wholes[1][:3], tail[:3], strict=True)])
    assert seen == [(HEADS, KV, KV)]
    end = 0
    for whole, new in zip(wholes, [*news, 3], strict=True):
        packed = packed_groups([(0, [whole[0].shape[2]])])
        expected = masked_attention(packed, layer, *whole[:3])[:, -new:]
        assert relative_error(got[:, end : end + new], expected) < 1e-12
        end += new
    for page, at, row in entries:
        assert torch.equal(cache.layer(0)[0][page, :, at], tensors[1][0, :, row])
