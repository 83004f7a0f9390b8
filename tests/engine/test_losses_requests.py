"""Configs and inputs of the policy losses that are refused, each with its name in the message."""

import math

import numpy as np
import pytest

from tests.engine.helpers import datum, policy_datum
from tinker_local_backend import RequestError, TrainingClient
from tinker_local_backend.engine.training.datums import loss_function
from tinker_local_backend.engine.training.losses import LOSSES

N = 6

BOUNDED = ["ppo", "cispo", "gspo"]
NUMBERS = [(name, key) for name in BOUNDED for key in ("clip_low_threshold", "clip_high_threshold")]
NUMBERS += [("stable_reinforce", key) for key in LOSSES["stable_reinforce"].config if key != "verify_provenance"]
NUMBERS += [("dro", "beta"), ("importance_sampling", "temperature"), ("cross_entropy", "temperature")]


@pytest.mark.parametrize(("loss_fn", "key"), NUMBERS)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, "0.9", None, True, [1.0], pytest.param(10**400, id="beyond every float"), 1j],
    ids=str,
)
def test_a_config_value_must_be_a_finite_number(loss_fn: str, key: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"loss_fn_config\['{key}'\] must be a finite number, got"):
        loss_function(loss_fn, {key: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.float64(1), np.int64(1)], ids=lambda v: type(v).__name__)
def test_numbers_of_every_kind_are_numbers(value: float) -> None:
    _, config, temperature = loss_function("dro", {"beta": value, "temperature": value})
    assert config == {"beta": 1.0} and temperature == 1.0
    assert type(config["beta"]) is float and type(temperature) is float


@pytest.mark.parametrize("loss_fn", list(LOSSES))
def test_an_unknown_key_is_named_with_those_there_are(loss_fn: str) -> None:
    with pytest.raises(RequestError, match=rf"\['epsilon'\] is unknown to {loss_fn}; it takes .*temperature") as error:
        loss_function(loss_fn, {"epsilon": 0.2})
    assert all(key in str(error.value) for key in LOSSES[loss_fn].config)


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        ("cispo", {"clip_low_threshold": 5}, r"clip_low_threshold 5.0 is above clip_high_threshold 4.0"),
        ("cispo", {"clip_high_threshold": -1}, r"clip_low_threshold 0.0 is above clip_high_threshold -1.0"),
        ("gspo", {"clip_high_threshold": 0.99}, r"clip_low_threshold 0.9997 is above clip_high_threshold 0.99"),
        ("dro", {"beta": -0.1}, r"\['beta'\] must be at least 0, got -0.1"),
        (
            "dro",
            {"clip_low_threshold": 0.8},
            r"low_threshold'\] is unknown to dro; it takes beta, entropies, route_replay, temperature",
        ),
        ("cispo", {"beta": 0.1}, r"\['beta'\] is unknown to cispo"),
        ("ppo", {3: 0.1}, r"loss_fn_config\[3\] is unknown to ppo"),
        ("gspo", [("temperature", 1.0)], r"loss_fn_config must be a dict from names to numbers, got \[\("),
        ("stable", {}, "loss_fn 'stable' is unknown .* cispo, dro, gspo, stable_reinforce"),
        ("sapo", {"temperature_negative": 0}, r"\['temperature_negative'\] must be positive, got 0"),
        ("sapo", {"temperature_positive": -1}, r"\['temperature_positive'\] must be positive, got -1"),
        ("stable_reinforce", {"weight_cap": 0}, r"\['weight_cap'\] is 0, which trains nothing"),
        ("stable_reinforce", {"weight_cap": -2}, r"\['weight_cap'\] must be at least 0, got -2"),
        ("stable_reinforce", {"token_ratio_low": -0.1}, r"\['token_ratio_low'\] must be at least 0"),
        ("stable_reinforce", {"token_ratio_high": 0.4}, r"token_ratio_low 0.5 is above token_ratio_high 0.4"),
        ("stable_reinforce", {"sequence_log_ratio_bound": -1}, r"\['sequence_log_ratio_bound'\] must be at least 0"),
        ("stable_reinforce", {"verify_provenance": 2}, r"\['verify_provenance'\] must be 1 .* or 0 .*, got 2"),
        ("stable_reinforce", {"verify_provenance": "true"}, r"\['verify_provenance'\] must be a finite number"),
        ("stable_reinforce", {"clip_high_threshold": 2}, r"\['clip_high_threshold'\] is unknown to stable_reinforce"),
    ],
)
def test_a_bad_config_is_refused(loss_fn: str, config: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        loss_function(loss_fn, config)


def test_a_caller_s_config_is_not_touched() -> None:
    given = {"temperature": 0.5, "beta": 1}
    loss_function("dro", given)
    assert given == {"temperature": 0.5, "beta": 1} and LOSSES["dro"].config == {"beta": 0.05}


def mask_of(*values: float, dtype: type = np.float32) -> np.ndarray:
    return np.array(values, dtype=dtype)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, r"data\[1\]\.loss_fn_inputs lacks \['sequence_ratio_mask'\]; gspo takes target_tokens, logprobs, advantages"),
        (mask_of(1, 1, 0, 0.5, 1, 1), r"\['sequence_ratio_mask'\]\[3\] is 0.5; it must be 1 .* or 0"),
        (mask_of(1, -1, 0, 1, 1, 1), r"\['sequence_ratio_mask'\]\[1\] is -1"),
        (mask_of(1, 1, 0, math.nan, 1, 1), r"\['sequence_ratio_mask'\]\[3\] is nan"),
        (mask_of(1, 1, 1), r"\['sequence_ratio_mask'\] has shape \(3,\), target_tokens has \(6,\)"),
        (mask_of(1, 1, 1, 1, 1, 1, dtype=np.int64), r"\['sequence_ratio_mask'\] is int64; it must be float32"),
        (mask_of(0, 0, 0, 0, 0, 0), r"\['sequence_ratio_mask'\] is 0 everywhere, but the datum has advantages"),
    ],
)  # fmt: skip
def test_a_bad_sequence_ratio_mask_is_refused(training: TrainingClient, mask: np.ndarray | None, message: str) -> None:
    given = policy_datum(N, 0)
    good = datum(given.model_input.to_ints(), **given.loss_fn_inputs, sequence_ratio_mask=mask_of(1, 1, 0, 1, 1, 1))
    more = {} if mask is None else {"sequence_ratio_mask": mask}
    bad = datum(given.model_input.to_ints(), **given.loss_fn_inputs, **more)
    with pytest.raises(RequestError, match=message):
        training.forward_backward([good, bad], "gspo").result()
    assert training._run.state.gradients is None


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "dro", "importance_sampling"])
def test_only_gspo_takes_the_mask(training: TrainingClient, loss_fn: str) -> None:
    given = policy_datum(N, 0)
    bad = datum(given.model_input.to_ints(), **given.loss_fn_inputs, sequence_ratio_mask=mask_of(1, 1, 1, 1, 1, 1))
    with pytest.raises(RequestError, match=rf"has \['sequence_ratio_mask'\], which {loss_fn} does not take"):
        training.forward_backward([bad], loss_fn).result()
