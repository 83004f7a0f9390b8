"""Diagnostics of policy losses: ratios, share of clipped positions, divergence from the sampler, entropy."""

import numpy as np
import pytest
import torch
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

from tests.engine.helpers import datum, policy_datum
from tinker_local_backend import TrainingClient
from tinker_local_backend.engine.training.losses import LOSSES, RatioStats

LOG_RATIO = np.array([0.5, -1.0, 0.1, 0.0, -5.0])
ADVANTAGES = np.array([1.0, 1.0, -1.0, 2.0, 0.0])  # the last position was not sampled: advantage and logprob are 0
LP = np.array([-1.0, -2.0, -3.0, -4.0, -5.0])
NAMES = {"ratio:mean", "ratio:min", "ratio:max", "kl:mean", "kl_k3:mean", "entropy:mean"}


def tensors(rows: slice = slice(None)) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    columns = [torch.from_numpy(array[rows, None]) for array in (LP, LP - LOG_RATIO, ADVANTAGES)]
    lp, q, advantages = columns
    index = torch.zeros(lp.shape, dtype=torch.int64)
    return lp, {
        "logprobs": q,
        "advantages": advantages,
        "sequence_ratio_mask": (advantages != 0).double(),
        "sequence_index": index,
    }


def stats_of(loss_fn: str, **config: float) -> dict[str, float]:
    loss = LOSSES[loss_fn]
    complete = {**loss.config, **config}
    stats = RatioStats(loss)
    stats.add(*tensors(), complete)
    return stats.metrics(complete)


def test_values() -> None:
    metrics = stats_of("importance_sampling")
    r = np.exp(LOG_RATIO[:4])
    assert metrics == pytest.approx(
        {
            "ratio:mean": r.mean(),
            "ratio:min": np.exp(-1.0),
            "ratio:max": np.exp(0.5),
            "kl:mean": 0.1,
            "kl_k3:mean": np.mean(r - 1 - LOG_RATIO[:4]),
            "entropy:mean": 2.5,
        }
    )


@pytest.mark.parametrize(
    ("loss_fn", "low", "high", "share"),
    [
        # r is 1.65 (A > 0), 0.37 (A > 0), 1.1 (A < 0), 1 (A > 0)
        ("ppo", 0.8, 1.2, 1 / 4),
        ("ppo", 0.8, 1.05, 1 / 4),
        ("ppo", 0.0, 9.0, 0),
        ("ppo", 1.2, 1.3, 2 / 4),
        ("cispo", 0.8, 1.2, 2 / 4),
        ("cispo", 0.8, 1.05, 3 / 4),
        ("cispo", 0.0, 4.0, 0),
        # s is exp(-0.1) everywhere: below 0.95 it holds back the one with A < 0
        ("gspo", 0.95, 1.2, 1 / 4),
        ("gspo", 0.5, 0.8, 3 / 4),
        ("gspo", 0.8, 1.2, 0),
    ],
)
def test_the_clipped_share_counts_where_the_clip_binds(loss_fn: str, low: float, high: float, share: float) -> None:
    metrics = stats_of(loss_fn, clip_low_threshold=low, clip_high_threshold=high)
    assert metrics["clipped_fraction:mean"] == pytest.approx(share)
    assert metrics.keys() == NAMES | {"clipped_fraction:mean"}


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.0), (3.0, 2 / 4), (50.0, 3 / 4)])
def test_the_clipped_share_of_sapo_counts_where_the_gate_halves_the_gradient(temperature: float, share: float) -> None:
    """4 g (1 - g) at t (r - 1): at t = 3 both that are far from 1 are below one half, at t = 50 also 1.1."""
    metrics = stats_of("sapo", temperature_positive=temperature, temperature_negative=temperature)
    assert metrics["clipped_fraction:mean"] == pytest.approx(share)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "dro"])
def test_a_loss_without_clip_has_no_clipped_share(loss_fn: str) -> None:
    assert stats_of(loss_fn).keys() == NAMES


def test_the_ratio_of_gspo_is_that_of_the_sequence() -> None:
    metrics = stats_of("gspo")
    for reduction in ("mean", "min", "max"):
        assert metrics[f"ratio:{reduction}"] == pytest.approx(np.exp(-0.1))
    assert metrics["kl:mean"] == pytest.approx(0.1)


def test_a_batch_and_its_parts_have_the_same_metrics() -> None:
    loss = LOSSES["ppo"]
    stats = RatioStats(loss)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5)):
        stats.add(*tensors(rows), loss.config)
    assert stats.metrics(loss.config) == pytest.approx(stats_of("ppo"), rel=1e-12)


@pytest.mark.parametrize("log_ratio", [0.5, -0.5])
def test_extremes_are_those_of_sampled_positions(log_ratio: float) -> None:
    lp = torch.full((3, 1), -1.0)
    stats = RatioStats(LOSSES["dro"])
    q = torch.tensor([[-1.0 - log_ratio], [0.0], [-1.0 - log_ratio]])
    stats.add(lp, {"logprobs": q, "advantages": torch.tensor([[1.0], [0.0], [0.0]])}, {"beta": 0.1})
    metrics = stats.metrics({"beta": 0.1})
    assert metrics["ratio:min"] == metrics["ratio:max"] == pytest.approx(np.exp(log_ratio), rel=1e-6)


def test_of_what_was_not_sampled_there_is_nothing_to_tell() -> None:
    loss = LOSSES["ppo"]
    stats = RatioStats(loss)
    assert stats.metrics(loss.config) == {}
    stats.add(*tensors(slice(4, 5)), loss.config)
    assert stats.metrics(loss.config) == {}


def test_a_ratio_beyond_float32_is_still_a_number() -> None:
    stats = RatioStats(LOSSES["ppo"])
    lp = torch.tensor([[-1.0]])
    stats.add(lp, {"logprobs": lp - 200, "advantages": torch.ones_like(lp)}, LOSSES["ppo"].config)
    metrics = stats.metrics(LOSSES["ppo"].config)
    assert metrics["ratio:max"] == pytest.approx(np.exp(200.0)) and metrics["clipped_fraction:mean"] == 1


@pytest.mark.parametrize("loss_fn", [name for name, loss in LOSSES.items() if loss.is_policy_loss])
def test_a_call_reports_what_its_logprobs_say(training: TrainingClient, loss_fn: str) -> None:
    """Through the engine, over several packs; and the SDK can fold every key."""
    data = []
    for length in (7, 12, 5):
        good = policy_datum(length, length, training)
        more = {"sequence_ratio_mask": np.ones(length, dtype=np.float32)} if loss_fn == "gspo" else {}
        data.append(datum(good.model_input.to_ints(), **good.loss_fn_inputs, **more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_LOCAL_GRAD_ACCUM_STEPS", "3")
        output = training.forward(data, loss_fn).result()
    lps = [record["logprobs"].to_numpy().astype(np.float64) for record in output.loss_fn_outputs]
    qs = [d.loss_fn_inputs["logprobs"].to_numpy().astype(np.float64) for d in data]
    advantages = np.concatenate([d.loss_fn_inputs["advantages"].to_numpy() for d in data])
    sampled = (advantages != 0) | (np.concatenate(qs) != 0)
    lp, q = np.concatenate(lps)[sampled], np.concatenate(qs)[sampled]
    ratios = np.exp(lp - q)
    if loss_fn == "gspo":
        own = [np.full(len(p), np.exp(np.mean(p - s))) for p, s in zip(lps, qs, strict=True)]
        ratios = np.concatenate(own)[sampled]
    expected = {
        "ratio:mean": ratios.mean(),
        "ratio:min": ratios.min(),
        "ratio:max": ratios.max(),
        "kl:mean": np.mean(q - lp),
        "kl_k3:mean": np.mean(np.exp(lp - q) - 1 - (lp - q)),
        "entropy:mean": np.mean(-lp),
    }
    found = {name: output.metrics[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    assert ("clipped_fraction:mean" in output.metrics) == (LOSSES[loss_fn].clip_binds is not None)
    assert combine_fwd_bwd_output_results([output, output]).metrics["kl:mean"] == pytest.approx(expected["kl:mean"])
