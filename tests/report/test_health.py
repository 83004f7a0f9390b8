"""What looks wrong is said, and what is fine is not said to be wrong."""

from typing import Any

import pytest

from tinker_cookbook.report.health import findings, findings_as_json


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


EDGES: list[tuple[dict[str, list[float]], dict[str, str]]] = [
    ({"optim/kl_sample_train_v2": [0.02, 1e-6]}, {"sampler and trainer": "bad"}),  # the worst of all steps
    ({"optim/kl_sample_train_v2": [0.01]}, {"sampler and trainer": "look"}),
    ({"optim/kl_sample_train_v2": [0.0101]}, {"sampler and trainer": "bad"}),
    ({"optim/ratio_max": [10.0, 1.0], "optim/ratio_min": [0.1, 1.0]}, {}),
    ({"optim/ratio_max": [10.5, 1.0], "optim/ratio_min": [0.1, 1.0]}, {"ratios": "look"}),
    ({"optim/ratio_max": [10.0, 1.0], "optim/ratio_min": [0.09, 1.0]}, {"ratios": "look"}),
    ({"train/skipped_steps": [1.0, *[0.0] * 4]}, {"steps without training": "look"}),  # one of five
    ({"train/skipped_steps": [1.0, *[0.0] * 3, 1.0, *[0.0] * 4]}, {"steps without training": "bad"}),  # two of nine
    ({"groups/sampled": [5.0, 5.0], "groups/trained": [5.0, 0.0]}, {"groups": "fine"}),
    ({"groups/sampled": [5.0, 6.0], "groups/trained": [5.0, 0.0]}, {"groups without signal": "look"}),
    ({"groups/failed": [1.0, 1.0], "groups/sampled": [10.0, 10.0]}, {"failures": "look", "groups without signal": "look"}),
    ({"groups/failed": [1.0, 2.0], "groups/sampled": [10.0, 10.0]}, {"failures": "bad", "groups without signal": "look"}),
    ({"groups/failed": [1.0]}, {"failures": "look"}),
    ({"rollout_errors/EnvError": [1.0]}, {"failures": "look"}),
    ({"rollout_errors/EnvError": [float("nan")]}, {}),
    ({"rollout_errors/total": [1.0], "rollout_errors/groups_skipped": [1.0]}, {}),
    ({"env/all/stop/completed": [0.9]}, {}),
    ({"env/all/stop/completed": [0.89]}, {"stop reasons": "look"}),
    ({"env/all/stop/completed": [0.0, *[1.0] * 5]}, {}),  # the last five
    ({"env/all/stop/completed": [*[1.0] * 5, 0.4]}, {"stop reasons": "look"}),
    ({"env/all/stop/completed": [*[1.0] * 5, 0.0, *[1.0] * 4]}, {"stop reasons": "look"}),
    ({"optim/entropy": [1.0, *[0.0] * 4]}, {}),  # too few to compare
    ({"optim/entropy": [9.0, *[0.0] * 5]}, {"entropy": "look"}),  # five with five
    ({"optim/entropy": [*[1.0] * 5, *[0.1] * 5]}, {}),
    ({"optim/entropy": [*[1.0] * 5, *[0.09] * 5]}, {"entropy": "look"}),
    ({"optim/entropy": [*[4.0] * 5, *[0.3] * 5]}, {"entropy": "look"}),
    ({"optim/entropy": [*[0.25] * 5, *[0.1] * 5]}, {}),
    ({"optim/entropy": [2.0, *[1.0] * 5, 0.0, 0.6]}, {}),
    ({"optim/entropy": [*[1.0] * 6, *[0.0] * 4, 0.6]}, {}),
    ({"optim/entropy": [*[1.0] * 5, *[0.0] * 4, 0.4]}, {"entropy": "look"}),
    ({"optim/entropy": [9.0, *[1.0] * 4, *[0.3] * 5]}, {}),
    ({"optim/clip_fraction": [0.2]}, {}),
    ({"optim/clip_fraction": [0.21]}, {"clipped tokens": "look"}),
    ({"optim/clipfrac": [0.21]}, {"clipped tokens": "look"}),
    ({"optim/frac_clipped": [0.21]}, {"clipped tokens": "look"}),
    ({"optim/frac_clipped": [9.0, *[0.1] * 5]}, {}),
    ({"optim/frac_clipped": [*[0.1] * 5, 0.9]}, {"clipped tokens": "look"}),
    ({"optim/frac_clipped": [*[0.0] * 5, *[0.3] * 5]}, {"clipped tokens": "look"}),
    ({"train/nonfinite_passes": [1.0]}, {"numbers that are not finite": "bad"}),
    ({"optim/grad_norm": [*[0.0] * 30, 900.0]}, {"gradients": "look"}),
    ({"optim/grad_norm": [900.0, *[0.0] * 30]}, {}),
    ({"optim/grad_norm": [*[0.0] * 30, 900.0, *[0.0] * 4]}, {"gradients": "look"}),
    ({"optim/grad_norm": [*[1.0] * 60, 35.0]}, {"gradients": "look"}),  # the mean is 1.56
    ({"optim/grad_norm": [*[1.0] * 60, 25.0]}, {}),  # the mean is 1.39
    ({"optim/kl_sample_train_v2": [float("nan"), 1e-6]}, {"sampler and trainer": "fine"}),
    ({"optim/entropy": [*[1.0] * 5, 9.0, 9.0, *[0.05] * 5]}, {"entropy": "look"}),  # the first five with the last five
    ({"optim/grad_norm": [*[0.0] * 19, 20.0]}, {}),  # twenty times the mean
    ({"optim/grad_norm": [*[0.0] * 20, 21.0]}, {"gradients": "look"}),
    ({"optim/grad_norm": [*[0.0] * 30, 1e-3]}, {"gradients": "look"}),  # however small
    ({"optim/grad_norm": [*[0.0] * 10, 900.0, *[0.0] * 30]}, {}),  # long ago
]  # fmt: skip


@pytest.mark.parametrize(("metrics", "expected"), EDGES, ids=lambda value: next(iter(value), "fine"))
def test_where_each_check_begins_to_speak(metrics: dict[str, list[float]], expected: dict[str, str]) -> None:
    steps = {"step": list(range(max(map(len, metrics.values()))))}
    assert {finding.what: finding.level for finding in findings({**steps, **metrics})} == expected


def test_the_worst_comes_first() -> None:
    metrics = {
        "step": [0],
        "optim/kl_sample_train_v2": [1e-6],
        "optim/ratio_max": [12.0],
        "optim/ratio_min": [0.5],
        "train/nonfinite_steps": [1],
    }
    assert [finding.level for finding in findings(metrics)] == ["bad", "look", "fine"]


def test_each_finding_says_its_numbers_and_names_its_metrics() -> None:
    metrics: dict[str, list[Any]] = {
        "step": list(range(10)),
        "optim/ratio_min": [0.5, 0.25],
        "optim/ratio_max": [1.0, 12.0],
        "groups/sampled": [4.0],
        "groups/trained": [1.0],
        "groups/failed": [3.0],
        "train/skipped_steps": [1.0, 0.0],
        "rollout_errors/EnvError": [1.0, 5.0],  # so far, in each step
        "env/all/stop/completed": [0.75],
        "env/all/stop/max_tokens": [0.25],
        "optim/entropy": [*[2.0] * 5, *[0.01] * 5],
        "train/frac_clipped": [0.5],
        "train/nonfinite_steps": [1.0],
        "train/nonfinite_passes": [2.0],
        "optim/grad_norm": [*[0.0] * 6, *[100.0] * 2, *[0.0] * 394, 32.0, *[0.0] * 4],
    }
    found = {finding.what: finding for finding in findings(metrics)}
    groups = ("groups/trained", "groups/filtered", "env/all/by_group/frac_mixed")
    assert {what: finding.keys for what, finding in found.items()} == {
        "ratios": ("optim/ratio_min", "optim/ratio_max"),
        "steps without training": ("train/skipped_steps", *groups),
        "groups without signal": groups,
        "failures": ("groups/failed", "rollout_errors/EnvError"),
        "stop reasons": ("env/all/stop/completed", "env/all/stop/max_tokens"),
        "entropy": ("optim/entropy",),
        "clipped tokens": ("train/frac_clipped",),
        "numbers that are not finite": ("train/nonfinite_steps", "train/nonfinite_passes"),
        "gradients": ("optim/grad_norm",),
    }
    for what, said in {
        "ratios": "went from 0.25 to 12.",
        "steps without training": "1 of 2 steps had no advantage",
        "groups without signal": "1 of 4 groups were trained on;",
        "failures": "3 of 4 groups were given up; errors: EnvError 5.",
        "stop reasons": "Lately 25 % of the rollouts",
        "entropy": "fell from 2 to 0.01 nats",
        "clipped tokens": "Lately 50 % of the tokens",
        "numbers that are not finite": "3 passes or updates",
        "gradients": "jumped to 32; its mean is 0.57.",
    }.items():
        assert said in found[what].sentence, found[what]
    none = {"step": [0], "env/all/stop/completed": [0.0], "optim/frac_clipped": [1.0]}
    assert [finding.sentence[:16] for finding in findings(none)] == ["Lately 100 % of "] * 2


def test_as_json_a_finding_has_all_its_fields() -> None:
    (found,) = findings_as_json({"step": [0], "optim/grad_norm": [1.0], "optim/kl_sample_train_v2": [0.02]})
    assert found.pop("sentence").startswith("The KL between sampler and trainer reached 0.02;")
    assert found == {"level": "bad", "what": "sampler and trainer", "keys": ("optim/kl_sample_train_v2",)}


def depths(*late: float) -> str:
    """What is said of a KL that is so high at these depths lately; the longest depth was low before, and the first one high."""
    names = [f"optim/kl_by_depth/{depth}" for depth in (0, 256, 1024)][: len(late)]
    columns = {name: [0.001, *[value] * 5] for name, value in zip(names, late, strict=True)}
    (finding,) = findings(
        {"step": list(range(6)), "optim/kl_sample_train_v2": [0.01] * 6, **dict(reversed(columns.items()))}
    )
    assert finding.keys == ("optim/kl_sample_train_v2", *names)
    assert finding.sentence.startswith("The KL between sampler and trainer reached 0.01; ")
    return finding.sentence


def test_growth_with_depth_is_that_from_the_first_to_the_last_lately() -> None:
    assert "(0.001 to 0.0031): look at positions" in depths(0.001, 0.001, 0.0031)
    assert "grows" not in depths(0.001, 0.1, 0.0029)
    assert "grows" not in depths(0.1)
    assert "grows" not in depths(0.25, 0.75) and "grows" in depths(0.25, 0.7501)
    assert "grows with depth (0 to 0.1)" in depths(0.0, 0.1)


@pytest.mark.parametrize(
    ("versions", "older"),
    [
        ([0, 1, 2], False),
        ([0, 0, 2], True),
        ([1, 2, 3], False),
        ([0, None, 1], True),
        ([None, 1, 2], False),
        ([0], False),
    ],
)
def test_groups_of_older_weights_are_a_reason_for_a_high_kl(versions: list[int | None], older: bool) -> None:
    metrics = {"step": [0, 1, 2], "optim/kl_sample_train_v2": [0.02] * 3, "sampling_client/step_min": versions}
    (finding,) = findings(metrics)
    assert ("older weights" in finding.sentence) == older
    assert finding.sentence.startswith("The KL between sampler and trainer reached 0.02; ")
