"""`deterministic=False`: what finishes first is trained first, nothing is older than allowed, and every group is taken once."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fakes import FakeServiceClient
from tests.rl.loop import NumberDatasetBuilder, NumberEnv, WhichWeights, make_config, rows, run, untimed
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.batches import Batch
from tinker_cookbook.rl.sampler import Sampler
from tinker_cookbook.rl.train import Loop


def ahead(steps: int, **settings: Any) -> dict[str, Any]:
    return {"async_config": train.AsyncConfig(max_steps_off_policy=steps, deterministic=False, **settings)}


def stream(minibatches: int) -> dict[str, Any]:
    return {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=minibatches, deterministic=False)}


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0)


def waits(monkeypatch: pytest.MonkeyPatch, group: int, batch: int, reached: Callable[[], bool]) -> list[bool]:
    """Let one group go on only when `reached`. Returns what notes that it did."""
    original, went_on = NumberEnv.step, list[bool]()

    async def step(self: NumberEnv, *args: Any, **kwargs: Any) -> Any:
        at, _, of = self.prompt.to_ints()
        if (at, of) == (group, batch):
            await until(reached)
            went_on.append(True)
        return await original(self, *args, **kwargs)

    monkeypatch.setattr(NumberEnv, "step", step)
    return went_on


def written(log_path: Path) -> list[dict[str, Any]]:
    return rows(log_path) if (log_path / "metrics.jsonl").exists() else []


def trained(service: FakeServiceClient) -> list[set[tuple[int, int]]]:
    """(batch, group) of what each pass trained on."""
    passes = service.trainers[-1].passes
    return [{(ids[2], ids[0]) for ids in (datum.model_input.to_ints() for datum in p.data)} for p in passes]


EVERY_GROUP = {(batch, group) for batch in range(5) for group in range(3)}
FIVE = NumberDatasetBuilder(batches=5, groups=3)


class TestAhead:
    def test_a_slow_group_holds_up_no_step_that_has_others(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits(monkeypatch, 0, 0, lambda: len(written(tmp_path)) == 2)
        run(make_config(tmp_path, FIVE, **ahead(2, too_old="wait")))
        passes = trained(service)
        assert (0, 0) in passes[2] and sorted(key for keys in passes for key in keys) == sorted(EVERY_GROUP)
        assert all(row["step"] - row["sampling_client/step_min"] <= 2 for row in rows(tmp_path))
        assert rows(tmp_path)[2]["sampling_client/step_min"] == 0

    def test_a_step_waits_for_a_group_that_would_be_too_old(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        passes = 0

        def long_after() -> bool:
            nonlocal passes
            passes += 1
            return passes > 2000 * 4  # of its members

        waits(monkeypatch, 0, 0, long_after)
        run(make_config(tmp_path, FIVE, **ahead(1, too_old="wait")))
        assert (0, 0) in trained(service)[1] and set().union(*trained(service)) == EVERY_GROUP
        assert [row["groups/stale"] for row in rows(tmp_path)] == [0] * 5

    def test_by_default_it_is_trained_when_it_is_done_however_old_it_is(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits(monkeypatch, 0, 0, lambda: len(written(tmp_path)) == 3)
        run(make_config(tmp_path, FIVE, **ahead(1)))
        assert (0, 0) in trained(service)[3] and set().union(*trained(service)) == EVERY_GROUP
        found = rows(tmp_path)
        assert [row["async/staleness_max"] for row in found][3] == 3 and found[3]["sampling_client/step_min"] == 0
        assert [row["groups/stale"] for row in found] == [0] * 5

    def test_the_oldest_weights_are_trained_first(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever finished before it: a group of the first weights that comes last is in the next step."""
        waits(monkeypatch, 2, 1, lambda: len(written(tmp_path)) == 1 and len(service.sampled) > 24)
        run(make_config(tmp_path, FIVE, **ahead(2)))
        assert (1, 2) in trained(service)[1] | trained(service)[2]
        versions = [row["sampling_client/step_max"] for row in rows(tmp_path)]
        assert versions == sorted(versions) and set().union(*trained(service)) == EVERY_GROUP

    def test_what_cannot_be_trained_on_takes_no_place_and_the_data_may_run_out(
        self, service: FakeServiceClient, tmp_path: Path
    ) -> None:
        some = NumberDatasetBuilder(batches=6, groups=3, constant_groups=1)
        own = {"remove_constant_reward_groups": True, "eval_every": 4, "evaluator_builders": [WhichWeights], **ahead(1)}
        run(make_config(tmp_path, some, **own))
        found = rows(tmp_path)
        steps, final = found[:-1], found[-1]
        assert [row["groups/trained"] for row in steps] == [3] * 4
        assert sum(row["groups/filtered"] for row in steps) == 6 and sum(row["groups/sampled"] for row in steps) == 18
        assert "the data ran out after 4 of 6 steps" in (tmp_path / "logs.log").read_text()
        assert (final["step"], final["progress/final"], final["eval/weights"]) == (4, 1, 4)
        run(make_config(tmp_path, some, **own))
        assert rows(tmp_path) == found and len(service.trainers) == 2 and not service.trainers[1].passes

    def test_or_drops_it(self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        went_on = waits(monkeypatch, 0, 0, lambda: False)
        run(make_config(tmp_path, FIVE, **ahead(1, too_old="drop")))
        assert [row["groups/stale"] for row in rows(tmp_path)] == [0, 1, 0, 0, 0]
        assert [row["groups/sampled"] for row in rows(tmp_path)] == [3] * 5
        assert set().union(*trained(service)) == EVERY_GROUP - {(0, 0)} and not went_on

    def test_what_a_dropped_group_has_replaced_is_counted(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first group is constant; the one that comes in its place, of batch 1, never ends."""
        original, seen = NumberEnv.step, list[int]()

        async def step(self: NumberEnv, *args: Any, **kwargs: Any) -> Any:
            group, member, batch = self.prompt.to_ints()
            if (group, batch) == (0, 1):
                seen.append(member)
                if seen.count(member) == 2:  # the first time it is the group of its own batch
                    await until(lambda: False)
            result = await original(self, *args, **kwargs)
            return replace(result, reward=1.0) if (group, batch) == (0, 0) else result

        monkeypatch.setattr(NumberEnv, "step", step)
        run(make_config(tmp_path, FIVE, replace_constant_groups=1, **ahead(1, too_old="drop")))
        found = rows(tmp_path)
        assert [row["groups/stale"] for row in found] == [0, 1, 0, 0, 0]
        assert sum(row["groups/sampled"] for row in found) == 16 and sum(row["groups/filtered"] for row in found) == 1
        for row in found:
            ends = ("trained", "filtered", "replaced", "stale", "failed")
            assert row["groups/sampled"] == sum(row[f"groups/{end}"] for end in ends)
        assert found[-1]["tokens/discarded/sampled"] == 4

    def test_a_step_that_has_nothing_else_does_not_drop_it(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits(monkeypatch, 0, 3, lambda: len(service.sampled) == 16)
        one = NumberDatasetBuilder(batches=4, groups=1)
        run(make_config(tmp_path, one, **ahead(0, too_old="drop")))
        assert [row["groups/stale"] for row in rows(tmp_path)] == [0] * 4

    def test_dropping_depends_on_time(self) -> None:
        with pytest.raises(ConfigurationError, match="deterministic=False"):
            train.AsyncConfig(max_steps_off_policy=1, too_old="drop")

    @pytest.mark.parametrize("mode", [{}, {"async_config": train.AsyncConfig(max_steps_off_policy=2)}])
    def test_what_it_left_can_only_be_gone_on_with_in_the_same_way(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
    ) -> None:
        with pytest.MonkeyPatch.context() as patched:
            original = Loop.train

            async def fail(self: Loop, step: int, *args: Any, **kwargs: Any) -> Any:
                if step == 2:
                    raise ConnectionError
                return await original(self, step, *args, **kwargs)

            patched.setattr(Loop, "train", fail)
            waits(patched, 0, 0, lambda: False)
            with pytest.raises(ConnectionError):
                run(make_config(tmp_path, FIVE, **ahead(3)))
        with pytest.raises(ConfigurationError, match="deterministic=False"):
            run(make_config(tmp_path, FIVE, **mode))
        run(make_config(tmp_path, FIVE, **ahead(1)))
        assert (0, 0) in set().union(*trained(service))
        assert sum(row["groups/sampled"] for row in rows(tmp_path)) == 15

    @pytest.mark.slow
    @given(
        st.lists(st.integers(1, 4), min_size=1, max_size=5),
        st.integers(0, 3),
        st.sampled_from(["train", "wait", "drop"]),
        st.lists(st.sampled_from([0, 0, 3, 40, 400]), min_size=20, max_size=20),
    )
    @settings(max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
    def test_every_group_is_taken_once_and_none_is_older_than_allowed(
        self, sizes: list[int], most: int, too_old: str, latencies: list[int]
    ) -> None:
        taken: Counter[tuple[int, int]] = Counter()
        stale = 0
        open_at_most = 0
        original_train, original_sample, original_step = Loop.train, Sampler.sample_group, NumberEnv.step
        ages: list[int] = []
        active: set[tuple[int, int]] = set()

        async def do_train(self: Loop, step: int, batch: Batch) -> Any:
            nonlocal stale
            builders: list[Any] = [item.env_group_builder for item in batch.groups]
            taken.update((builder.batch, builder.group) for builder in builders)
            ages.extend(step - item.sampling_client_step for item in batch.groups)
            assert len(batch.groups) + batch.stale == sizes[step]
            stale += batch.stale
            return await original_train(self, step, batch)

        async def sample_group(self: Sampler, batch: int, place: int, *rest: Any) -> Any:
            nonlocal open_at_most
            active.add((batch, place))
            assert batch <= self.steps_done + most
            open_at_most = max(open_at_most, len(active))
            try:
                return await original_sample(self, batch, place, *rest)
            finally:
                active.discard((batch, place))

        async def step(self: NumberEnv, *args: Any, **kwargs: Any) -> Any:
            group, _, batch = self.prompt.to_ints()
            for _ in range(latencies[(batch * 4 + group) % 20]):
                await asyncio.sleep(0)
            return await original_step(self, *args, **kwargs)

        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
            fake = FakeServiceClient()
            patched.setattr(backends, "create_service_client", lambda *_: fake)
            patched.setattr(Loop, "train", do_train)
            patched.setattr(Sampler, "sample_group", sample_group)
            patched.setattr(NumberEnv, "step", step)
            patched.setattr(
                "tests.rl.loop.NumberDataset.get_batch",
                lambda self, index: [_group(index, place) for place in range(sizes[index])],
            )
            dataset = NumberDatasetBuilder(batches=len(sizes))
            run(make_config(Path(folder), dataset, on_zero_advantages="skip", **ahead(most, too_old=too_old)))
            assert set(taken.values()) == {1} and sum(taken.values()) + stale == sum(sizes)
            assert (too_old == "train" or max(ages) <= most) and (too_old == "drop" or stale == 0)
            largest = max(sum(sizes[i : i + most + 1]) for i in range(len(sizes)))
            assert open_at_most <= largest
            for row in untimed(Path(folder)):
                ends = ("trained", "filtered", "stale", "failed")
                assert row["groups/sampled"] == sum(row[f"groups/{end}"] for end in ends)


def _group(batch: int, place: int) -> Any:
    from tests.rl.loop import NumberGroup

    return NumberGroup(batch, place, 3, False)


class TestStream:
    def test_the_first_pass_is_over_what_finishes_first(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits(monkeypatch, 0, 0, lambda: len(service.trainers[0].passes) == 2)
        run(make_config(tmp_path, NumberDatasetBuilder(batches=1), **stream(3)))
        assert [keys for keys in trained(service) if (0, 0) in keys] == [trained(service)[-1]]
        assert set().union(*trained(service)) == {(0, 0), (0, 1), (0, 2)} and len(trained(service)) == 3

    def test_what_is_written_is_in_the_order_of_the_batch(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits(monkeypatch, 0, 0, lambda: len(service.trainers[0].passes) == 2)
        run(make_config(tmp_path, NumberDatasetBuilder(batches=1), write_records=True, **stream(3)))
        record = json.loads((tmp_path / "training_step_0001.json").read_text())
        found = [(datum["input_tokens"][0], datum["metadata"]["group_idx"]) for datum in record["training_data"]]
        assert {group for group, _ in found} == {0, 1, 2} and all(group == index for group, index in found)
        assert found[-1] == (0, 0)
