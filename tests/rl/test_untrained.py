"""Batches without any advantage: skipped, said and counted; several in a row, or a run of nothing else, are an error."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import FakeServiceClient
from tests.rl.loop import NumberDatasetBuilder, NumberEnv, make_config, rows, trains_nothing, untimed
from tinker_cookbook.exceptions import TrainingError, UntrainedRunError, ZeroAdvantageError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import InitialObservationOverflow
from tinker_cookbook.rl.untrained import UntrainedSteps, why_untrained

ALL_ALIKE = NumberDatasetBuilder(batches=5, groups=2, constant_groups=2)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The batches in which all rewards are the same."""
    step, batches = NumberEnv.step, set[int]()

    async def patched(self: NumberEnv, action: list[int], *, extra: Any = None) -> Any:
        self.constant = self.prompt.to_ints()[2] in batches
        return await step(self, action, extra=extra)

    monkeypatch.setattr(NumberEnv, "step", patched)
    return batches


def run(config: train.Config) -> None:
    asyncio.run(train.main(config))


def skipped(log_path: Path) -> list[int]:
    return [row["train/skipped_steps"] for row in rows(log_path)]


def test_a_batch_is_skipped_said_and_counted(service: FakeServiceClient, tmp_path: Path, alike: set[int]) -> None:
    alike |= {0, 1, 3}
    run(make_config(tmp_path, NumberDatasetBuilder(batches=5)))
    assert skipped(tmp_path) == [1, 1, 0, 1, 0] and service.trainers[0].weights == 2
    log = (tmp_path / "logs.log").read_text()
    said = re.findall(r"step (\d): nothing to train on; skipped\. ?(.*)", log)
    assert [step for step, _ in said] == ["0", "1", "3"]
    assert [bool(why) for _, why in said] == [True, False, False], "the first explains itself in full"
    assert log.count("group   1: 1 1 1 1") == 1
    first, _, third = rows(tmp_path)[:3]
    assert first["groups/filtered"] == first["groups/sampled"] == 3 and first["advantages/nonzero_count"] == 0
    assert third["advantages/nonzero_count"] == third["progress/trained_tokens"] > 0


def test_three_in_a_row_end_the_run_with_what_was_sampled(
    service: FakeServiceClient, tmp_path: Path, alike: set[int]
) -> None:
    alike |= {1, 2, 3}
    config = make_config(tmp_path, NumberDatasetBuilder(batches=6), write_records=True)
    with pytest.raises(ZeroAdvantageError, match="group   1: 1 1 1 1") as raised:
        run(config)
    note, example = raised.value.__notes__
    assert "The last 3 steps trained nothing, so the run ends after step 3" in note
    assert str(tmp_path) in note and "behavior_if_log_dir_exists=resume" in note
    assert re.fullmatch(r"For example:\n  question: .+\n  reply: .+\n  reward: 1 \(its group: 1 1 1 1\)", example), (
        example
    )
    assert skipped(tmp_path) == [0, 1, 1, 1], "the failing step has its row"
    record = json.loads((tmp_path / "training_step_0004.json").read_text())
    assert record["num_datums"] == 0 and record["training_data"] == [], "and its record"
    (stopped,) = rows(tmp_path, "checkpoints.jsonl")
    assert stopped["batch"] == 4 and stopped["state_path"]
    run(config)
    assert skipped(tmp_path) == [0, 1, 1, 1, 0, 0] and rows(tmp_path, "checkpoints.jsonl")[-1]["final"]


@pytest.mark.parametrize(("policy", "most", "taken"), [("raise", 3, 1), ("stop", 2, 2), ("stop", 4, 4)])
def test_how_many_is_a_key(service: FakeServiceClient, tmp_path: Path, policy: str, most: int, taken: int) -> None:
    with pytest.raises(ZeroAdvantageError):
        run(make_config(tmp_path, ALL_ALIKE, on_zero_advantages=policy, max_zero_advantage_steps=most))
    assert skipped(tmp_path) == [1] * taken and service.trainers[0].weights == 0


def test_skip_goes_on_however_many_there_are(service: FakeServiceClient, tmp_path: Path, alike: set[int]) -> None:
    alike |= {0, 1, 2, 3, 4}
    run(make_config(tmp_path, NumberDatasetBuilder(batches=6), on_zero_advantages="skip"))
    assert skipped(tmp_path) == [1] * 5 + [0]


def test_a_run_that_skips_them_all_ends_with_a_warning(service: FakeServiceClient, tmp_path: Path) -> None:
    base = make_config(tmp_path, ALL_ALIKE)
    fields = ("learning_rate", "dataset_builder", "model_name", "max_tokens", "log_path")
    run(train.Config(**{field: getattr(base, field) for field in fields}))
    assert json.loads((tmp_path / "run_metadata.json").read_text())["recipe"] == "script"  # the default
    assert skipped(tmp_path)[:5] == [1] * 5 and rows(tmp_path, "checkpoints.jsonl")[-1]["final"]
    assert "is over and trained nothing" in (tmp_path / "logs.log").read_text()
    assert service.trainers[0].adam == []


def test_another_that_trained_nothing_ends_in_an_error_each_time(service: FakeServiceClient, tmp_path: Path) -> None:
    config = make_config(tmp_path, ALL_ALIKE, max_zero_advantage_steps=9)
    for sampled in (True, False):
        with trains_nothing() as raised:
            run(config)
        notes = getattr(raised.value, "__notes__", [])
        assert ["reward: 1 (its group: 1 1 1 1)" in note for note in notes] == [True] * sampled
        assert skipped(tmp_path) == [1] * 5
    assert not any(record.get("final") for record in rows(tmp_path, "checkpoints.jsonl"))
    assert service.trainers[0].passes == service.trainers[0].adam == []


def test_a_killed_run_counts_on(
    service: FakeServiceClient, tmp_path: Path, alike: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed between the second and the third ends where the other does, with the same rows."""
    alike |= {1, 2, 3}
    dataset = NumberDatasetBuilder(batches=6)
    with pytest.raises(ZeroAdvantageError):
        run(make_config(tmp_path / "whole", dataset, save_every=1))

    class Killed(BaseException):
        pass

    reply = service.reply

    def deadly(call: Any) -> list[int]:
        if call.prompt[2] == 3:
            raise Killed
        return reply(call)

    service.reply = deadly
    with pytest.raises(Killed):
        run(make_config(tmp_path / "killed", dataset, save_every=1))
    service.reply = reply
    assert rows(tmp_path / "killed", "checkpoints.jsonl")[-1]["zero_advantage_steps"] == 2
    with pytest.raises(ZeroAdvantageError):
        run(make_config(tmp_path / "killed", dataset, save_every=1))
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")


def test_prompts_that_are_all_too_long_count_as_well(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewards differ, so the advantages are not zero, but there is nothing to train on."""

    async def too_long(self: NumberEnv) -> InitialObservationOverflow:
        return InitialObservationOverflow(float(self.prompt.to_ints()[1]))

    monkeypatch.setattr(NumberEnv, "initial_observation", too_long)
    with pytest.raises(TrainingError, match="every prompt of this batch was too long"):
        run(make_config(tmp_path))
    assert service.trainers[0].passes == [] and len(rows(tmp_path)) == 3


def test_a_run_that_goes_on_after_such_an_end_has_as_many_tries_again(
    service: FakeServiceClient, tmp_path: Path, alike: set[int]
) -> None:
    alike |= {1, 2, 3, 4, 5}
    config = make_config(tmp_path, NumberDatasetBuilder(batches=7))
    with pytest.raises(ZeroAdvantageError, match="group   1: 1 1 1 1"):
        run(config)
    assert skipped(tmp_path) == [0, 1, 1, 1] and rows(tmp_path, "checkpoints.jsonl")[-1]["zero_advantage_steps"] == 0
    run(config)
    assert skipped(tmp_path) == [0, 1, 1, 1, 1, 1, 0]


def test_a_step_that_trains_begins_the_count_anew(service: FakeServiceClient, tmp_path: Path, alike: set[int]) -> None:
    alike |= {0, 1, 3, 4}
    run(make_config(tmp_path, NumberDatasetBuilder(batches=6), save_every=1))
    counted = [record["zero_advantage_steps"] for record in rows(tmp_path, "checkpoints.jsonl")]
    assert skipped(tmp_path) == [1, 1, 0, 1, 1, 0] and counted[:5] == [1, 2, 0, 1, 2]


def test_a_single_trained_token_is_enough_for_a_run(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(progress=SimpleNamespace(trained_tokens=1), run=SimpleNamespace(log_path=tmp_path))
    steps = UntrainedSteps(make_config(tmp_path, ALL_ALIKE), session)
    steps.check_run(5)
    session.progress.trained_tokens = 0
    with pytest.raises(UntrainedRunError, match="none of its 5 batches"):
        steps.check_run(5)


def test_a_batch_whose_groups_all_failed_says_so() -> None:
    batch: Any = SimpleNamespace(groups=[], advantages_P=[])
    assert "step 3: every group failed" in str(why_untrained(3, batch))
