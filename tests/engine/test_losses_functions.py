"""Each loss as a function of tensors, in float64: its value, its gradient, and no infinity from what is left out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reference import DEFAULTS, datum_loss
from tests.drawn import examples
from tinker_local_backend.engine.training.losses import LOSSES

POLICY_LOSSES = [name for name, loss in LOSSES.items() if loss.is_policy_loss]
CLIPPED_LOSSES = [name for name in POLICY_LOSSES if "clip_high_threshold" in LOSSES[name].config]

Inputs = dict[str, torch.Tensor]


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def policy_inputs(q: torch.Tensor, advantages: torch.Tensor, **more: torch.Tensor) -> Inputs:
    """One sequence, all of it in the ratio unless `more` says otherwise."""
    one_sequence = {
        "sequence_ratio_mask": torch.ones_like(q),
        "sequence_index": torch.zeros(q.shape, dtype=torch.int64),
    }
    return {"logprobs": q, "advantages": advantages, **one_sequence, **more}


def value_and_gradient(
    loss_fn: str, lp: torch.Tensor, inputs: Inputs, **config: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elementwise loss, and the gradient of its sum by lp."""
    lp = lp.clone().requires_grad_()
    elementwise = LOSSES[loss_fn].compute(lp, inputs, {**LOSSES[loss_fn].config, **config})
    assert elementwise.shape == lp.shape
    (gradient,) = torch.autograd.grad(elementwise.sum(), lp)
    return elementwise.detach(), gradient


def test_defaults() -> None:
    """Written down a second time: a change of a default changes what users train."""
    assert {name: dict(loss.config) for name, loss in LOSSES.items()} == DEFAULTS


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    ratio = column(0.5, 3.0, 9.0, 9.0)
    lp, advantages = column(-1.0, -2.0, -3.0, -0.5), column(1.0, -2.0, 1.0, -1.0)
    inputs = policy_inputs(lp - ratio.log(), advantages)
    value, gradient = value_and_gradient("cispo", lp, inputs)
    torch.testing.assert_close(value, column(0.5, -12.0, 12.0, -2.0))
    torch.testing.assert_close(gradient, column(-0.5, 6.0, -4.0, 4.0))
    _, bounded = value_and_gradient("cispo", lp, inputs, clip_low_threshold=0.8, clip_high_threshold=1.2)
    torch.testing.assert_close(bounded, column(-0.8, 2.4, -1.2, 1.2))


def test_ppo_stops_where_the_ratio_has_gone_far_enough() -> None:
    ratio = column(0.5, 0.5, 1.5, 1.5, 1.1)
    lp, advantages = column(-1.0, -1.0, -1.0, -1.0, -1.0), column(1.0, -1.0, 1.0, -1.0, 1.0)
    value, gradient = value_and_gradient("ppo", lp, policy_inputs(lp - ratio.log(), advantages))
    torch.testing.assert_close(value, column(-0.5, 0.8, -1.2, 1.5, -1.1))
    torch.testing.assert_close(gradient, column(-0.5, 0.0, 0.0, 1.5, -1.1))


def test_sapo_fades_on_both_sides_of_one_and_faster_for_bad_tokens() -> None:
    """Golden: 4 / t * sigmoid(t * (r - 1)) and its derivative by log r, computed by hand with t = 1 and t = 2."""
    ratio = column(1.0, 1.0, 3.0, 3.0, 0.2)
    lp, advantages = column(-1.0, -1.0, -1.0, -1.0, -1.0), column(1.5, -1.5, 1.0, -1.0, 1.0)
    inputs = policy_inputs(lp - ratio.log(), advantages)
    config = {"temperature_positive": 1.0, "temperature_negative": 2.0}
    value, gradient = value_and_gradient("sapo", lp, inputs, **config)
    torch.testing.assert_close(value, column(-3.0, 1.5, -3.523188, 1.964028, -1.240102), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, column(-1.5, 1.5, -1.259923, 0.211952, -0.171128), rtol=1e-5, atol=1e-6)
    binds = LOSSES["sapo"].clip_binds
    assert binds is not None
    assert binds(ratio, inputs, config).flatten().tolist() == [False, False, True, True, False]


def test_dro_pulls_towards_the_sampler() -> None:
    lp, q, advantages = column(-1.0, -2.0, -3.0), column(-2.0, -1.0, -3.0), column(2.0, 2.0, -1.0)
    value, gradient = value_and_gradient("dro", lp, policy_inputs(q, advantages), beta=0.5)
    torch.testing.assert_close(value, column(2.0 + 0.25, 4.0 + 0.25, -3.0))
    torch.testing.assert_close(gradient, column(-2.0 + 0.5, -2.0 - 0.5, 1.0))
    _, free = value_and_gradient("dro", lp, policy_inputs(q, advantages), beta=0.0)
    torch.testing.assert_close(free, -advantages)


def test_gspo_has_one_ratio_per_sequence_over_its_mask() -> None:
    """Two sequences: log ratios (0.5 and -0.1 in the mask, 7 outside) and (-0.3)."""
    lp = column(-1.0, -1.0, -1.0, -1.0)
    inputs = policy_inputs(
        lp - column(0.5, 7.0, -0.1, -0.3),
        column(1.0, 0.0, -2.0, 1.0),
        sequence_ratio_mask=column(1.0, 0.0, 1.0, 1.0),
        sequence_index=torch.tensor([[0], [0], [0], [1]]),
    )
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    first, second = math.exp(0.2), math.exp(-0.3)
    value, gradient = value_and_gradient("gspo", lp, inputs, **wide)
    torch.testing.assert_close(value, column(-first, 0.0, 2 * first, -second))
    torch.testing.assert_close(gradient, column(-first, 0.0, 2 * first, -second))
    value, gradient = value_and_gradient("gspo", lp, inputs)  # the first is above 1.0004: good tokens are clipped
    torch.testing.assert_close(value, column(-1.0004, 0.0, 2 * first, -second))
    torch.testing.assert_close(gradient, column(0.0, 0.0, 2 * first, -second))


def test_cross_entropy_takes_weights_of_any_sign() -> None:
    lp, weights = column(-1.0, -2.0, -3.0), column(2.0, -0.5, 0.0)
    value, gradient = value_and_gradient("cross_entropy", lp, {"weights": weights})
    torch.testing.assert_close(value, column(2.0, -1.0, 0.0))
    torch.testing.assert_close(gradient, -weights)


@st.composite
def packed_sequences(draw: st.DrawFn) -> tuple[torch.Tensor, Inputs]:
    """lp (T, 1) and inputs of a few sequences; ratios from tiny to large, a third of the advantages zero."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    spread = draw(st.sampled_from([1e-4, 0.1, 3.0]))
    rows = sum(lengths)
    lp = torch.from_numpy(-rng.exponential(3.0, (rows, 1)))
    q = lp - torch.from_numpy(rng.normal(scale=spread, size=(rows, 1)))
    advantages = torch.from_numpy(rng.normal(size=(rows, 1)) * (rng.random((rows, 1)) < 0.67))
    mask = torch.from_numpy((rng.random((rows, 1)) < 0.7).astype(np.float64))
    mask[np.cumsum(lengths) - 1] = 1.0
    index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[:, None])
    return lp, policy_inputs(q, advantages, sequence_ratio_mask=mask, sequence_index=index)


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
@examples(60)
@given(batch=packed_sequences(), bounds=st.sampled_from([None, (0.5, 1.1), (0.9, 0.95), (1.0, 1.0)]))
def test_every_policy_loss_is_its_formula(
    loss_fn: str, batch: tuple[torch.Tensor, Inputs], bounds: tuple[float, float] | None
) -> None:
    """Value and gradient of a pack are those of each sequence by itself."""
    lp, inputs = batch
    config = dict(DEFAULTS[loss_fn])
    if bounds is not None and loss_fn in CLIPPED_LOSSES:
        config = {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}
    value, gradient = value_and_gradient(loss_fn, lp, inputs, **config)
    for sequence in inputs["sequence_index"].unique():
        rows = inputs["sequence_index"][:, 0] == sequence
        alone = lp[rows, 0].clone().requires_grad_()
        expected = datum_loss(loss_fn, alone, {key: part[rows, 0] for key, part in inputs.items()}, config)
        torch.testing.assert_close(value[rows].sum(), expected.detach(), rtol=1e-10, atol=1e-12)
        if expected.requires_grad:
            (wanted,) = torch.autograd.grad(expected, alone)
            torch.testing.assert_close(gradient[rows, 0], wanted, rtol=1e-10, atol=1e-12)
        else:
            assert not gradient[rows].any()


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_a_planted_sign_error_is_no_formula(monkeypatch: pytest.MonkeyPatch, loss_fn: str) -> None:
    """The comparison with the formula notices a loss whose sign is turned, and one whose advantages' sign is."""
    right = LOSSES[loss_fn]
    lp = column(-1.0, -2.0, -0.5)
    inputs = policy_inputs(lp - column(0.1, -0.3, 0.0), column(1.0, -2.0, 0.5))
    config = DEFAULTS[loss_fn]
    expected = datum_loss(loss_fn, lp[:, 0], {key: part[:, 0] for key, part in inputs.items()}, config)
    wrong_ones = (
        lambda lp, inputs, config: -right.compute(lp, inputs, config),
        lambda lp, inputs, config: right.compute(lp, {**inputs, "advantages": -inputs["advantages"]}, config),
    )
    for wrong in wrong_ones:
        monkeypatch.setitem(LOSSES, loss_fn, replace(right, compute=wrong))
        value, _ = value_and_gradient(loss_fn, lp, inputs)
        assert abs(float(value.sum() - expected)) > 1e-3
    monkeypatch.setitem(LOSSES, loss_fn, right)
    value, _ = value_and_gradient(loss_fn, lp, inputs)
    torch.testing.assert_close(value.sum(), expected.detach())


@examples(40)
@given(batch=packed_sequences())
def test_gspo_of_single_tokens_is_ppo_and_without_bounds_importance_sampling(
    batch: tuple[torch.Tensor, Inputs],
) -> None:
    lp, inputs = batch
    inputs = policy_inputs(
        inputs["logprobs"], inputs["advantages"], sequence_index=torch.arange(len(lp), dtype=torch.int64)[:, None]
    )
    for found, wanted in zip(
        value_and_gradient("gspo", lp, inputs, clip_low_threshold=0.8, clip_high_threshold=1.2),
        value_and_gradient("ppo", lp, inputs, clip_low_threshold=0.8, clip_high_threshold=1.2),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(
        value_and_gradient("gspo", lp, inputs, clip_low_threshold=0.0, clip_high_threshold=1e9),
        value_and_gradient("importance_sampling", lp, inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def gradcheck(loss_fn: str, lp: torch.Tensor, inputs: Inputs, q_moves_along: bool = False, **config: float) -> None:
    """Finite differences of the loss against its autograd gradient."""
    log_ratio = lp - inputs["logprobs"] if "logprobs" in inputs else lp

    def total(x: torch.Tensor) -> torch.Tensor:
        given = {**inputs, "logprobs": x.detach() - log_ratio} if q_moves_along else inputs
        return LOSSES[loss_fn].compute(x, given, {**LOSSES[loss_fn].config, **config}).sum()

    assert torch.autograd.gradcheck(total, lp.clone().requires_grad_())


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "dro", "sapo"])
def test_gradients_are_those_of_the_value(loss_fn: str) -> None:
    lp = column(-0.5, -1.5, -2.5, -3.5, -1.0)
    inputs = policy_inputs(lp - column(0.3, -0.4, 0.05, 0.4, 2.0), column(1.0, -1.0, 0.5, -2.0, 0.0))
    gradcheck(loss_fn, lp, {**inputs, "weights": column(1.0, -0.5, 0.0, 2.0, 3.0)})


def test_the_gradient_of_cispo_is_that_of_its_value_at_fixed_weights() -> None:
    lp = column(-0.5, -1.5, -2.5, -3.5)
    inputs = policy_inputs(lp - column(0.3, -0.4, 3.0, 3.0), column(1.0, -1.0, 0.5, -2.0))
    gradcheck("cispo", lp, inputs, q_moves_along=True)


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_the_gradient_of_gspo_is_that_of_the_sequence_objective(advantage: float) -> None:
    """With one advantage for the whole sequence, N * s * A differentiates to s * A at each of its N tokens."""
    lp = column(-0.5, -1.5, -2.5)
    inputs = policy_inputs(lp - column(0.3, -0.2, 0.05), torch.full_like(lp, advantage))
    gradcheck("gspo", lp, inputs, clip_low_threshold=0.5, clip_high_threshold=2.0)


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("masked", [0.0, 1.0])
def test_a_position_without_advantage_adds_exactly_nothing(
    loss_fn: str, dtype: torch.dtype, q: float, masked: float
) -> None:
    """To the losses that multiply by the advantage, whatever its ratio; to dro if it was not sampled (q = 0)."""
    if loss_fn == "dro" and q != 0:
        pytest.skip("dro pulls a sampled token to the sampler whatever its advantage")
    lp = column(-1.0, -2.0).to(dtype)
    nothing = torch.zeros_like(lp)
    inputs = policy_inputs(torch.full_like(lp, q), nothing, sequence_ratio_mask=torch.full_like(lp, masked))
    value, gradient = value_and_gradient(loss_fn, lp, inputs)
    assert value.dtype == gradient.dtype == dtype
    assert torch.equal(value, nothing) and torch.equal(gradient, nothing)


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_the_ratio_is_one_where_nothing_was_sampled(loss_fn: str) -> None:
    lp, advantages = column(-1.0, -2.0, -3.0, -4.0), column(1.0, 0.0, -1.0, 0.0)
    q = torch.where(column(1, 0, 1, 1) == 1, lp - 0.5, 0.0)
    inputs = policy_inputs(q, advantages, sequence_ratio_mask=column(1.0, 0.0, 1.0, 1.0))
    ratio = LOSSES[loss_fn].ratio(lp, inputs)
    torch.testing.assert_close(ratio, column(math.exp(0.5), 1.0, math.exp(0.5), math.exp(0.5)))


def test_dro_pulls_a_sampled_token_without_advantage_to_the_sampler() -> None:
    lp, q = column(-1.0, -3.0, -2.0), column(-2.0, -2.5, 0.0)  # the last was not sampled
    value, gradient = value_and_gradient("dro", lp, policy_inputs(q, torch.zeros_like(lp)), beta=0.4)
    torch.testing.assert_close(value, column(0.2 * 1.0, 0.2 * 0.25, 0.0))
    torch.testing.assert_close(gradient, column(0.4 * 1.0, 0.4 * -0.5, 0.0))


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_a_loss_stays_on_the_device_of_its_logprobs(loss_fn: str) -> None:
    """The meta device stands for a GPU: mixed with tensors on the CPU it is an error."""
    lp = column(-1.0, -2.0)
    inputs = {key: value.to("meta") for key, value in policy_inputs(lp - 0.5, torch.ones_like(lp)).items()}
    loss = LOSSES[loss_fn].compute(lp.to("meta"), inputs, LOSSES[loss_fn].config)
    assert loss.device.type == "meta" and loss.shape == lp.shape


@pytest.mark.parametrize("loss_fn", CLIPPED_LOSSES)
def test_a_clip_does_not_bind_at_its_bounds(loss_fn: str) -> None:
    binds, bounds = LOSSES[loss_fn].clip_binds, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    assert binds is not None
    for advantage, inside, outside in ((1.0, 2.0, 2.25), (-1.0, 0.5, 0.25)):
        inputs = policy_inputs(column(0.0, 0.0), column(advantage, advantage))
        assert binds(column(inside, outside), inputs, bounds).tolist() == [[False], [True]]


@pytest.mark.parametrize("loss_fn", CLIPPED_LOSSES)
def test_a_clipped_ratio_may_overflow(loss_fn: str) -> None:
    """exp(499) is infinite in float32; the objective is not."""
    lp, advantages = column(-1.0).float(), column(2.0).float()
    inputs = policy_inputs(column(-500.0).float(), advantages)
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
    value, gradient = value_and_gradient(loss_fn, lp, inputs, **bounds)
    slope = 0.0 if loss_fn != "cispo" else -6.0
    assert value.item() == (-6.0 if loss_fn != "cispo" else 6.0) and gradient.item() == slope


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "gspo"])
def test_an_unbounded_objective_is_not_hidden(loss_fn: str) -> None:
    """min(r * A, clip(r) * A) has no floor for A < 0: the loss is infinite, and whoever sums it can say so."""
    inputs = policy_inputs(column(-500.0).float(), column(-1.0).float())
    value, _ = value_and_gradient(loss_fn, column(-1.0).float(), inputs)
    assert value.item() == math.inf


def test_a_mask_counts_evenly_however_long_the_sequence() -> None:
    """In float32 a running sum of 100,000 logprobs is off by more than the width of the clip range."""
    rows = 100_000
    rng = np.random.default_rng(0)
    lp = torch.from_numpy(-rng.exponential(5.0, (rows, 1)).astype(np.float32))
    q = torch.from_numpy((lp.double().numpy() - 1e-4).astype(np.float32))
    inputs = policy_inputs(q, torch.ones_like(q))
    ratio = LOSSES["gspo"].ratio(lp, inputs)
    expected = math.exp(float((lp.double() - q.double()).mean()))
    assert ratio.dtype == torch.float32
    torch.testing.assert_close(ratio.double(), torch.full((rows, 1), expected, dtype=torch.float64), rtol=2e-7, atol=0)
