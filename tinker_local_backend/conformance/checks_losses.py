"""Checks of losses: each is recomputed from the logprobs that the server returned.

lp is the model's logprob of the target, q its logprob at sampling time, A the advantage, r = exp(lp - q). All are sums over
positions and data. `tinker_local_backend.engine.training.losses` has the sources of the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tinker

from tinker_local_backend.conformance.harness import Check, expect, expect_close, offered
from tinker_local_backend.conformance.probe import (
    Floats,
    Probe,
    datum,
    forward_logprobs,
    logprobs_of,
    supervised,
    token_ids,
)

Formula = Callable[[Floats, Floats, Floats], float]
"""(lp, q, A) -> loss"""
LENGTHS = (14, 9)


def cross_entropy(probe: Probe) -> None:
    """cross_entropy is -sum(w * lp), for any real weights."""
    trainer = probe.trainer()
    weights = [np.linspace(-0.5, 2.0, length) for length in LENGTHS]
    data = [supervised(token_ids(len(w) + 1, seed), w) for seed, w in enumerate(weights)]
    output = trainer.forward_backward(data, "cross_entropy").result()
    expected = -sum(float((w * logprobs_of(output, index)).sum()) for index, w in enumerate(weights))
    expect_close(output.metrics["loss:sum"], expected, "loss:sum")


def cross_entropy_of_several_targets(probe: Probe) -> None:
    """cross_entropy with targets and weights of shape (N, K) is -sum(w * lp), with logprobs of that shape."""
    trainer = probe.trainer()
    tokens, length, width = token_ids(9, 1), 8, 3
    targets = np.stack([tokens[1:], token_ids(length, 2), token_ids(length, 3)], axis=1)
    weights = np.random.default_rng(4).random((length, width))
    one = datum(tokens, target_tokens=targets, weights=weights)
    output = offered(lambda: trainer.forward_backward([one], "cross_entropy").result())
    logprobs = logprobs_of(output)
    expect(logprobs.shape == (length, width), f"logprobs of shape {logprobs.shape}, expected {(length, width)}")
    expect_close(logprobs[:, 0], forward_logprobs(trainer, tokens), "first targets", atol=0.02)
    expect_close(output.metrics["loss:sum"], -(weights * logprobs).sum(), "loss:sum")


def _clipped(ratio: Floats, low: float, high: float) -> Floats:
    return np.clip(ratio, low, high)


def _importance_sampling(lp: Floats, q: Floats, advantages: Floats) -> float:
    return -float((np.exp(lp - q) * advantages).sum())


def _ppo(low: float, high: float) -> Formula:
    def loss(lp: Floats, q: Floats, advantages: Floats) -> float:
        ratio = np.exp(lp - q)
        return -float(np.minimum(ratio * advantages, _clipped(ratio, low, high) * advantages).sum())

    return loss


def _cispo(low: float, high: float) -> Formula:
    def loss(lp: Floats, q: Floats, advantages: Floats) -> float:
        return -float((_clipped(np.exp(lp - q), low, high) * lp * advantages).sum())

    return loss


def _dro(beta: float) -> Formula:
    def loss(lp: Floats, q: Floats, advantages: Floats) -> float:
        return -float((lp * advantages - 0.5 * beta * (lp - q) ** 2).sum())

    return loss


def _gspo(low: float, high: float) -> Formula:
    def loss(lp: Floats, q: Floats, advantages: Floats) -> float:
        ratio = np.exp((lp - q).mean())
        return -float(np.minimum(ratio * advantages, _clipped(ratio, low, high) * advantages).sum())

    return loss


def _check(
    trainer: tinker.TrainingClient,
    name: Any,
    formula: Formula,
    config: Mapping[str, float] | None = None,
    mask: bool = False,
) -> None:
    """Compare a loss with its formula, for advantages of both signs and ratios on both sides of every bound."""
    offsets = [np.resize([-1.6, -0.4, -0.1, 0.0, 0.15, 0.5, 1.1], length) for length in LENGTHS]
    advantages = [np.resize([1.0, -0.5, 2.0, 0.25, -1.5], length) for length in LENGTHS]
    rows = [token_ids(length + 1, seed) for seed, length in enumerate(LENGTHS)]
    sampled = [forward_logprobs(trainer, row) - offset for row, offset in zip(rows, offsets, strict=True)]
    more = [{"sequence_ratio_mask": np.ones(length)} if mask else {} for length in LENGTHS]
    data = [
        datum(row, logprobs=q, advantages=a, **extra)
        for row, q, a, extra in zip(rows, sampled, advantages, more, strict=True)
    ]
    settings = None if config is None else dict(config)
    output = trainer.forward_backward(data, name, settings).result()
    # As sent: float32.
    quantities = [
        (logprobs_of(output, index), q.astype(np.float32).astype(np.float64), a)
        for index, (q, a) in enumerate(zip(sampled, advantages, strict=True))
    ]
    expected = sum(formula(*each) for each in quantities)
    settings_text = "its defaults" if config is None else ", ".join(f"{key}={value:g}" for key, value in config.items())
    expect_close(output.metrics["loss:sum"], expected, f"loss:sum with {settings_text}")


def _direction(probe: Probe, name: Any, config: dict[str, float] | None = None, mask: bool = False) -> None:
    """A step with positive advantages makes what was sampled likelier, one with negative advantages less likely."""
    tokens = token_ids(12, 6)
    for sign in (1.0, -1.0):
        trainer = probe.trainer()
        before = forward_logprobs(trainer, tokens)
        more = {"sequence_ratio_mask": np.ones(len(tokens) - 1)} if mask else {}
        one = datum(tokens, logprobs=before, advantages=np.full(len(tokens) - 1, sign), **more)
        trainer.forward_backward([one], name, config)
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        change = float((forward_logprobs(trainer, tokens) - before).sum())
        expect(change * sign > 0, f"advantages of {sign:+g} changed the sum of logprobs by {change:+.3g}")


def importance_sampling(probe: Probe) -> None:
    """importance_sampling is -sum(r * A)."""
    _check(probe.trainer(), "importance_sampling", _importance_sampling)
    _direction(probe, "importance_sampling")


def ppo(probe: Probe) -> None:
    """ppo is -sum(min(r * A, clip(r) * A)), with bounds 0.8 and 1.2 or those of its config."""
    trainer = probe.trainer()
    _check(trainer, "ppo", _ppo(0.8, 1.2))
    _check(trainer, "ppo", _ppo(0.5, 2.5), {"clip_low_threshold": 0.5, "clip_high_threshold": 2.5})
    _direction(probe, "ppo")


def cispo(probe: Probe) -> None:
    """cispo is -sum(sg(clip(r)) * lp * A), with bounds 0 and 4 or those of its config."""
    trainer = probe.trainer()
    offered(lambda: _check(trainer, "cispo", _cispo(0.5, 1.5), {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}))
    _check(trainer, "cispo", _cispo(0.0, 4.0))
    _direction(probe, "cispo")


def dro(probe: Probe) -> None:
    """dro is -sum(lp * A - beta / 2 * (lp - q)^2)."""
    trainer = probe.trainer()
    offered(lambda: _check(trainer, "dro", _dro(0.05), {"beta": 0.05}))
    _check(trainer, "dro", _dro(1.5), {"beta": 1.5})
    _direction(probe, "dro", {"beta": 0.05})


def gspo(probe: Probe) -> None:
    """gspo has one ratio per sequence: the exponential of the mean of lp - q."""
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    offered(lambda: _check(probe.trainer(), "gspo", _gspo(0.8, 1.2), bounds, mask=True))
    _direction(probe, "gspo", bounds, mask=True)


def _towards_minus_one(data: list[tinker.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    loss = sum(((each + 1.0) ** 2).sum() for each in logprobs)
    return loss, {"positions": float(sum(len(each) for each in logprobs))}


def forward_backward_custom(probe: Probe) -> None:
    """A custom loss, computed in the client, returns its value and trains on its gradient."""
    trainer = probe.trainer()
    data = [supervised(token_ids(length + 1, seed)) for seed, length in enumerate(LENGTHS)]
    values = []
    for _ in range(4):
        logprobs = [logprobs_of(trainer.forward([each], "cross_entropy").result()) for each in data]
        output = trainer.forward_backward_custom(data, _towards_minus_one).result()
        values.append(output.metrics["loss:sum"])
        expect_close(values[-1], sum(((each + 1.0) ** 2).sum() for each in logprobs), "loss:sum", rtol=0.02)
        expect(
            output.metrics.get("positions") == sum(LENGTHS), f"the custom loss's metric is missing: {output.metrics}"
        )
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    expect(values[-1] < values[0], f"the loss did not fall: {values[0]:.4g} to {values[-1]:.4g}")


def _weighted(logprobs: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
    loss = -(logprobs * advantages).sum()
    return loss, {"custom/weighted:sum": loss}


def create_custom_loss(probe: Probe) -> None:
    """A traced loss, which the SDK may send to the server, returns its value."""
    handle = offered(lambda: probe.service.create_custom_loss(_weighted, {"logprobs": 1, "advantages": 1}).result())
    trainer = probe.trainer()
    tokens = token_ids(10, 3)
    advantages = np.linspace(-1.0, 2.0, len(tokens) - 1)
    output = trainer.forward_backward_custom([datum(tokens, advantages=advantages)], handle).result()
    expected = -float((forward_logprobs(trainer, tokens) * advantages).sum())
    expect_close(output.metrics["custom/weighted:sum"], expected, "custom/weighted:sum", atol=0.02, rtol=0.01)


CHECKS = tuple(
    Check(ask)
    for ask in (
        cross_entropy,
        cross_entropy_of_several_targets,
        importance_sampling,
        ppo,
        cispo,
        dro,
        gspo,
        forward_backward_custom,
        create_custom_loss,
    )
)
