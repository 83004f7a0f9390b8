"""Every loss and its gradient, through the whole engine, against the plain float64 model on each sequence by itself.

Hypothesis draws ragged data (shared prefixes, equal sequences, single tokens, targets of every form) and how the engine
has to divide it: into calls, passes, chunks of the vocabulary, with and without recomputation.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import tinker
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from benchmarks.reference import Reference, loss_and_gradients
from tests.drawn import examples
from tests.engine.devices import here
from tests.engine.helpers import (
    VOCABULARY,
    activation_memory,
    assert_close,
    assert_near,
    datum,
    drop_gradients,
    gradients,
    make_training_client,
    pass_tokens,
    random_tokens,
)
from tinker_local_backend import ServiceClient, TrainingClient
from tinker_local_backend.engine.training.losses import LOSSES

TRUNK = random_tokens(24, 7)
POLICY_LOSSES = [name for name, loss in LOSSES.items() if loss.is_policy_loss]

# Ratios per token, and per sequence for gspo, on both sides of every bound below and none so near to one that float32
# could fall on its other side. The last two overflow and underflow there.
TOKEN_RATIOS = np.log([0.02, 0.45, 0.78, 0.95, 1.0, 1.06, 1.3, 3.5, 4.6, 60.0])
SEQUENCE_RATIOS = np.log([0.5, 0.998, 0.99985, 1.0, 1.0002, 1.001, 2.0, 20.0])
EXTREME = 200.0
CONFIGS: dict[str, list[dict[str, float]]] = {
    "cross_entropy": [{}],
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.1}, {"clip_low_threshold": 0.0}],
    "cispo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}],
    "dro": [{}, {"beta": 1.5}, {"beta": 0.0}],
    "gspo": [{}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25}],
    "sapo": [{}, {"temperature_positive": 3.0, "temperature_negative": 0.5}],
    "stable_reinforce": [
        {},
        {"weight_cap": 1.2, "token_ratio_low": 0.7, "token_ratio_high": 1.6, "sequence_log_ratio_bound": 0.31},
        {"weight_cap": 50.0, "token_ratio_low": 0.0, "token_ratio_high": 1e9, "sequence_log_ratio_bound": 1e9},
    ],
}


@dataclass(frozen=True)
class Shape:
    """A sequence: so many tokens of the common trunk, so many of its own; the rest comes from the seed."""

    shared: int
    own: int
    seed: int
    extreme: bool
    targets: str

    @property
    def tokens(self) -> list[int]:
        return [*TRUNK[: self.shared], *random_tokens(self.own, self.seed)]


SHAPES = st.builds(
    Shape,
    shared=st.sampled_from([0, 1, 3, 9, 16]),
    own=st.integers(0, 12),
    seed=st.integers(0, 5),
    extreme=st.booleans(),
    targets=st.sampled_from(["(N,)", "(N, K)", "sparse"]),
).filter(lambda shape: shape.shared + shape.own > 0)


@dataclass(frozen=True)
class Split:
    """How the engine must divide what it is given."""

    cuts: frozenset[int]
    steps: int
    pass_tokens: int
    chunk_rows: int
    recompute: bool

    def calls(self, data: Sequence[tinker.Datum]) -> list[list[tinker.Datum]]:
        bounds = [0, *sorted(cut for cut in self.cuts if cut < len(data)), len(data)]
        return [list(data[start:end]) for start, end in pairwise(bounds)]

    @contextmanager
    def forced(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TINKER_LOCAL_GRAD_ACCUM_STEPS", str(self.steps))
            pass_tokens(patch, self.pass_tokens)
            patch.setattr("tinker_local_backend.engine.model.head.CHUNK_ELEMENTS", self.chunk_rows * VOCABULARY)
            if self.recompute:
                activation_memory(patch, 1)
            yield


SPLITS = st.builds(
    Split,
    cuts=st.frozensets(st.integers(1, 4)),
    steps=st.integers(1, 6),
    pass_tokens=st.sampled_from([1, 20, 45, 10_000]),
    chunk_rows=st.sampled_from([1, 3, 7, 2000]),
    recompute=st.booleans(),
)


@pytest.fixture(scope="module")
def client(service: ServiceClient, tied_model: str) -> TrainingClient:
    return make_training_client(service, tied_model)


def supervised(shape: Shape) -> tinker.Datum:
    """Weights of both signs, and positions and targets of weight 0."""
    rng = np.random.default_rng((shape.seed, 1))
    length = len(shape.tokens)
    size = (length,) if shape.targets == "(N,)" else (length, int(rng.integers(1, 7)))
    targets = rng.integers(0, VOCABULARY, size)
    weights = (rng.normal(size=size) * (rng.random(size) < 0.5)).astype(np.float32)
    if shape.targets != "sparse":
        return datum(shape.tokens, target_tokens=targets, weights=weights)
    targets[weights == 0] = 0
    sparse = tinker.TensorData.from_torch_sparse
    return datum(
        shape.tokens, target_tokens=sparse(torch.from_numpy(targets)), weights=sparse(torch.from_numpy(weights))
    )


def policy(shape: Shape, loss_fn: str, lp: np.ndarray, targets: np.ndarray) -> tinker.Datum:
    """Sampled logprobs that give chosen ratios at the model's logprobs `lp`; nonsense where the advantage is 0."""
    rng = np.random.default_rng((shape.seed, 2))
    length = len(lp)
    advantages = rng.normal(size=length) * (rng.random(length) < 0.7)
    mask = (rng.random(length) < 0.7) | (advantages != 0)
    if rng.random() < 0.5:  # the mask may be narrower than the advantages
        mask &= np.arange(length) >= length // 2
    mask[-1] = True
    if loss_fn == "gspo":
        noise = rng.normal(scale=0.3, size=length)
        noise -= noise[mask].mean()
        log_ratio = rng.choice(SEQUENCE_RATIOS) + noise
        if shape.extreme:
            log_ratio, advantages = log_ratio - log_ratio[mask].mean() + EXTREME, np.abs(advantages)
        size = float(np.exp(min(log_ratio[mask].mean(), EXTREME / 2)))
    else:
        log_ratio = rng.choice(TOKEN_RATIOS, length)
        if shape.extreme and loss_fn in ("ppo", "cispo", "sapo", "stable_reinforce"):
            log_ratio = np.where(advantages > 0, EXTREME, -EXTREME)
        size = np.exp(np.minimum(log_ratio, EXTREME / 2))
    if not shape.extreme and loss_fn != "dro":
        advantages = advantages / np.maximum(size, 1.0)  # no position drowns the others
    not_sampled = 0.0 if loss_fn == "stable_reinforce" else rng.choice([0.0, -1e4])  # its sequences would all be masked
    q = np.where((advantages != 0) | mask, lp - log_ratio, not_sampled)
    inputs = {
        "target_tokens": targets,
        "logprobs": q.astype(np.float32),
        "advantages": advantages.astype(np.float32),
    }
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = mask.astype(np.float32)
    return datum(shape.tokens, **inputs)


def make_data(client: TrainingClient, loss_fn: str, shapes: Sequence[Shape], temperature: float) -> list[tinker.Datum]:
    if loss_fn == "cross_entropy":
        return [supervised(shape) for shape in shapes]
    scored = []
    for shape in shapes:
        length = len(shape.tokens)
        targets = np.random.default_rng((shape.seed, 3)).integers(0, VOCABULARY, length)
        scored.append(datum(shape.tokens, target_tokens=targets, weights=np.zeros(length, dtype=np.float32)))
    outputs = client.forward(scored, "cross_entropy", {"temperature": temperature}).result().loss_fn_outputs
    return [
        policy(
            shape, loss_fn, out["logprobs"].to_numpy().astype(float), plain.loss_fn_inputs["target_tokens"].to_numpy()
        )
        for shape, out, plain in zip(shapes, outputs, scored, strict=True)
    ]


def summed(data: Sequence[tinker.Datum], logprobs: Sequence[np.ndarray]) -> float:
    """The terms of importance sampling without their signs, of the reference's logprobs."""
    total = 0.0
    for one, wanted in zip(data, logprobs, strict=True):
        inputs = {name: tensor.to_numpy().astype(float) for name, tensor in one.loss_fn_inputs.items()}
        trained = inputs["advantages"] != 0
        ratios = np.exp((np.asarray(wanted) - inputs["logprobs"])[trained])
        total += float((ratios * np.abs(inputs["advantages"][trained])).sum())
    return total


@pytest.mark.parametrize("loss_fn", list(LOSSES))
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    split=SPLITS,
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    choice=st.integers(0, 2),
)
def test_any_split_has_the_loss_and_the_gradient_of_plain_float64(
    client: TrainingClient,
    reference: Reference,
    loss_fn: str,
    shapes: list[Shape],
    split: Split,
    temperature: float,
    choice: int,
) -> None:
    config = CONFIGS[loss_fn][choice % len(CONFIGS[loss_fn])]
    data = make_data(client, loss_fn, shapes, temperature)
    try:
        with split.forced():
            given_config = {**config, "temperature": temperature}
            futures = [client.forward_backward(part, loss_fn, given_config) for part in split.calls(data)]
            outputs = [future.result() for future in futures]
        found = gradients(client)
    finally:
        drop_gradients(client)
    records = [record["logprobs"] for output in outputs for record in output.loss_fn_outputs]
    at = None if here().is_reference else [record.to_numpy() for record in records]
    loss, logprobs, expected = loss_and_gradients(reference, client, data, loss_fn, temperature, config, at)
    # Rounding is relative to what is summed, also where large terms of both signs leave little.
    bound = 2e-5 * (summed(data, logprobs) if loss_fn == "importance_sampling" else 0.0)
    total = sum(output.metrics["loss:sum"] for output in outputs)
    assert total == pytest.approx(loss, rel=2e-5, abs=max(2e-4, bound))
    for record, wanted in zip(records, logprobs, strict=True):
        assert record.dtype == "float32"
        assert_near(record.to_numpy(), wanted, atol=1e-4)
    # A matrix may have gradient zero in theory (keys of a single token) and rounding in practice; and float64 has numbers
    # left where float32 has none.
    assert_close(found, expected, rtol=1e-4, rtol_of_all=1e-6)


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
@pytest.mark.parametrize("masked", [0.0, 1.0])
@pytest.mark.parametrize("q", [0.0, -1e4])
def test_without_advantages_there_is_no_gradient(client: TrainingClient, loss_fn: str, masked: float, q: float) -> None:
    """Exactly none, whatever the logprobs say; the call itself is not an error. dro must have no logprobs either."""
    if loss_fn == "dro" and q != 0:
        pytest.skip("dro pulls a sampled token to the sampler whatever its advantage")
    tokens = random_tokens(9, 1)
    inputs = {
        "target_tokens": np.array(tokens),
        "logprobs": np.full(9, q, dtype=np.float32),
        "advantages": np.zeros(9, dtype=np.float32),
    }
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = np.full(9, masked, dtype=np.float32)
    output = client.forward_backward([datum(tokens, **inputs)], loss_fn).result()
    found = gradients(client)
    drop_gradients(client)
    assert output.metrics["loss:sum"] == 0 and output.metrics["trained_tokens:sum"] == 0
    assert not any(matrix.any() for matrix in found.values())
    assert ("ratio:mean" in output.metrics) == (q != 0)
