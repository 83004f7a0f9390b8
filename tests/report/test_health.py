"""What looks wrong is said, and what is fine is not said to be wrong."""

from typing import Any

import pytest

from tinker_cookbook.report.health import findings


def levels(**metrics: list[Any]) -> dict[str, str]:
    named = {key.replace("__", "/"): values for key, values in metrics.items()}
    steps = {"step": list(range(max(map(len, named.values()), default=0)))}
    return {finding.what: finding.level for finding in findings({**steps, **named})}


@pytest.mark.parametrize(("worst", "level"), [(2e-4, "fine"), (1e-3, "fine"), (2e-3, "look"), (0.02, "bad")])
def test_the_kl_between_sampler_and_trainer(worst: float, level: str) -> None:
    assert levels(optim__kl_sample_train_v2=[1e-6, worst]) == {"sampler and trainer": level}


def test_a_kl_that_grows_with_depth_names_positions_and_the_cache() -> None:
    metrics = {
        "step": [0, 1],
        "optim/kl_sample_train_v2": [0.01, 0.02],
        "optim/kl_by_depth/0": [1e-4, 1e-4],
        "optim/kl_by_depth/1024": [0.05, 0.05],
    }
    (finding,) = findings(metrics)
    assert "grows with depth (0.0001 to 0.05)" in finding.sentence
    flat = metrics | {"optim/kl_by_depth/1024": [1e-4, 1e-4]}
    assert "grows" not in findings(flat)[0].sentence


def test_steps_and_groups_without_signal() -> None:
    said = levels(train__skipped_steps=[0, 1, 1], groups__sampled=[4, 4, 4], groups__trained=[4, 0, 0])
    assert said == {"steps without training": "bad", "groups without signal": "look"}
    assert levels(groups__sampled=[4, 4], groups__trained=[4, 3]) == {"groups": "fine"}


def test_a_step_in_ten_without_training_is_no_fault_and_a_row_of_an_evaluation_no_step() -> None:
    (finding,) = findings({"step": [*range(11)], "train/skipped_steps": [1, *[0] * 9, None]})
    assert finding.level == "look" and finding.sentence.startswith("1 of 10 steps ")


def test_failures_are_counted_by_name() -> None:
    metrics = {
        "step": [0],
        "groups/sampled": [10],
        "groups/trained": [7],
        "groups/failed": [3],
        "rollout_errors/EnvError": [5],
    }
    found = {finding.what: finding for finding in findings(metrics)}
    assert found["failures"].level == "bad"
    assert found["failures"].sentence == "3 of 10 groups were given up; errors: EnvError 5."


def test_replies_that_are_cut_off_and_an_entropy_that_collapses() -> None:
    assert levels(env__all__stop__completed=[1.0, 0.5, 0.5]) == {"stop reasons": "look"}
    assert levels(env__all__stop__completed=[1.0, 0.95]) == {}
    assert levels(optim__entropy=[1.0] * 5 + [0.01] * 5) == {"entropy": "look"}
    assert levels(optim__entropy=[1.0] * 5 + [0.5] * 5) == {}


def test_what_is_not_measured_is_not_judged() -> None:
    assert levels() == {}
    assert levels(loss=[1.0, 2.0]) == {}


def test_ratios_clipping_and_what_is_not_finite() -> None:
    assert levels(optim__ratio_min=[0.5], optim__ratio_max=[12.0]) == {"ratios": "look"}
    assert levels(optim__ratio_min=[0.5], optim__ratio_max=[1.5]) == {}
    assert levels(train__clipped_fraction=[0.3]) == {"clipped tokens": "look"}
    assert levels(train__nonfinite_steps=[0, 1]) == {"numbers that are not finite": "bad"}
