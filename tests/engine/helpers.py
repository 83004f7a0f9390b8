"""Short spellings for what almost every test of the engine does, and how near its numbers must come.

Bounds are written as they hold on the CPU in float32. `tolerance`, `near`, `assert_near`, `assert_close`, `assert_repeats`
and `assert_same_tokens` turn them into what can be asked where the tests run (devices.py); `assert_same` asks for bits
everywhere and is for numbers that were copied, not computed twice.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tests.engine.devices import here
from tests.waiting import HANG_SECONDS
from tinker_local_backend import SamplingClient, SamplingParams, ServiceClient, TrainingClient
from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.lora_spec import ExpertLayout

VOCABULARY = 1536
"""ids of the random models"""

STEP = tinker.AdamParams(learning_rate=1e-2)


def make_training_client(
    service: ServiceClient,
    model: str,
    rank: int = 4,
    seed: int = 0,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
    expert_lora: ExpertLayout | None = None,
) -> TrainingClient:
    """A training client whose B matrices are not zero, so that its adapter changes every logit."""
    parts: dict[str, Any] = {"train_mlp": train_mlp, "train_attn": train_attn, "train_unembed": train_unembed}
    client = service.create_lora_training_client(model, rank, seed, **parts, expert_lora=expert_lora).result()
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, matrix in sorted(client._run.state.adapter.b.items()):
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * (0.02 if "lm_head" in name else 0.05))
    return client


def random_tokens(length: int, seed: int) -> list[int]:
    """Ids without the special ones at the end of the vocabulary."""
    return np.random.default_rng(seed).integers(0, 1500, length).tolist()


def prompt(tokens: Iterable[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


def datum(tokens: Sequence[int], **inputs: object) -> tinker.Datum:
    """A datum from arrays (float ones become float32). Policy losses get provenance: all of it sampled somewhere else."""
    elsewhere: tinker.types.ProvenanceSpans | None = None
    if "advantages" in inputs:
        elsewhere = [tinker.SampledProvenanceSpan(sequence_id="elsewhere", length=len(tokens))]
    return tinker.Datum(
        model_input_spans=elsewhere,
        loss_fn_input_spans=elsewhere,
        model_input=prompt(tokens),
        loss_fn_inputs={
            key: value if isinstance(value, tinker.TensorData) else tinker.TensorData.from_numpy(np.asarray(value))
            for key, value in inputs.items()
        },
    )


def cross_entropy_datum(length: int, seed: int) -> tinker.Datum:
    """Random tokens, random targets, weights of both signs and some zeros."""
    rng = np.random.default_rng(seed)
    weights = np.round(rng.normal(size=length), 1).astype(np.float32)
    return datum(
        rng.integers(0, 1500, length).tolist(), target_tokens=rng.integers(0, VOCABULARY, length), weights=weights
    )


def policy_datum(
    length: int, seed: int, client: TrainingClient | None = None, temperature: float = 1.0
) -> tinker.Datum:
    """Advantages of both signs; sampled logprobs near the client's own, so that ratios lie on both sides of any clip."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 1500, length).tolist(), rng.integers(0, VOCABULARY, length)
    logprobs = np.full(length, -7.0, dtype=np.float32)
    if client is not None:
        scored = datum(tokens, target_tokens=targets, weights=np.zeros(length, dtype=np.float32))
        output = client.forward([scored], "cross_entropy", {"temperature": temperature}).result()
        logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    return datum(
        tokens,
        target_tokens=targets,
        logprobs=(logprobs + rng.normal(scale=0.4, size=length)).astype(np.float32),
        advantages=np.round(rng.normal(size=length), 1).astype(np.float32),
    )


def gradients(client: TrainingClient) -> dict[str, np.ndarray]:
    """Copies of what forward_backward has accumulated so far, by matrix name."""
    accumulated = client._run.state.gradients
    assert accumulated is not None
    names = [name for name, _ in client._run.state.adapter.named_parameters()]
    return {name: gradient.cpu().numpy().copy() for name, gradient in zip(names, accumulated, strict=True)}


def weights(client: TrainingClient) -> dict[str, np.ndarray]:
    """Copies of a client's matrices."""
    return {name: m.detach().cpu().numpy().copy() for name, m in client._run.state.adapter.named_parameters()}


FLOAT32_ELSEWHERE = 1e-4
"""The smallest bound for float32 on another device, where sums are added up in other orders for other shapes."""

BFLOAT16_MEAN, BFLOAT16_FAR = 0.04, 0.5
"""Mean and 99.9th percentile of the difference of two logprobs computed in bfloat16, or of one from the truth."""

BFLOAT16_MEAN_OF_LARGEST, BFLOAT16_FAR_OF_LARGEST = 0.02, 0.2
"""The same for the entries of a gradient matrix, as shares of its largest entry."""


def tolerance(bound: float) -> float:
    """What a bound on the difference of two numbers near 1 becomes where the tests run."""
    if here().is_reference:
        return bound
    return max(10 * bound, FLOAT32_ELSEWHERE if here().dtype == torch.float32 else BFLOAT16_FAR)


def near(expected: Any, rel: float, abs: float = 0.0) -> Any:
    """pytest.approx with bounds as they hold on the CPU in float32."""
    if here().is_reference:
        return pytest.approx(expected, rel=rel, abs=abs)
    if here().dtype == torch.float32:
        return pytest.approx(expected, rel=tolerance(rel), abs=tolerance(abs))
    return pytest.approx(expected, rel=0.03, abs=tolerance(abs))


def assert_near(found: Any, expected: Any, atol: float, rtol: float = 0.0, err_msg: str = "") -> None:
    """Logits or logprobs within `atol` + `rtol` * |expected|; in bfloat16 by mean and 99.9th percentile."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if here().dtype == torch.float32:
        rtol = tolerance(rtol) if rtol else 0.0
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=tolerance(atol), err_msg=err_msg)
        return
    assert found.shape == expected.shape, err_msg
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=err_msg)
    difference = np.abs(found - expected)[~np.isnan(expected)]
    _assert_spread(difference, BFLOAT16_MEAN, BFLOAT16_FAR, err_msg)


def _assert_spread(difference: np.ndarray, mean: float, far: float, what: str) -> None:
    """`mean` is that of many differences; that of a few strays from it by about its own size over the root of their number."""
    if difference.size:
        allowed = mean * (1 + 4 / difference.size**0.5), far
        found = float(difference.mean()), float(np.quantile(difference, 0.999))
        assert found[0] <= allowed[0] and found[1] <= far, f"{what}: mean and 99.9th percentile {found}, not {allowed}"


def assert_same(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    """Equal to the last bit, everywhere: the one is a copy of the other."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


def assert_close(
    left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], rtol: float, rtol_of_all: float = 0.0
) -> None:
    """Every gradient matrix within `rtol` of its own largest entry, or `rtol_of_all` of the largest of all."""
    assert left.keys() == right.keys()
    most = max(float(np.abs(array).max()) for array in right.values())
    for name, array in left.items():
        largest = float(np.abs(right[name]).max())
        if here().dtype == torch.float32:
            atol = tolerance(rtol) * largest + (tolerance(rtol_of_all) * most if rtol_of_all else 0.0) + 1e-12
            np.testing.assert_allclose(array, right[name], rtol=0, atol=atol, err_msg=name)
        else:
            unit = largest + (most / 10 if rtol_of_all else 0.0)
            difference = np.abs(array - right[name])
            mean, far = BFLOAT16_MEAN_OF_LARGEST * unit, BFLOAT16_FAR_OF_LARGEST * unit
            _assert_spread(difference, mean + 1e-12, far + 1e-12, name)


def assert_adapters_close(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], rtol: float) -> None:
    """As `assert_close`, for what is computed in float32 whatever the dtype of the base model: optimizer steps."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        bound = rtol if here().keeps_bits else max(rtol, FLOAT32_ELSEWHERE)
        atol = bound * float(np.abs(right[name]).max()) + 1e-12
        np.testing.assert_allclose(array, right[name], rtol=0, atol=atol, err_msg=name)


def assert_repeats(found: Any, expected: Any) -> None:
    """The same calls made twice: equal to the last bit on the CPU, up to rounding on another device.

    For numbers, arrays, tuples, lists and dicts of them. Arrays in a dict count as matrices that were trained, where rounding
    may turn the sign of a step by a gradient that is almost zero.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if here().keeps_bits or not isinstance(value, np.ndarray):
                assert_repeats(found[key], value)
            else:
                largest = float(np.abs(value).max()) + 1e-12
                _assert_spread(np.abs(found[key] - value), 1e-3 * largest, 1e-1 * largest, key)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_repeats(one, other)
    elif isinstance(expected, np.ndarray):
        if here().keeps_bits:
            np.testing.assert_array_equal(found, expected)
        else:
            assert_near(found, expected, atol=1e-5, rtol=1e-5)
    elif isinstance(expected, float) and not here().keeps_bits:
        assert found == near(expected, rel=1e-5, abs=1e-5)
    else:
        assert found == expected


tokens_compared: Counter[str] = Counter()
"""Within a test: "tokens" that were compared, and how many of them were "beside" the expected one or "elsewhere"."""


@dataclass(frozen=True)
class Ties:
    """How many draws of the same noise may fall on another token, where the last bits of a logit depend on the batch.

    A draw is a point of the cumulative distribution, which the rounding of the logits shifts a little: past the border of
    its token to one beside it, by id. Only where few tokens are left (top-k) are neighbours far apart. What was computed for
    another context or adapter draws a token anywhere. Shares are of the tokens compared within a test.
    """

    beside: int
    """ids are beside each other that differ by no more"""
    beside_allowed: float
    elsewhere_allowed: float
    free: int
    """of either kind in any test"""


TIES = {torch.float32: Ties(4, 0.01, 0.001, 1), torch.bfloat16: Ties(64, 0.25, 0.04, 2)}
"""Measured in bfloat16 on the CPU, where half of the shapes give the same bits: 0.02 and 0.001."""


def assert_same_tokens(found: Iterable[Iterable[int]], expected: Iterable[Iterable[int]]) -> list[bool]:
    """Sequences drawn with the same noise from the same distributions. Returns which of them are the same throughout.

    On the CPU in float32 all are. Elsewhere as few may part as `Ties` says; what comes after that is not compared.
    """
    pairs = list(zip(map(list, found), map(list, expected), strict=True))
    if here().is_reference:
        assert [left for left, _ in pairs] == [right for _, right in pairs]
    ties = TIES[here().dtype]
    for left, right in pairs:
        same = common_tokens(left, right)
        tokens_compared["tokens"] += same + (left != right)
        if left != right:
            both_go_on = same < min(len(left), len(right))
            beside = both_go_on and abs(left[same] - right[same]) <= ties.beside
            tokens_compared["beside" if beside else "elsewhere"] += 1
    for kind, share in (("beside", ties.beside_allowed), ("elsewhere", ties.elsewhere_allowed)):
        allowed = ties.free + int(share * tokens_compared["tokens"])
        assert tokens_compared[kind] <= allowed, (dict(tokens_compared), [pair for pair in pairs if pair[0] != pair[1]])
    return [left == right for left, right in pairs]


def assert_samples_agree(found: Sequence[Any], expected: Sequence[Any], atol: float = 1e-5) -> None:
    """Samples (with `tokens` and `logprobs`): the same tokens, and logprobs up to rounding as long as they are the same."""
    assert_same_tokens((s.tokens for s in found), (s.tokens for s in expected))
    for left, right in zip(found, expected, strict=True):
        assert len(left.logprobs) == len(left.tokens)
        same = common_tokens(left.tokens, right.tokens)
        assert_near(left.logprobs[:same], right.logprobs[:same], atol)


def common_tokens(left: Iterable[int], right: Iterable[int]) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def pass_tokens(patch: pytest.MonkeyPatch, tokens: int) -> None:
    """Let training take no more than so many tokens in one pass, whatever the device."""
    patch.setattr("tinker_local_backend.engine.training.activations.max_pass_tokens", lambda device: tokens)


def activation_memory(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let a training pass keep no more than so many bytes of activations, whatever the device."""
    patch.setattr("tinker_local_backend.engine.training.activations.DEFAULT_ACTIVATION_BYTES_CPU", size)
    patch.setattr("tinker_local_backend.engine.training.activations.activation_room", lambda device: size)


def drop_gradients(client: TrainingClient) -> None:
    client._run.state.clear()


def params(max_tokens: int | None = 8, temperature: float = 1.0, **fields) -> tinker.SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, **fields)


def tokens_of(client: SamplingClient, tokens: Sequence[int], samples: int = 1, **fields) -> list[list[int]]:
    """Token ids of each sample."""
    return [s.tokens for s in client.sample(prompt(tokens), samples, params(**fields)).result().sequences]


def at_once(submit: Callable[[], Sequence[tinker.APIFuture]]) -> list[Any]:
    """Results of requests that reach the engine in one piece, so that its batches are the same in every run."""

    async def main() -> list[Any]:
        return [await future for future in submit()]

    return asyncio.run(main())


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """The worker does nothing within: what is submitted reaches it in one piece."""
    begun, release = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        release.wait(HANG_SECONDS)

    engine.submit("hold", hold)
    assert begun.wait(HANG_SECONDS)
    try:
        yield
    finally:
        release.set()
