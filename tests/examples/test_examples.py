"""The examples run as they are documented, and do what they say."""

import asyncio
import json
from pathlib import Path

import chz
import pytest

from examples import custom_dataset, custom_env, custom_loss, dpo, ten_lines, three_lines
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.runs.outcome import RunSummary


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(EXAMPLE_DATA.parent)
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


def rows(log_path: Path) -> list[dict]:
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_custom_env(tmp_path: Path) -> None:
    custom_env.main(str(tmp_path / "run"))
    written = rows(tmp_path / "run")
    assert [row["step"] for row in written] == list(range(6))
    assert written[-1]["env/all/reward/total"] > written[0]["env/all/reward/total"]
    assert all(row["env/all/turns_per_episode"] == 2 for row in written)
    # Two turns, each prompt extending the one before: one datum per trajectory. Only a reply with a control token in it
    # begins another, as its text is not written with that token.
    branches = [row.get("train/branches_per_rollout", 1) for row in written]
    assert max(branches) < 1.5


@pytest.mark.slow
def test_custom_dataset(tmp_path: Path) -> None:
    custom_dataset.main(str(tmp_path / "run"))
    evaluated = [row["test/nll"] for row in rows(tmp_path / "run") if "test/nll" in row]
    assert evaluated[-1] < 0.7 * evaluated[0]


def test_custom_loss() -> None:
    history = asyncio.run(custom_loss.main())
    assert history[-1]["kept"] > history[0]["kept"]
    assert history[-1]["unlearned"] < 0.7 * history[0]["unlearned"]


@pytest.mark.slow
def test_three_lines(tmp_path: Path) -> None:
    three_lines.main(str(tmp_path / "run"))
    written = rows(tmp_path / "run")
    assert written[-1]["env/all/reward/reward/is_sum"] > 1.5 * written[0]["env/all/reward/reward/is_sum"]


@pytest.mark.slow
def test_ten_lines(tmp_path: Path) -> None:
    ten_lines.main(str(tmp_path / "run"))
    written = [row for row in rows(tmp_path / "run") if "env/all/is_number" in row]
    assert written[-1]["env/all/reward/total"] > written[0]["env/all/reward/total"] + 0.3
    assert all(row["env/all/turns_per_episode"] <= 2 for row in written)


def test_dpo(tmp_path: Path) -> None:
    summary = dpo.main(str(tmp_path))
    assert summary.log_path == tmp_path / "run" and summary.steps == len(rows(summary.log_path)) - 1 == 8
    assert summary.metrics == rows(summary.log_path)[-1] and float(summary.metrics["test/accuracy"]) > 0.5
    assert summary.sampler_path is not None and summary.sampler_path.endswith("/final")


def test_a_run_within_an_event_loop_is_awaited(tmp_path: Path) -> None:
    """As in a notebook, for a `main` that is no coroutine function as for those that are."""

    async def cell() -> RunSummary:
        run = train_dpo.main(chz.replace(dpo.make_config(str(tmp_path)), max_steps=1, eval_every=0))
        assert not isinstance(run, RunSummary)
        return await run

    assert asyncio.run(cell()).steps == 1
