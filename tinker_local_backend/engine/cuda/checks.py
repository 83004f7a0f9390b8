"""Measure the error of each part of the CUDA path against the reference, at a model's real shapes, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch

from tinker_local_backend.engine.cuda import ops, plain
from tinker_local_backend.engine.cuda.adapter_slots import BLOCK_RANK, MIN_RANK, SLOTS, row_blocks
from tinker_local_backend.engine.cuda.decoder import Decoder
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.cuda.graphs import Graphs, Uncaptured
from tinker_local_backend.engine.cuda.step import DecodeRow
from tinker_local_backend.engine.cuda.varlen import VarlenPlan
from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.kv_cache import KVSlots
from tinker_local_backend.engine.model.lora import Adapter, group_rows
from tinker_local_backend.engine.model.paged_attention import LayerAttention
from tinker_local_backend.engine.model.products import worst_error
from tinker_local_backend.engine.sampling.pages import PAGE_TOKENS
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import SamplingResult, Ticket

SAMPLED_TOKENS = 64
STEPS = 3
RANK = 8

BOUNDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Bounds on errors relative to the reference. A wrong kernel is off by about 1. In bfloat16, rounding in all layers of a model
changes logits by 2 to 3 % of their standard deviation (measured on Qwen3-4B and 8B with random weights)."""


def _error(results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The largest relative error of norms; NaN counts as infinite."""
    return worst_error(
        float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-12))
        for x, y in zip(results, references, strict=True)
    )


def _spread(logits_RV: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the logits of each row (R,), the unit of errors through a whole model: logits of trained and random
    models differ in scale, and rounding is proportional to it.
    """
    return logits_RV.double().std(-1)


@contextmanager
def _through_modules(model: BaseModel) -> Iterator[None]:
    """Within: layers are not joined, so that the reference shares only the kernels of fuse.py with the code under test."""
    operations = model.operations
    model.join(None)
    try:
        yield
    finally:
        model.join(operations)


def _random_numbers(model: BaseModel) -> Callable[..., torch.Tensor]:
    """A function from shapes to random numbers in the model's dtype on its device, reproducible."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(model.device, model.dtype)


def _pages(model: BaseModel, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys, values, and a page table per row, with the pages in reverse order."""
    heads, kv_heads, dim = model.attention_shape
    width = -(-max(lengths) // PAGE_TOKENS)
    random = _random_numbers(model)
    pages = len(lengths) * width
    keys, values = random(2, pages, kv_heads, PAGE_TOKENS, dim)
    tables = torch.arange(pages, dtype=torch.int32, device=model.device).flip(0).view(len(lengths), width)
    return random(len(lengths), heads, dim), keys, values, tables


def paged_attention(model: BaseModel, graphs: Graphs) -> float:
    lengths = [1, PAGE_TOKENS + 1, 0, 600]
    query, keys, values, tables = _pages(model, lengths)
    seen = torch.tensor(lengths, dtype=torch.int32, device=model.device)
    scale = query.shape[-1] ** -0.5
    sinks = _random_numbers(model)(query.shape[1]) if model.has_sinks else None
    errors = []
    for window in {0, min(model.sliding_window or 0, 500)}:
        arguments = (query, keys, values, tables, seen, scale, window, 0.0, sinks)
        errors.append(_error([ops.paged_attention(*arguments)], [plain.paged_attention(*arguments)]))
    return max(errors)


def stored_keys(model: BaseModel, graphs: Graphs) -> float:
    _, keys, values, tables = _pages(model, [40, 40, 40])
    positions = torch.tensor([5, -1, 39], dtype=torch.int32, device=model.device)
    _, kv_heads, dim = model.attention_shape
    key, value = _random_numbers(model)(2, 3, kv_heads, dim)
    results = []
    for store in (ops.store_keys, plain.store_keys):
        pools = keys.clone(), values.clone()
        store(key, value, *pools, tables, positions)
        results.append(pools)
    return _error(*results)


def limits(model: BaseModel, graphs: Graphs) -> float:
    """Top-k, top-p and min-p at the size of the model's vocabulary. The kept tokens must be equal."""
    logits = torch.randn(5, model.config.vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    probs = logits.softmax(-1).to(model.device)
    top_k = torch.tensor([0, 50, 0, 7, 0], device=model.device)
    top_p, min_p = torch.tensor([[0.9, 1.0, 1.0, 0.6, 1.0], [0.0, 0.0, 0.1, 0.05, 0.0]], device=model.device)
    results = [m.truncate(probs, top_k, top_p, min_p) for m in (ops, plain)]
    return _error(*([(result > 0).float(), result] for result in results))


def lora_by_slot(model: BaseModel, graphs: Graphs) -> float:
    slots = [0, -1, 1, 1, 0, *[2] * 17]
    order, blocks = (torch.from_numpy(array).to(model.device) for array in row_blocks(slots, len(slots)))
    scales = torch.tensor([0.5, 1.0, 2.0], device=model.device)
    random = _random_numbers(model)
    errors = []
    shapes = {(linear.in_features, tuple(linear.sizes.values())) for linear in model.products}
    for features, sizes in sorted(shapes):
        outputs = sum(sizes)
        x, y = random(len(slots), features), random(len(slots), outputs)
        for rank in (MIN_RANK, 2 * BLOCK_RANK):
            a, b = random(3, len(sizes) * rank, features) / features**0.5, random(3, outputs, rank)
            results = []
            for add in (ops.lora_add, plain.lora_add):
                into = y.clone()
                add(into, x, a, b, order, blocks, scales, list(accumulate(sizes)))
                results.append([into])
            errors.append(_error(*results))
    return max(errors)


def _rows(adapters: Sequence[Adapter | None]) -> list[DecodeRow]:
    """The first token of one sequence per adapter, with a page each; its key is stored at position 0."""
    return [
        DecodeRow(
            SamplingRequest((11 + i,), adapter, 1, PAGE_TOKENS),
            token=11 + i,
            position=0,
            end=PAGE_TOKENS,
            pages=[i],
            first_page=0,
            seed=i,
            drawn=0,
        )
        for i, adapter in enumerate(adapters)
    ]


def _adapters(model: BaseModel, number: int) -> list[Adapter]:
    """Snapshots that change every logit."""
    frozen = []
    for seed in range(number):
        adapter = model.new_adapter(model.widest_spec(RANK), seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, matrix in sorted(adapter.b.items()):
                matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.01)
        frozen.append(adapter.snapshot(model.dtype))
    return frozen


@torch.inference_mode()
def replay_against_eager(model: BaseModel, graphs: Graphs) -> float:
    rows = _rows([*_adapters(model, 2), None])
    replayed, eager = (
        Decoder(model, model.new_cache(len(rows)), g, PAGE_TOKENS).run(rows, STEPS) for g in (graphs, Uncaptured())
    )
    if (replayed.tokens != eager.tokens).any():
        return float("inf")
    return float(abs(replayed.logprobs - eager.logprobs).max())


@torch.inference_mode()
def all_slots_in_one_batch(model: BaseModel, graphs: Graphs) -> float:
    adapters: list[Adapter | None] = [*_adapters(model, SLOTS), None]
    rows = _rows(adapters)
    burst = Decoder(model, model.new_cache(len(rows)), graphs, PAGE_TOKENS).run(rows, 1)
    tokens = torch.tensor([row.token for row in rows], device=model.device)
    spans = group_rows(adapters, model.device)
    with _through_modules(model):
        hidden = model.hidden_states(tokens, torch.zeros_like(tokens), PackedPlan.whole([1] * len(rows)), spans)
    reference = model.logits(hidden, spans)
    logprobs = torch.from_numpy(burst.logprobs[0]).to(model.device)
    drawn = torch.from_numpy(burst.tokens[0]).to(model.device)
    difference = reference.log_softmax(-1).gather(1, drawn[:, None])[:, 0] - logprobs
    return float((difference.abs() / _spread(reference)).mean())


@torch.inference_mode()
def sampled_against_trained(model: BaseModel, graphs: Graphs) -> float:
    """Mean difference between sampled logprobs and those of a training pass over the whole sequence, in standard deviations of
    the logits.
    """
    (adapter,) = _adapters(model, 1)
    prompt = tuple(range(7, 7 + PAGE_TOKENS))
    tokens = min(SAMPLED_TOKENS, model.context_length - len(prompt))
    generator = BurstGenerator(model, 4 * (tokens + len(prompt)), count().__next__, graphs)
    outcomes: list[SamplingResult | BaseException] = []
    request = SamplingRequest(prompt, adapter, 1, tokens, seed=0)
    generator.add(Ticket(request, outcomes.append, lambda: False))
    while generator.busy:
        generator.step()
    (outcome,) = outcomes
    if isinstance(outcome, BaseException):
        raise outcome
    (sequence,) = outcome.sequences
    whole = torch.tensor([*prompt, *sequence.tokens], device=model.device)
    plan = PackedPlan.whole([len(whole)])
    with _through_modules(model):
        hidden = model.hidden_states(whole, torch.arange(len(whole), device=model.device), plan, adapter)
    logits = model.logits(hidden[len(prompt) - 1 : -1], adapter)
    trained = logits.log_softmax(-1).gather(1, whole[len(prompt) :, None])[:, 0]
    difference = trained - torch.tensor(sequence.logprobs, device=model.device)
    return float((difference.abs() / _spread(logits)).mean())


def _with_gradients(compute: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        out = compute(*leaves)
        gradient = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def varlen_attention(model: BaseModel, graphs: Graphs) -> float:
    """Two sequences with a shared prefix and one without; then one that begins in the cache, without gradients."""
    segments = [Segment(0, 40), Segment(40, 50, 40, (0, 40)), Segment(50, 57, 40, (0, 40)), Segment(57, 120)]
    return max(_one_call(model, segments, flash=False), _from_the_cache(model, _random_numbers(model)))


def flash_attention(model: BaseModel, graphs: Graphs) -> float:
    """Sequences of several tiles of the kernel, one of which continues another."""
    return _one_call(model, [Segment(0, 300), Segment(300, 330, 300, (0, 300)), Segment(330, 500)], flash=True)


def _one_call(model: BaseModel, segments: list[Segment], flash: bool) -> float:
    """Attention of these segments in one call, and its gradients, against attention segment by segment."""
    plan, tokens = PackedPlan(segments), segments[-1].end
    heads, kv_heads, dim = model.attention_shape
    random = _random_numbers(model)
    inputs = [random(1, heads, tokens, dim), random(1, kv_heads, tokens, dim), random(1, kv_heads, tokens, dim)]
    errors = []
    for window in {None, model.sliding_window and 20}:
        layer = LayerAttention(0, dim**-0.5, None, window)
        varlen = replace(VarlenPlan.of(plan, model.device), flash=flash)
        results, references = (
            _with_gradients(lambda q, k, v, p=p, layer=layer: p.attend(layer, q, k, v), inputs) for p in (varlen, plan)
        )
        errors.append(_error(results, references))
    return max(errors)


@torch.inference_mode()
def _from_the_cache(model: BaseModel, random: Callable[..., torch.Tensor]) -> float:
    """A chunk of a prompt whose first tokens are in the cache, next to a whole prompt."""
    heads, kv_heads, dim = model.attention_shape
    past, new, alone = PAGE_TOKENS + 5, 20, 9
    query, key, value = (random(1, count, new + alone, dim) for count in (heads, kv_heads, kv_heads))
    results = []
    for of in (partial(VarlenPlan.of, device=model.device), lambda plan: plan):
        cache = model.new_cache(3)
        layer = LayerAttention(cache.layers[0], dim**-0.5, None, None)
        for stored, seed in zip(cache.layer(layer.index), (1, 2), strict=True):
            stored.copy_(torch.randn(stored.shape, generator=torch.Generator().manual_seed(seed)))
        table = torch.tensor([2, 0], device=model.device)
        offsets = torch.arange(past - PAGE_TOKENS, past - PAGE_TOKENS + new, device=model.device)
        kv_slots = KVSlots(torch.zeros_like(offsets), offsets, torch.arange(new, device=model.device))
        plan = PackedPlan([Segment(0, new, past, table=table), Segment(new, new + alone)], cache, kv_slots)
        results.append([of(plan).attend(layer, query, key, value)])
    return _error(*results)


def joined_layers(model: BaseModel, graphs: Graphs) -> float:
    """The kernels between the projections of a joined layer, and their gradients."""
    heads, kv_heads, dim = model.attention_shape
    random, tokens = _random_numbers(model), 9
    width = model.config.hidden_size
    cos, sin = random(2, tokens, dim)
    norm, weight = random(heads + kv_heads, dim), random(width)
    eps = 1e-6
    cases: list[tuple[Callable[..., Any], list[torch.Tensor]]] = [
        (lambda m, x, delta: m.add_norm(x, delta, weight, eps), [random(tokens, width).float(), random(tokens, width)]),
        (lambda m, x: m.joined_swiglu(x), [random(tokens, 2 * model.config.intermediate_size)]),
    ]
    for norms in (norm, None):
        qkv = random(tokens, (heads + 2 * kv_heads) * dim)
        cases.append((lambda m, x, n=norms: m.split_heads(x, n, cos, sin, kv_heads, eps), [qkv]))
    errors = [_stored_heads(model, random, norm)]
    for compute, inputs in cases:
        results = [_with_gradients(lambda *x, m=m, c=compute: _flat(c(m, *x)), inputs) for m in (ops, plain)]
        errors.append(_error(*results))
    return max(errors)


def _stored_heads(model: BaseModel, random: Callable[..., torch.Tensor], norm: torch.Tensor) -> float:
    """The heads of a decode step, whose keys and values are stored in pages."""
    heads, kv_heads, dim = model.attention_shape
    _, keys, values, tables = _pages(model, [40, 40, 40])
    positions = torch.tensor([5, -1, 39], dtype=torch.int32, device=model.device)
    qkv, (cos, sin) = random(3, (heads + 2 * kv_heads) * dim), random(2, 3, dim)
    results = []
    for m in (ops, plain):
        pools = keys.clone(), values.clone()
        results.append([m.store_heads(qkv, norm, cos, sin, kv_heads, 1e-6, *pools, tables, positions), *pools])
    return _error(*results)


def _flat(outputs: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """All outputs of an operation, concatenated."""
    return torch.cat([out.flatten().float() for out in ([outputs] if isinstance(outputs, torch.Tensor) else outputs)])


def rotary(model: BaseModel, graphs: Graphs) -> float:
    heads, _, dim = model.attention_shape
    random = _random_numbers(model)
    x, cos, sin = random(9, heads, dim), random(9, dim), random(9, dim)
    results, references = (_with_gradients(lambda x, m=m: m.rotate(x, cos, sin, False), [x]) for m in (ops, plain))
    return _error(results, references)


def swiglu(model: BaseModel, graphs: Graphs) -> float:
    gate, up = _random_numbers(model)(2, 9, model.config.intermediate_size)
    return _error(_with_gradients(ops.swiglu, [gate, up]), _with_gradients(plain.swiglu, [gate, up]))
