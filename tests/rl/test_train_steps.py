"""The steps of the loop as functions: what they train on, return, and count."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient, FakeTokenizer
from tests.rl.loop import NumberDataset, NumberDatasetBuilder, WhichWeights, make_config
from tests.waiting import HANG_SECONDS
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.curriculum import CurriculumConfig
from tinker_cookbook.rl.dataset_utils import EpochCycledRLDataset, cycle_permutation, epoch_batch_index
from tinker_cookbook.rl.entropy import EntropyConfig
from tinker_cookbook.rl.item_dataset import TrainingBatches
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.train import WrappedTrajectoryGroup
from tinker_cookbook.runs.loggers import Logger
from tinker_cookbook.runs.manager import CheckpointManager
from tinker_cookbook.utils.cost_estimation import CostTracker, TokenUsage

TOKENIZER: Any = FakeTokenizer()


class Run:
    """A training client with groups of its first snapshot, two of which have equal rewards."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = make_config(folder, NumberDatasetBuilder(), **settings)
        self.service = FakeServiceClient()
        self.folder = folder

    async def open(self) -> None:
        self.client: Any = await self.service.create_lora_training_client(self.config.model_name, rank=8, seed=0)
        self.checkpoints = CheckpointManager(self.client, self.service, self.folder, save_every=2)
        self.snapshot = await self.client.save_weights_and_get_sampling_client()
        self.builders = NumberDataset(1, 4, 4, 2).get_batch(0)
        policy = TinkerTokenCompleter(self.snapshot, 4, seed=3)
        self.groups = [await do_group_rollout(one, policy.fork(i)) for i, one in enumerate(self.builders)]

    @property
    def clients(self) -> tuple[Any, Any, Any, Any]:
        return self.client, self.checkpoints, None, TOKENIZER


def test_a_step_trains_counts_and_returns_the_new_weights(tmp_path: Path) -> None:
    async def steps() -> None:
        run = Run(tmp_path, compute_post_kl=True)
        await run.open()
        tracker = CostTracker()
        for step in range(2):
            client, metrics = await train.do_train_step_and_get_sampling_client(
                run.config,
                step,
                *run.clients,
                run.builders,
                run.groups,
                cost_tracker=tracker,
            )
            assert client.weights == step + 1  # pyright: ignore[reportAttributeAccessIssue]
        assert metrics["env/even/total_episodes"] == 8 and metrics["optim/kl_pre_post_v1"] == 0  # pyright: ignore[reportPossiblyUnboundVariable]
        assert metrics["tokens/sampled"] == 16 and metrics["tokens/trained"] == 8 * 3  # pyright: ignore[reportPossiblyUnboundVariable]
        # Prompts of three tokens were read for sampling, and with their reply for the KL after the update.
        assert metrics["tokens/prefill_uncached"] == 16 * 3 + 8 * 4  # pyright: ignore[reportPossiblyUnboundVariable]
        assert [one for one in run.service.saved if "weights/000002" in one]  # save_every=2

    asyncio.run(steps())


def test_an_earlier_snapshot_stands_for_the_new_one_when_nobody_samples(tmp_path: Path) -> None:
    async def steps() -> None:
        run = Run(tmp_path)
        await run.open()
        reuse = train.SamplingClientReuse(run.snapshot, asyncio.Event())
        arguments = run.config, 0, *run.clients, run.builders, run.groups
        client, _ = await train.do_train_step_and_get_sampling_client(*arguments, sampling_client_reuse=reuse)
        assert client.weights == 1 and not reuse.reused  # pyright: ignore[reportAttributeAccessIssue]
        reuse.rollout_workers_finished.set()
        client, _ = await train.do_train_step_and_get_sampling_client(*arguments, sampling_client_reuse=reuse)
        assert client is run.snapshot and reuse.reused and run.client.weights == 2

    asyncio.run(steps())


@pytest.mark.parametrize(
    "setting",
    [
        {"entropy": EntropyConfig(coef=0.1)},
        {"curriculum": CurriculumConfig()},
        {"replace_constant_groups": 1},
        {"top_entropy_share": 0.5},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_only_the_loop_can_do_is_not_dropped_in_silence(tmp_path: Path, setting: dict[str, Any]) -> None:
    async def step() -> None:
        run = Run(tmp_path, **setting)
        await run.open()
        with pytest.raises(ConfigurationError, match=f"{next(iter(setting))}=.* is for the library's own loop"):
            await train.do_train_step_and_get_sampling_client(run.config, 0, *run.clients, run.builders, run.groups)

    asyncio.run(step())


def test_a_stream_ends_with_what_came(tmp_path: Path) -> None:
    async def steps() -> None:
        stream = train.StreamMinibatchConfig(groups_per_batch=4, num_minibatches=2)
        run = Run(tmp_path, stream_minibatch_config=stream)
        await run.open()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        wrapped = [WrappedTrajectoryGroup(g, b, 0, 0.5) for g, b in zip(run.groups, run.builders, strict=True)]
        end = object()
        for item in (wrapped[2], None, wrapped[3], end):
            queue.put_nowait(item)
        found = await train.do_train_step_streaming_and_get_sampling_client(run.config, 0, queue, *run.clients)
        assert found is not None
        client, metrics, taken = found
        assert client is not None and client.weights == 1 and taken == [wrapped[2], wrapped[3]]  # pyright: ignore[reportAttributeAccessIssue]
        assert len(run.client.passes) == 2 and metrics["sampling_client/step_max"] == 0
        assert await train.do_train_step_streaming_and_get_sampling_client(run.config, 1, queue, *run.clients) is None
        assert queue.get_nowait() is end
        odd = make_config(
            tmp_path, stream_minibatch_config=train.StreamMinibatchConfig(groups_per_batch=3, num_minibatches=2)
        )
        with pytest.raises(ConfigurationError, match="must be divisible"):
            await train.do_train_step_streaming_and_get_sampling_client(odd, 1, queue, *run.clients)

    asyncio.run(steps())


def test_dropped_groups_are_counted_and_told_now_and_then(tmp_path: Path) -> None:
    class Told(Logger):
        def __init__(self) -> None:
            self.summaries: list[Any] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise AssertionError

        def log_summary(self, metrics: Any) -> None:
            self.summaries.append(metrics)

    async def steps() -> None:
        run = Run(tmp_path, remove_constant_reward_groups=True)
        await run.open()
        tracker, told, now = CostTracker(), Told(), [0.0]
        log = train.DiscardedWorkLog(tracker, told, clock=lambda: now[0])
        dropped = [train.drop_constant_reward_group(group, run.config, tracker, log) for group in run.groups[:3]]
        assert dropped == [None, None, run.groups[2]] and not told.summaries
        assert tracker.discarded == TokenUsage(sampled=8, prefill_uncached=24) == tracker.cumulative
        now[0] = train.DISCARDED_WORK_LOG_INTERVAL_SECONDS
        log.discarded(1)
        assert told.summaries == [tracker.cumulative_metrics()]
        log.discarded(1)
        assert len(told.summaries) == 1
        kept = make_config(tmp_path)
        assert train.drop_constant_reward_group(run.groups[0], kept, tracker, log) is run.groups[0]

    asyncio.run(steps())


def test_evaluators_run_at_once(tmp_path: Path) -> None:
    class Both(WhichWeights):
        def __init__(self, own: asyncio.Event, other: asyncio.Event, name: str) -> None:
            super().__init__()
            self.own, self.other, self.name = own, other, name

        async def __call__(self, sampling_client: Any) -> dict[str, float]:
            self.own.set()
            await self.other.wait()
            return {self.name: (await super().__call__(sampling_client))["eval/weights"]}

    async def both() -> dict[str, float]:
        a, b = asyncio.Event(), asyncio.Event()
        run = Run(tmp_path)
        await run.open()
        async with asyncio.timeout(HANG_SECONDS):
            return await train.run_evaluations_parallel([Both(a, b, "a"), Both(b, a, "b")], run.snapshot, run.config, 0)

    assert asyncio.run(both()) == {"a": 0.0, "b": 0.0}


def test_results_come_in_order_and_groups_are_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def late(value: int) -> int:
        for _ in range(9 - value):
            await asyncio.sleep(0)
        return value

    assert asyncio.run(train.gather_with_progress((late(i) for i in range(5)), "waiting")) == [0, 1, 2, 3, 4]

    async def shown() -> None:
        run = Run(tmp_path)
        await run.open()
        train.print_group(run.groups[2], TOKENIZER)

    with caplog.at_level("INFO"):
        asyncio.run(shown())
    assert [f"Member {i}: reward" in caplog.text for i in range(5)] == [True] * 4 + [False]


def test_epochs() -> None:
    inner = NumberDataset(3, 2, 4, 0)
    twice = EpochCycledRLDataset(inner, 2, shuffle_seed=7)
    orders = [[twice.get_batch(epoch * 3 + i)[0].batch for i in range(3)] for epoch in range(2)]  # pyright: ignore[reportAttributeAccessIssue]
    assert [sorted(order) for order in orders] == [[0, 1, 2]] * 2
    assert orders == [list(cycle_permutation(3, 7, epoch)) for epoch in range(2)]
    assert list(cycle_permutation(5, "a", 1)) == [4, 2, 0, 3, 1]  # as tinker-cookbook 0.6.1 orders them
    assert [epoch_batch_index(i, 3) for i in range(5)] == [0, 1, 2, 0, 1]
    steps = TrainingBatches(inner, None, 5, num_epochs=2)
    assert [steps.get_batch(i)[0].batch for i in range(len(steps))] == [0, 1, 2, 0, 1]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(IndexError, match="batch 6"):
        twice.get_batch(6)
