"""Whatever ends a run, and when: the steps that are done are saved, and their metrics are on disk."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient, FakeTrainingClient, Pending
from tests.rl.loop import NumberEnv, make_config, rows
from tests.waiting import loop_at_rest
from tinker_cookbook.rl import train
from tinker_cookbook.rl.config import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator

PACINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_config": AsyncConfig(max_steps_off_policy=1)},
    "async by time": {"async_config": AsyncConfig(max_steps_off_policy=1, deterministic=False)},
    "stream": {"stream_minibatch_config": StreamMinibatchConfig(num_minibatches=3)},
    "stream by time": {"stream_minibatch_config": StreamMinibatchConfig(num_minibatches=3, deterministic=False)},
}


class SlowStep(Pending[Any]):
    """An optimizer step that takes many turns of the event loop, and says when it is waited for."""

    def __init__(self, wrapped: Any, waited_for: asyncio.Event):
        self.wrapped, self.waited_for = wrapped, waited_for

    def __await__(self) -> Generator[Any, None, Any]:
        self.waited_for.set()
        for _ in range(50):
            yield from asyncio.sleep(0).__await__()
        return (yield from self.wrapped.__await__())


def slow_step(monkeypatch: pytest.MonkeyPatch, number: int) -> asyncio.Event:
    """Make the optimizer step of that number slow. The event is set when it is waited for."""
    waited_for, original = asyncio.Event(), FakeTrainingClient.optim_step

    def optim_step(client: FakeTrainingClient, params: Any) -> Any:
        pending = original(client, params)
        return SlowStep(pending, waited_for) if client.weights == number else pending

    monkeypatch.setattr(FakeTrainingClient, "optim_step", optim_step)
    return waited_for


def assert_saved(service: FakeServiceClient, log_path: Path, steps: int) -> None:
    """The checkpoint, the weights in it and the metrics are all those of so many steps."""
    record = rows(log_path, "checkpoints.jsonl")[-1]
    assert record["name"] == f"{steps:06d}-stopped"
    assert record["batch"] == service.saved[record["state_path"]] == len(rows(log_path)) == steps


@pytest.mark.parametrize("pacing", PACINGS)
def test_a_run_told_to_stop_while_it_trains_finishes_the_step(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: str
) -> None:
    """What Ctrl-C and SIGTERM do: the main task is cancelled."""

    async def main() -> None:
        training = slow_step(monkeypatch, 2)
        running = asyncio.create_task(train.main(make_config(tmp_path, **PACINGS[pacing])))
        await training.wait()
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert_saved(service, tmp_path, 2)
    asyncio.run(train.main(make_config(tmp_path, **PACINGS[pacing])))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("pacing", PACINGS)
def test_a_run_told_to_stop_while_it_samples_gives_up_the_step(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: str
) -> None:
    async def main() -> None:
        sampling, original = asyncio.Event(), NumberEnv.step

        async def step(env: NumberEnv, *args: Any, **kwargs: Any) -> Any:
            if env.prompt.to_ints()[2] == 3 and env.prompt.to_ints()[0] == 2:  # the last group of the last batch
                sampling.set()
                await asyncio.Event().wait()
            return await original(env, *args, **kwargs)

        monkeypatch.setattr(NumberEnv, "step", step)
        running = asyncio.create_task(train.main(make_config(tmp_path, **PACINGS[pacing])))
        await sampling.wait()
        while len(rows(tmp_path)) < 3:
            await asyncio.sleep(0)
        await loop_at_rest()
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert_saved(service, tmp_path, 3)
    # Only what was sampled ahead is kept. A step that samples for itself samples all of its groups together again.
    assert ("groups_ahead" in rows(tmp_path, "checkpoints.jsonl")[-1]) == pacing.startswith("async")


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_stream_told_to_stop_between_two_optimizer_steps_of_a_batch_finishes_the_batch(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    config = make_config(
        tmp_path,
        num_substeps=3,
        stream_minibatch_config=StreamMinibatchConfig(deterministic=deterministic),
    )

    async def main() -> None:
        release, original = asyncio.Event(), NumberEnv.step

        async def step(env: NumberEnv, *args: Any, **kwargs: Any) -> Any:
            if env.prompt.to_ints()[2] == 1 and env.prompt.to_ints()[0] == 2:  # the last group of the second batch
                await release.wait()
            return await original(env, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(NumberEnv, "step", step)
            running = asyncio.create_task(train.main(config))
            while not service.trainers or service.trainers[0].weights < 5:  # two of its three steps are submitted
                await asyncio.sleep(0)
            running.cancel()
            for _ in range(50):
                await asyncio.sleep(0)
            assert not running.done() and len(rows(tmp_path)) == 1
            release.set()
            await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    record = rows(tmp_path, "checkpoints.jsonl")[-1]
    assert record["name"] == "000002-stopped" and record["batch"] == len(rows(tmp_path)) == 2
    assert service.saved[record["state_path"]] == 6
    asyncio.run(train.main(config))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3] and service.trainers[1].weights == 12


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_was_sampled_ahead_of_a_stop_is_not_sampled_again(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    config = make_config(tmp_path, async_config=AsyncConfig(max_steps_off_policy=2, deterministic=deterministic))

    async def main() -> None:
        training = slow_step(monkeypatch, 2)
        running = asyncio.create_task(train.main(config))
        await training.wait()
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert_saved(service, tmp_path, 2)
    before = len(service.sampled)
    assert before == 4 * 3 * 4  # of all four batches, since two may be sampled ahead
    asyncio.run(train.main(config))
    assert len(service.sampled) == before
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


def test_a_rollout_ahead_that_fails_while_a_step_trains_does_not_lose_the_step(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        training, original = slow_step(monkeypatch, 2), NumberEnv.step

        async def step(env: NumberEnv, *args: Any, **kwargs: Any) -> Any:
            if env.prompt.to_ints()[2] == 2:
                await training.wait()
                raise ConnectionError("the sandbox is gone")
            return await original(env, *args, **kwargs)

        monkeypatch.setattr(NumberEnv, "step", step)
        await train.main(make_config(tmp_path, **PACINGS["async"]))

    with pytest.raises(ConnectionError, match="the sandbox is gone"):
        asyncio.run(main())
    assert_saved(service, tmp_path, 2)


@pytest.mark.parametrize("pacing", PACINGS)
def test_an_evaluator_that_fails_does_not_lose_the_steps_before_it(
    service: FakeServiceClient, tmp_path: Path, pacing: str
) -> None:
    class Fails(SamplingClientEvaluator):
        async def __call__(self, sampling_client: Any) -> dict[str, float]:
            if sampling_client.weights == 2:
                raise ConnectionError("the grader is gone")
            return {}

    config = make_config(tmp_path, eval_every=2, evaluator_builders=[Fails], **PACINGS[pacing])
    with pytest.raises(ConnectionError):
        asyncio.run(train.main(config))
    assert_saved(service, tmp_path, 2)
