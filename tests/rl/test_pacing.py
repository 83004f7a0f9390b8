"""Sampling ahead and training while sampling: which snapshot each group sees, and that nothing is lost, repeated or hung."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeServiceClient, SampleCall, seeded_reply
from tests.rl.arena import hang, limit_of_who_hangs
from tests.rl.loop import (
    NumberDataset,
    NumberDatasetBuilder,
    NumberEnv,
    NumberGroup,
    WhichWeights,
    make_config,
    rows,
    run,
    untimed,
)
from tests.waiting import HANG_SECONDS
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, RolloutTimeoutError, ZeroAdvantageError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.item_dataset import TrainingBatches
from tinker_cookbook.rl.rollout_executor import get_rollout_executor
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.types import InitialObservationOverflow
from tinker_cookbook.utils.misc_utils import gather_all, with_tasks


def ahead(steps: int, **settings: Any) -> dict[str, Any]:
    return {"async_config": train.AsyncConfig(max_steps_off_policy=steps, **settings)}


def stream(minibatches: int, **settings: Any) -> dict[str, Any]:
    return {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=minibatches, **settings)}


def trained_data(service: FakeServiceClient) -> list[list[list[int]]]:
    """The inputs of each pass."""
    return [[datum.model_input.to_ints() for datum in passed.data] for passed in service.trainers[-1].passes]


BY_TIME: dict[str, Any] = {"deterministic": False}
ALL_MODES = {
    "sync": {},
    "async 0": ahead(0),
    "async 2": ahead(2),
    "stream 1": stream(1),
    "stream 3": stream(3),
    "async 2 by time": ahead(2, **BY_TIME),
    "async 2 by time, drops": ahead(2, too_old="drop", **BY_TIME),
    "stream 3 by time": stream(3, **BY_TIME),
}


class TestAsync:
    def test_not_ahead_is_the_synchronous_loop(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        seen = []
        for name, mode in (("sync", {}), ("async", ahead(0))):
            fake = FakeServiceClient()
            monkeypatch.setattr(backends, "create_service_client", lambda *_, fake=fake: fake)
            run(make_config(tmp_path / name, eval_every=2, save_every=2, evaluator_builders=[WhichWeights], **mode))
            seen.append((fake.sampled, trained_data(fake), fake.saved, untimed(tmp_path / name)))
        assert seen[0] == seen[1]

    def test_nor_does_it_sample_fewer_at_once_where_batches_grow(
        self, service: FakeServiceClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        active = most = 0

        class Slow(NumberEnv):
            async def step(self, action: list[int], *, extra: Any = None) -> Any:
                nonlocal active, most
                active += 1
                most = max(most, active)
                for _ in range(20):
                    await asyncio.sleep(0)
                active -= 1
                return await super().step(action, extra=extra)

        get_batch = NumberDataset.get_batch
        monkeypatch.setattr(NumberDataset, "get_batch", lambda self, i: get_batch(self, i)[: i + 1])
        monkeypatch.setattr("tests.rl.loop.NumberEnv", Slow)
        run(make_config(tmp_path, on_zero_advantages="skip", **ahead(0)))
        assert most == 12

    @pytest.mark.parametrize("steps", [1, 2, 9])
    def test_no_group_is_older_than_allowed_and_each_trains_once(
        self, service: FakeServiceClient, tmp_path: Path, steps: int
    ) -> None:
        run(make_config(tmp_path, NumberDatasetBuilder(batches=6), **ahead(steps)))
        lags = {call.prompt[2] - call.weights for call in service.sampled}
        assert min(lags) >= 0 and 1 <= max(lags) <= steps
        # Each of 6 x 3 groups of 4 is sampled once, and trains in the step of its batch.
        assert len(service.sampled) == 72 == len({tuple(call.prompt) for call in service.sampled})
        for step, row in enumerate(rows(tmp_path)):
            assert row["sampling_client/step_min"] >= step - steps and row["sampling_client/step_max"] <= step
            assert row["groups/sampled"] == 3 == row["groups/trained"] + row["groups/filtered"]
        assert service.trainers[0].weights == 6

    def test_groups_start_in_order_as_slots_become_free(self, service: FakeServiceClient, tmp_path: Path) -> None:
        dataset = NumberDatasetBuilder(batches=3, groups=2, members=1)
        run(make_config(tmp_path, dataset, on_zero_advantages="skip", **ahead(2)))
        order = [(call.prompt[2], call.prompt[0]) for call in service.sampled]
        assert order == sorted(order)

    def test_a_killed_run_trains_each_batch_once(self, service: FakeServiceClient, tmp_path: Path) -> None:
        class Killed(BaseException):
            pass

        def reply(call: SampleCall) -> list[int]:
            if call.prompt[2] == 5:
                raise Killed
            return seeded_reply(call)

        service.reply = reply
        config = make_config(tmp_path, NumberDatasetBuilder(batches=8), save_every=2, **ahead(2))
        with pytest.raises(Killed):
            run(config)
        service.reply = seeded_reply
        resumed_at = rows(tmp_path, "checkpoints.jsonl")[-1]["batch"]
        run(config)
        written = rows(tmp_path)
        assert [row["step"] for row in written] == list(range(8))
        assert sum(row["groups/sampled"] for row in written) == 24
        assert service.trainers[1].weights == 8 and 0 < resumed_at < 5
        batches_after = {data[2] for passed in trained_data(service) for data in passed}
        assert batches_after == set(range(resumed_at, 8))


class TestStream:
    def test_one_minibatch_is_the_synchronous_loop(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        seen = []
        for name, mode in (("sync", {}), ("stream", stream(1))):
            fake = FakeServiceClient()
            monkeypatch.setattr(backends, "create_service_client", lambda *_, fake=fake: fake)
            run(make_config(tmp_path / name, **mode))
            metrics = [{k: v for k, v in row.items()} for row in untimed(tmp_path / name)]
            seen.append((fake.sampled, trained_data(fake), metrics))
        assert seen[0] == seen[1]

    def test_passes_go_out_before_the_last_group_is_done(self, service: FakeServiceClient, tmp_path: Path) -> None:
        run(make_config(tmp_path, NumberDatasetBuilder(batches=1, groups=4), num_substeps=2, **stream(2)))
        assert [len({ids[0] for ids in passed}) for passed in trained_data(service)] == [1, 1, 1, 1]
        assert service.trainers[0].weights == 2
        row = rows(tmp_path)[0]
        assert row["train/num_substeps"] == 2 and row["groups/trained"] == 4
        submitted = [call.removeprefix("submit ") for call in service.calls if call.startswith("submit")]
        passes = [call for call in submitted if call in ("forward_backward", "optim_step")]
        assert passes == ["forward_backward", "forward_backward", "optim_step"] * 2

    def test_metadata_finds_its_group_in_the_record(self, service: FakeServiceClient, tmp_path: Path) -> None:
        run(make_config(tmp_path, NumberDatasetBuilder(batches=1, groups=3), write_records=True, **stream(3)))
        record = json.loads((tmp_path / "training_step_0001.json").read_text())
        assert record["training_data"]
        for datum in record["training_data"]:
            assert datum["input_tokens"][0] == datum["metadata"]["group_idx"]

    def test_a_mean_over_the_batch_is_refused(self, tmp_path: Path) -> None:
        advantage = train.AdvantageConfig(scale="token")
        with pytest.raises(ConfigurationError, match="scale=token"):
            run(make_config(tmp_path, advantage=advantage, **stream(2)))
        advantage = train.AdvantageConfig(baseline="gdpo", parts={"correct": 1.0})
        with pytest.raises(ConfigurationError, match="baseline=gdpo divides by the deviation of a whole batch"):
            run(make_config(tmp_path, advantage=advantage, **stream(2)))


def is_by_time(mode: dict[str, Any]) -> bool:
    return any(not config.deterministic for config in mode.values())


class HangingEnv(NumberEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        if self.prompt.to_ints() == [1, 2, 1]:
            await hang()
        return await super().step(action, extra=extra)


class RaisingEnv(NumberEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        if self.prompt.to_ints() == [1, 2, 1]:
            raise OSError("the sandbox is gone") from KeyError("its name")
        return await super().step(action, extra=extra)


@pytest.mark.parametrize("mode", ALL_MODES.values(), ids=ALL_MODES)
class TestTrouble:
    @pytest.fixture
    def use(self, monkeypatch: pytest.MonkeyPatch):
        def use_env(kind: type[NumberEnv]) -> None:
            monkeypatch.setattr("tests.rl.loop.NumberEnv", kind)

        return use_env

    def test_an_env_that_raises_ends_the_run_with_its_name(
        self, service: FakeServiceClient, tmp_path: Path, mode: dict[str, Any], use: Any
    ) -> None:
        use(RaisingEnv)
        with pytest.raises(OSError, match="the sandbox is gone") as raised:
            run(make_config(tmp_path, **mode))
        notes = "; ".join(raised.value.__notes__)
        assert "member 2 (RaisingEnv)" in notes and "1 of step 1, NumberGroup [odd]" in notes
        assert isinstance(raised.value.__cause__, KeyError)

    def test_or_its_group_fails_and_the_run_goes_on(
        self, service: FakeServiceClient, tmp_path: Path, mode: dict[str, Any], use: Any
    ) -> None:
        use(RaisingEnv)
        run(make_config(tmp_path, rollout_error_tolerance=RetryOnFailure(max_retries=1), **mode))
        written = rows(tmp_path)
        failed = [row["groups/failed"] for row in written]
        assert failed == [0, 1, 0, 0] or (is_by_time(mode) and sum(failed) == 1)
        for row in written:
            parts = [row[f"groups/{part}"] for part in ("trained", "filtered", "stale", "failed")]
            assert sum(parts) == row["groups/sampled"]
            assert row["groups/sampled"] == 3 or is_by_time(mode)  # a group that failed takes no other's place
        assert written[-1]["rollout_errors/OSError"] == 2 and written[-1]["rollout_errors/groups_skipped"] == 1
        assert "rollout_errors/total" not in written[0]
        assert sum(row["groups/sampled"] for row in written) == 12

    def test_an_env_that_hangs_fails_after_its_time(
        self,
        service: FakeServiceClient,
        tmp_path: Path,
        mode: dict[str, Any],
        use: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        use(HangingEnv)
        drops = mode == ALL_MODES["async 2 by time, drops"]  # when it is too old, long before its time is up
        if not drops:
            monkeypatch.setattr("tinker_cookbook.rl.rollout_strategy.time_limit", limit_of_who_hangs)
        strategy = RetryOnFailure(max_retries=0, per_rollout_timeout=HANG_SECONDS)
        run(make_config(tmp_path, rollout_error_tolerance=strategy, **mode))
        written = rows(tmp_path)
        if drops:
            assert sum(row["groups/stale"] for row in written) == 1
        else:
            assert written[-1][f"rollout_errors/{RolloutTimeoutError.__name__}"] == 1
        assert sum(row["groups/sampled"] for row in written) == 12

    def test_batches_without_any_signal(self, service: FakeServiceClient, tmp_path: Path, mode: dict[str, Any]) -> None:
        constant = NumberDatasetBuilder(batches=3, groups=3, constant_groups=3)
        with pytest.raises(ZeroAdvantageError, match="group   1: 1 1 1 1"):
            run(make_config(tmp_path / "raise", constant, **mode))
        assert [row["train/skipped_steps"] for row in rows(tmp_path / "raise")] == [1, 1, 1]
        run(make_config(tmp_path / "skip", constant, on_zero_advantages="skip", **mode))
        assert [row["train/skipped_steps"] for row in rows(tmp_path / "skip")] == [1, 1, 1]
        assert all(trainer.weights == 0 for trainer in service.trainers)

    def test_left_out_groups_neither_end_a_run_early_nor_save_it_before_its_time(
        self, service: FakeServiceClient, tmp_path: Path, mode: dict[str, Any]
    ) -> None:
        some = NumberDatasetBuilder(batches=6, groups=3, constant_groups=2)
        run(make_config(tmp_path, some, remove_constant_reward_groups=True, **mode))
        if mode == ALL_MODES["async 2 by time"]:  # their places go to others, so that the data end before the steps do
            assert sum(row["groups/filtered"] for row in rows(tmp_path)) == 12
            assert [row["groups/trained"] for row in rows(tmp_path)] == [3, 3]
        else:
            assert [row["groups/filtered"] for row in rows(tmp_path)] == [2] * 6
            assert service.trainers[0].weights == 6
        (final,) = rows(tmp_path, "checkpoints.jsonl")
        assert final["final"] and final["batch"] == 6

    @pytest.mark.parametrize("penalties", [{}, {"kl_penalty_coef": 0.5, "compute_post_kl": True}], ids=["", "KL"])
    def test_batches_whose_prompts_are_all_too_long(
        self,
        service: FakeServiceClient,
        tmp_path: Path,
        mode: dict[str, Any],
        penalties: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        async def too_long(self: NumberEnv) -> InitialObservationOverflow:
            return InitialObservationOverflow(float(self.prompt.to_ints()[1]))

        monkeypatch.setattr(NumberEnv, "initial_observation", too_long)
        run(make_config(tmp_path, on_zero_advantages="skip", num_substeps=2, **mode, **penalties))
        assert [row["train/skipped_steps"] for row in rows(tmp_path)] == [1] * 4
        assert service.trainers[0].passes == [] and service.trainers[0].adam == []

    def test_the_steps_before_an_error_are_kept(
        self, service: FakeServiceClient, tmp_path: Path, mode: dict[str, Any], use: Any
    ) -> None:
        use(RaisingEnv)
        config = make_config(tmp_path, **mode)
        with pytest.raises(OSError):
            run(config)
        kept = rows(tmp_path, "checkpoints.jsonl") if (tmp_path / "checkpoints.jsonl").exists() else []
        # Where the failure came while another step's gradients were under way, there is no clean state to keep.
        assert [record["batch"] for record in kept] in ([1], [])
        if not mode:
            assert kept
        use(NumberEnv)
        run(config)
        assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
        assert service.trainers[1].weights == 4


async def unclean() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError("could not clean up")


@pytest.mark.parametrize("mode", list(ALL_MODES.values())[1:], ids=list(ALL_MODES)[1:])
def test_data_that_runs_out_in_the_middle_of_a_batch(
    service: FakeServiceClient, tmp_path: Path, mode: dict[str, Any]
) -> None:
    """The synchronous loop takes the dataset's own batches; the others may cut them anew."""
    ((name, config),) = mode.items()
    cut = {name: chz.replace(config, groups_per_batch=3)}
    run(make_config(tmp_path, NumberDatasetBuilder(batches=4, groups=2), **cut))
    assert [row["groups/sampled"] for row in rows(tmp_path)] == [3, 3, 2]


class TestFirstFailure:
    def test_what_peers_raise_while_they_are_cancelled_does_not_hide_it(self) -> None:
        async def body(tasks: asyncio.TaskGroup) -> None:
            tasks.create_task(unclean())
            await asyncio.sleep(0)
            raise ZeroAdvantageError("nothing to learn")

        with pytest.raises(ZeroAdvantageError):
            asyncio.run(with_tasks(body))

    def test_a_task_that_failed_counts_for_more_than_what_its_end_made_the_body_raise(self) -> None:
        async def fail() -> None:
            raise OSError("first")

        async def body(tasks: asyncio.TaskGroup) -> None:
            tasks.create_task(fail())
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("second")

        with pytest.raises(OSError, match="first"):
            asyncio.run(with_tasks(body))

    def test_causes_and_contexts_stay(self) -> None:
        async def explicit() -> None:
            raise OSError from KeyError("cause")

        async def implicit() -> None:
            try:
                raise KeyError("context")
            except KeyError:
                raise OSError  # noqa: B904

        with pytest.raises(OSError) as raised:
            asyncio.run(gather_all([explicit()]))
        assert isinstance(raised.value.__cause__, KeyError)
        with pytest.raises(OSError) as raised:
            asyncio.run(gather_all([implicit()]))
        assert isinstance(raised.value.__context__, KeyError) and not raised.value.__suppress_context__

    def test_the_loops_own_error_is_raised_though_sampling_ahead_fails_too(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Unclean(NumberEnv):
            async def step(self, action: list[int], *, extra: Any = None) -> Any:
                group, _, batch = self.prompt.to_ints()
                if batch == 0:
                    if group == 2:
                        await begun.wait()
                    return await super().step(action, extra=extra)
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    raise OSError("could not clean up")

        monkeypatch.setattr("tests.rl.loop.NumberEnv", Unclean)
        constant = NumberDatasetBuilder(batches=2, groups=3, constant_groups=3)
        begun = asyncio.Event()  # the first batch is done when the second has begun
        with pytest.raises(ZeroAdvantageError):
            run(make_config(tmp_path, constant, on_zero_advantages="raise", **ahead(1)))


def name(builder: object) -> tuple[int, int]:
    assert isinstance(builder, NumberGroup)
    return builder.batch, builder.group


class TestTrainingBatches:
    @given(
        st.integers(1, 6),
        st.integers(1, 5),
        st.one_of(st.none(), st.integers(1, 7)),
        st.one_of(st.none(), st.integers(1, 9)),
    )
    @settings(max_examples=60)
    def test_every_group_comes_once_and_in_order(
        self, batches: int, groups: int, per_batch: int | None, max_steps: int | None
    ) -> None:
        dataset, _ = asyncio.run(NumberDatasetBuilder(batches=batches, groups=groups, members=1)())
        steps = TrainingBatches(dataset, per_batch, max_steps)
        cut = [[name(b) for b in steps.get_batch(step)] for step in range(len(steps))]
        size = per_batch or groups
        everything = [(batch, group) for batch in range(batches) for group in range(groups)]
        expected = [everything[i : i + size] for i in range(0, len(everything), size)]
        assert cut == expected[: max_steps or len(expected)]

    def test_nothing_to_train_on(self) -> None:
        dataset, _ = asyncio.run(NumberDatasetBuilder(batches=0)())
        with pytest.raises(ConfigurationError, match="nothing to train on"):
            TrainingBatches(dataset)

    def test_an_empty_batch_is_named(self) -> None:
        dataset, _ = asyncio.run(NumberDatasetBuilder(groups=0)())
        with pytest.raises(DataValidationError, match="batch 2 of the dataset"):
            TrainingBatches(dataset).get_batch(2)


def test_groups_run_in_the_executor_that_the_run_was_given(service: FakeServiceClient, tmp_path: Path) -> None:
    threads: set[str] = set()
    original = NumberEnv.step

    async def step(self: NumberEnv, action: list[int], *, extra: Any = None) -> Any:
        threads.add(threading.current_thread().name)
        return await original(self, action, extra=extra)

    with ThreadPoolExecutor(2, thread_name_prefix="env") as executor, pytest.MonkeyPatch.context() as patched:
        patched.setattr(NumberEnv, "step", step)
        asyncio.run(train.main(make_config(tmp_path), executor))
    assert threads and all(name.startswith("env") for name in threads)
    assert get_rollout_executor() is None
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
