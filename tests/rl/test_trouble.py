"""Every pacing on the shipped tiny model when things go wrong: each ends with its cause named, or goes on as configured."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from recipes import rl_basic
from tests.rl.arena import hang, limit_of_who_hangs
from tests.rl.loop import rows
from tests.waiting import HANG_SECONDS
from tinker_cookbook.exceptions import ZeroAdvantageError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


PACINGS: dict[str, dict[str, Any]] = {
    "ahead": {"async_config": train.AsyncConfig(max_steps_off_policy=1)},
    "ahead by time": {"async_config": train.AsyncConfig(max_steps_off_policy=1, deterministic=False)},
    "stream by time": {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=2, deterministic=False)},
}


@pytest.fixture(params=list(PACINGS.values()), ids=list(PACINGS))
def pacing(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def run(log_path: Path, pacing: dict[str, Any], **keys: Any) -> None:
    settings: dict[str, Any] = {"eval_every": 0, "max_tokens": 16, "lora_rank": 4, "max_steps": 3, **pacing, **keys}
    cli = rl_basic.CLIConfig(groups_per_batch=2, group_size=4, log_path=str(log_path), num_test=1, **settings)

    async def bounded() -> None:
        async with asyncio.timeout(HANG_SECONDS):
            await train.main(rl_basic.build_config(cli))

    asyncio.run(bounded())


class Trouble:
    """Replaces the env's step; what it does happens to the first reply of the second question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        original = rl_basic.ArithmeticEnv.step
        self.calls = 0

        async def step(env: rl_basic.ArithmeticEnv, action: list[int], *, extra: Any = None) -> Any:
            self.calls += 1
            if self.calls == 5:
                await self.happen()
            return await original(env, action, extra=extra)

        monkeypatch.setattr(rl_basic.ArithmeticEnv, "step", step)

    async def happen(self) -> None:
        raise OSError("the sandbox is gone")


class Hang(Trouble):
    """Only who hangs runs out of time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__(monkeypatch)
        monkeypatch.setattr("tinker_cookbook.rl.rollout_strategy.time_limit", limit_of_who_hangs)

    async def happen(self) -> None:
        await hang()


def test_an_env_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: dict[str, Any]) -> None:
    Trouble(monkeypatch)
    with pytest.raises(OSError, match="the sandbox is gone") as raised:
        run(tmp_path, pacing, on_zero_advantages="skip")
    assert "(ArithmeticEnv)" in "; ".join(raised.value.__notes__)
    assert "the sandbox is gone" in (tmp_path / "logs.log").read_text()


@pytest.mark.parametrize("pacing", [PACINGS["ahead by time"]], ids=["ahead by time"])
def test_an_env_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: dict[str, Any]) -> None:
    Hang(monkeypatch)
    run(
        tmp_path,
        pacing,
        on_zero_advantages="skip",
        rollout_error_tolerance=RetryOnFailure(max_retries=0, per_rollout_timeout=5.0),
    )
    written = rows(tmp_path)
    assert [row["groups/failed"] for row in written].count(1) == 1
    assert written[-1]["rollout_errors/RolloutTimeoutError"] == 1
    assert sum(row["groups/sampled"] for row in written) == 6 and len(written) == 3


@pytest.mark.parametrize("pacing", [PACINGS["stream by time"]], ids=["stream by time"])
def test_an_env_that_hangs_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: dict[str, Any]
) -> None:
    Hang(monkeypatch)
    run(
        tmp_path,
        pacing,
        on_zero_advantages="skip",
        rollout_error_tolerance=RetryOnFailure(max_retries=1, per_rollout_timeout=5.0),
    )
    written = rows(tmp_path)
    assert [row["groups/failed"] for row in written] == [0, 0, 0]
    assert written[-1]["rollout_errors/total"] == 1


def test_all_rewards_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: dict[str, Any]) -> None:
    monkeypatch.setattr(rl_basic.ArithmeticEnv, "check_answer", lambda self, reply: True)
    monkeypatch.setattr(rl_basic.ArithmeticEnv, "check_format", lambda self, reply: True)
    keys: dict[str, Any] = {"max_tokens": 64}
    with pytest.raises(ZeroAdvantageError, match="every advantage of this batch is zero"):
        run(tmp_path / "stop", pacing, **keys)
    assert len(rows(tmp_path / "stop")) == 3
    run(tmp_path / "skip", pacing, on_zero_advantages="skip", **keys)
    assert [row["train/skipped_steps"] for row in rows(tmp_path / "skip")] == [1, 1, 1]


def test_data_that_runs_out(tmp_path: Path, pacing: dict[str, Any]) -> None:
    """More ahead than there is: the run ends with its data, and is complete."""
    run(tmp_path, pacing, on_zero_advantages="skip", max_steps=2)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]
    assert rows(tmp_path, "checkpoints.jsonl")[-1]["final"]
