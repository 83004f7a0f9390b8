"""Metrics under the names that scripts of tinker-cookbook read, and the last row of a run."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient
from tests.rl.loop import TINY, NumberDatasetBuilder, make_config, rows, run
from tinker_cookbook import backends
from tinker_cookbook.rl import train
from tinker_cookbook.runs.reference import KLReferenceConfig
from tinker_cookbook.utils.metric_names import ALIASES, FINAL_KEY, SPAN_ALIASES, carried, each_once, with_aliases

ROOT = Path(__file__).parents[2]

_ENV = [
    "ac_tokens_per_turn",
    "ob_tokens_per_turn",
    "turns_per_episode",
    "total_episodes",
    "total_turns",
    "total_ac_tokens",
    "total_ob_tokens",
    "total_cached_ob_tokens",
    "reward/total",
    "by_group/frac_mixed",
    "by_group/frac_all_good",
    "by_group/frac_all_bad",
]
_TOKENS = [
    f"tokens/{kind}{name}"
    for kind in ("", "cumulative/", "discarded/")
    for name in ("sampled", "prefill_cached", "prefill_uncached", "trained")
]
_SPANS = [
    "assemble_training_data",
    "compute_full_batch_metrics_and_get_sampling_client",
    "compute_kl_sample_train",
    "do_train_step_and_get_sampling_client",
    "incorporate_kl_penalty",
    "kl_vs_base",
    "prepare_minibatch",
    "run_evals",
    "run_evaluations_parallel",
    "run_single_evaluation",
    "sampling",
    "save_checkpoint",
    "save_checkpoint_and_get_sampling_client",
    "total",
    "train_step",
    "compute_post_kl",
]
_MANY = [
    "compute_group_rewards",
    "do_group_rollout_and_filter_constant_reward",
    "env_initial_observation",
    "env_step",
    "policy_sample",
]
# What tinker-cookbook 0.6.1 logged of a run with the settings below (`score_sequences` is a function of its own).
UPSTREAM_ROW = {
    *(f"env/all/{key}" for key in _ENV),
    *(f"test/env/all/{key}" for key in _ENV),
    *_TOKENS,
    *(f"time/{span}" for span in _SPANS),
    *(f"time/{span}:{kind}" for span in _MANY for kind in ("count", "max", "mean", "total")),
    *[
        "step",
        "grad_norm",
        "kl_policy_base",
        "kl_pre_post_v1",
        "kl_pre_post_v2",
        "optim/entropy",
        "optim/kl_sample_train_v1",
    ],
    *["optim/kl_sample_train_v2", "optim/lr", "progress/batch", "progress/done_frac"],
}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    monkeypatch.setattr(backends, "create_service_client", lambda *_: FakeServiceClient())
    settings = {
        "kl_penalty_coef": 0.1,
        "kl_reference_config": KLReferenceConfig(base_model=TINY),
        "compute_post_kl": True,
    }
    run(make_config(tmp_path, NumberDatasetBuilder(batches=2, with_test=True), eval_every=1, **settings))
    return rows(tmp_path)


def test_a_row_has_the_keys_of_tinker_cookbook(logged: list[dict[str, Any]]) -> None:
    assert UPSTREAM_ROW - logged[0].keys() == set()
    assert logged[0]["grad_norm"] == logged[0]["optim/grad_norm"]
    assert logged[1]["tokens/cumulative/sampled"] == sum(row["tokens/sampled"] for row in logged[:2]) == 24


def test_and_those_of_asynchronous_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backends, "create_service_client", lambda *_: FakeServiceClient())
    run(make_config(tmp_path, async_config=train.AsyncConfig(max_steps_off_policy=1)))
    ends = ("max", "mean", "min")
    asked = [
        f"{key}_{end}" for key in ("async/staleness", "sampling_client/step", "time/sampling_time") for end in ends
    ]
    assert {*asked, "training_client/step"} <= rows(tmp_path)[1].keys()
    assert [row["async/staleness_max"] for row in rows(tmp_path)] == [0, 1, 1, 1]


def test_the_last_row_has_training_and_evaluation(logged: list[dict[str, Any]]) -> None:
    *steps, final = logged
    assert final["env/all/reward/total"] == steps[-1]["env/all/reward/total"]
    assert final["step"] == 2 and final["test/env/all/reward/total"] >= 0 and final["grad_norm"] == 1.0
    assert [FINAL_KEY in row for row in logged] == [False, False, True]
    # Nothing that is added up over rows is there twice.
    for key in ("groups/sampled", "env/all/total_ac_tokens", "tokens/sampled", "train/num_datums", "time/train"):
        assert key in steps[-1] and key not in final


def test_readers_of_ours_get_each_number_once(logged: list[dict[str, Any]]) -> None:
    first, _, final = each_once(logged)
    others = {*ALIASES.values(), *(other for names in SPAN_ALIASES.values() for other in names)}
    assert {key.partition(":")[0] for key in first}.isdisjoint(others - {"time/save_checkpoint"})
    assert {"optim/grad_norm", "env/all/reward/total"} <= first.keys() and not carried(final)
    assert "test/env/all/reward/total" in final


def test_a_metric_of_ones_own_keeps_its_name() -> None:
    row = {"optim/lr": 0.5, "learning_rate": 0.25, "time/eval:mean": 2.0, "x:time/eval": 1.0}
    assert with_aliases(row) == row | {"time/run_evals:mean": 2.0, "time/run_evaluations_parallel:mean": 2.0}


def test_the_page_has_the_table() -> None:
    section = (
        (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    )
    told = {}
    for line in section.splitlines():
        first, *others = re.findall("`([^`]+)`", line) if line.startswith("| `") else [""]
        told |= {first: tuple(others)} if first else {}
    assert told == {key: (other,) for key, other in ALIASES.items()} | dict(SPAN_ALIASES)


def test_a_run_keeps_the_state_of_its_code_and_its_spans_and_has_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, fake = list[Any](), FakeServiceClient()
    monkeypatch.setattr(backends, "create_service_client", lambda *given: (asked.append(given), fake)[1])
    monkeypatch.setenv("PLANTED_TOKEN", "tml-planted-0123456789")
    monkeypatch.setattr(
        "tinker_cookbook.runs.metadata.code_state", lambda modules: f"+ key tml-planted-0123456789 {modules[0]}"
    )
    run(make_config(tmp_path, wandb_name="of W&B", max_steps=2))
    assert (tmp_path / "code.diff").read_text() == "+ key <hidden> tinker_cookbook"
    (tmp_path / "code.diff").write_text("as at first")
    run(make_config(tmp_path, session_name="mine", wandb_name="of W&B", max_steps=3))
    assert (tmp_path / "code.diff").read_text() == "as at first"
    assert [given[2] for given in asked] == ["of W&B", "mine"]
    spans = rows(tmp_path, "timing_spans.jsonl")
    assert [line["step"] for line in spans] == [0, 1, 2]
    names = [span["name"] for span in spans[1]["spans"]]
    assert names.count("env_step") == 12 and {"sampling", "train", "update"} <= set(names)
