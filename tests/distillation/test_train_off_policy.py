"""The off-policy loop on the fakes: what is asked of whom and when, what is trained, logged and saved, and what is refused."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
import tinker

from tests.distillation.test_targets import make_datum
from tests.distillation.test_teachers import other_vocabulary
from tests.fakes import FakeSamplingClient, FakeServiceClient, seeded_reply
from tests.killing import forget_checkpoints
from tests.rl.loop import rows, untimed
from tinker_cookbook import backends
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.targets import score_batch
from tinker_cookbook.distillation.teachers import TeacherConfig
from tinker_cookbook.distillation.train_off_policy import Config, DatasetWithTeacher
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.supervised.data import SupervisedDatasetFromList
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.utils.metric_names import each_once

TINY = str(EXAMPLE_DATA / "tiny_chat")


def to_datum(row: tuple[int, int]) -> tinker.Datum:
    dataset, number = row
    return make_datum([dataset, number, 5, 6], [0.0, 0.5, 0.5])


@chz.chz(typecheck=True)
class Rows(SupervisedDatasetBuilder):
    """Rows of four tokens that tell their dataset and number; the first position has no weight."""

    dataset: int = 0
    count: int = 6
    test: int = 0
    length: int = 4

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        def make(row: tuple[int, int]) -> tinker.Datum:
            return to_datum(row) if self.length == 4 else make_datum([1] * self.length, [1.0] * (self.length - 1))

        train = SupervisedDatasetFromList([(self.dataset, i) for i in range(self.count)], 4, make)
        held_out = [(self.dataset, 100 + i) for i in range(self.test)]
        return train, SupervisedDatasetFromList(held_out, 4, make) if held_out else None


def source(teacher: str = TINY, weight: float = 1.0, **rows_: Any) -> DatasetWithTeacher:
    teacher_config = TeacherConfig(base_model=teacher)
    return DatasetWithTeacher(dataset_builder=Rows(**rows_), teacher_config=teacher_config, weight=weight)


def make_config(log_path: Path, *sources: DatasetWithTeacher, **changes: Any) -> Config:
    base: dict[str, Any] = {
        "learning_rate": 0.5,
        "dataset_configs": list(sources) or [source()],
        "model_name": TINY,
        "recipe_name": "test",
        "log_path": str(log_path),
        "n_teacher_targets": 3,
        "batch_size": 2,
        "eval_every": 0,
        "save_every": 0,
    }
    return Config(**{**base, **changes})


class TeacherService(FakeServiceClient):
    """Knows its teachers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers: dict[str, FakeSamplingClient] = {}

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None):
        async def create() -> FakeSamplingClient:
            name = str(model_path or base_model)
            self.teachers[name] = FakeSamplingClient(0, self.reply, self.calls, [])
            return self.teachers[name]

        return create()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> TeacherService:
    fake = TeacherService()
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


def run(config: Config) -> None:
    asyncio.run(train_off_policy.main(config))


class TestLoop:
    def test_what_is_trained_and_logged(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path, num_epochs=2))
        passes = service.trainers[0].passes
        assert len(passes) == 6 and {entry.loss_fn for entry in passes} == {"cross_entropy"}
        trained = [datum for entry in passes for datum in entry.data]
        assert {datum.loss_fn_inputs["target_tokens"].to_numpy().shape for datum in trained} == {(3, 3)}
        numbers = [datum.model_input.to_ints()[1] for datum in trained]
        assert sorted(numbers[:6]) == sorted(numbers[6:]) == list(range(6)) and numbers[:6] != numbers[6:]
        metrics = untimed(tmp_path)
        assert [row["step"] for row in metrics] == list(range(6))
        first = metrics[0]
        assert (first["train/num_sequences"], first["train/num_tokens"], first["train/num_loss_tokens"]) == (2, 6, 4)
        # The teacher reads four tokens of each of two, and draws one behind them.
        assert (first["tokens/prefill_uncached"], first["tokens/sampled"], first["tokens/trained"]) == (8, 2, 6)
        # The fake teacher: q = 4/7, 2/7, 1/7 among three tokens that had 7/8 together.
        q = np.array([4, 2, 1]) / 7
        entropy = -(q * np.log(q)).sum()
        assert first["train/teacher_mass"] == pytest.approx(7 / 8)
        assert first["train/teacher_entropy"] == pytest.approx(entropy)
        # The fake student: token t has log p = -(t + 1) / 8; positions 1 and 2 predict around tokens 5 and 6.
        nll = np.mean([(q * (np.arange(t, t + 3) + 1) / 8).sum() for t in (5, 6)])
        assert first["train/nll"] == pytest.approx(nll)
        assert first["train/kl"] == pytest.approx(nll - entropy)
        assert {"optim/lr", "optim/grad_norm"} <= first.keys()
        assert [row["progress/done_frac"] for row in metrics] == [(i + 1) / 6 for i in range(6)]
        assert {"time/total", "time/train", "time/teacher"} <= rows(tmp_path)[0].keys()

    def test_the_next_batch_is_read_while_this_one_trains(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path))
        submits = [call for call in service.calls if call.startswith("submit")]
        step = ["submit forward_backward", "submit optim_step"]
        ask = ["submit sample"] * 2
        save = ["submit save_state", "submit save_weights_for_sampler"]
        assert submits == ["submit create", *ask, *step, *ask, *step, *ask, *step, *save]
        assert service.calls.index("await forward_backward") > service.calls.index("submit optim_step")

    def test_the_teacher_is_asked_in_waves(self) -> None:
        waiting: list[int] = []
        """Questions without an answer yet, whenever another is put."""

        class Slow(FakeSamplingClient):
            unanswered = 0

            def sample(self, *arguments: Any, **options: Any):
                waiting.append(self.unanswered)
                self.unanswered += 1
                answer, turns = super().sample(*arguments, **options), len(waiting) % 3

                async def later():
                    for _ in range(1 + turns):
                        await asyncio.sleep(0)
                    self.unanswered -= 1
                    return await answer

                return later()

        examples = [(0, to_datum((0, i))) for i in range(10)]
        batch = asyncio.run(score_batch([Slow(0, seeded_reply, [], [])], examples, 3, concurrency=4))
        assert waiting == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
        assert [scores.token_ids_NK[0, 0] for scores in batch.scores] == list(range(10))

    def test_each_dataset_has_its_teacher_share_and_metrics(self, service: TeacherService, tmp_path: Path) -> None:
        other = tmp_path / "other"
        shutil.copytree(TINY, other)
        sources = [source(dataset=0, count=4, weight=3.0), source(str(other), dataset=1, count=1)]
        run(make_config(tmp_path / "log", *sources, batch_size=4))
        asked = {name: [call.prompt[0] for call in client.sampled] for name, client in service.teachers.items()}
        # Four rows at three a step take two steps, in which the one row of the other comes twice.
        assert asked == {TINY: [0] * 6, str(other): [1] * 2}
        row = untimed(tmp_path / "log")[0]
        for key in ("nll", "kl", "teacher_entropy", "teacher_mass"):
            own = [row[f"train/{key}/dataset_{d}"] for d in (0, 1)]
            assert row[f"train/{key}"] == pytest.approx(0.75 * own[0] + 0.25 * own[1])

    def test_test_sets_are_measured_first_and_last(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path, source(test=3), eval_every=2))
        metrics = untimed(tmp_path)
        assert [row["step"] for row in metrics if "test/kl" in row] == [0, 2, 3]
        assert service.calls.count("submit forward") == 3 * 2  # three examples in parts of two
        asked = [call.prompt[1] for call in service.teachers[TINY].sampled]
        assert sorted(number for number in asked if number >= 100) == [100, 101, 102]

    def test_checkpoints_hold_the_steps_that_their_cursor_says(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path, num_epochs=2, save_every=2))
        records = rows(tmp_path, "checkpoints.jsonl")
        assert [(record["batch"], service.saved[record["state_path"]]) for record in records] == [
            (2, 2),
            (4, 4),
            (6, 6),
        ]
        assert [record["elapsed_tokens"] for record in records] == [12, 24, 36]
        assert [bool(record.get("final")) for record in records] == [False, False, True]

    def test_a_finished_run_has_nothing_left_to_do(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path))
        before = (tmp_path / "metrics.jsonl").read_bytes()
        run(make_config(tmp_path))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        assert service.trainers[1].passes == [] and len(service.teachers) == 1

    def test_fewer_steps_than_begun_end_where_the_run_stands(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path, save_every=2))
        forget_checkpoints(tmp_path, after=1)
        run(make_config(tmp_path, save_every=2, max_steps=2))
        assert [record["batch"] for record in rows(tmp_path, "checkpoints.jsonl") if record.get("final")] == [2]

    def test_more_epochs_go_on_from_the_end(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path / "whole", num_epochs=2))
        run(make_config(tmp_path / "longer"))
        run(make_config(tmp_path / "longer", num_epochs=2))
        done = "progress/done_frac"
        whole, longer = (
            [{**row, done: 0} for row in each_once(untimed(tmp_path / name))] for name in ("whole", "longer")
        )
        assert whole == longer

    def test_other_data_is_no_resume(self, service: TeacherService, tmp_path: Path) -> None:
        run(make_config(tmp_path))
        for changed in (make_config(tmp_path, source(count=7)), make_config(tmp_path, batch_size=3)):
            with pytest.raises(ConfigurationError, match=r"began with .*'rows': \[6\], 'rows_per_step': \[2\]"):
                run(changed)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dataset_configs": []}, "dataset_configs is empty"),
            ({"n_teacher_targets": 100_000}, r"n_teacher_targets=100000 is more than the \d+ tokens"),
            ({"max_steps": 0}, "nothing to train on: .* max_steps=0"),
            ({"dataset_configs": [source(length=1024)]}, r"example of 1024 tokens.*Set max_length to at most 1023"),
            ({"dataset_configs": [source(), source(weight=0.01)]}, "none for source 1"),
            ({"dataset_configs": [source("/no/such/model")]}, "/no/such/model"),
            ({"model_name": "/no/such/model"}, "/no/such/model"),
        ],
    )
    def test_before_anything_is_created(
        self, service: TeacherService, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            run(make_config(tmp_path, **changes))
        assert service.calls == [] and not (tmp_path / "config.json").exists()

    def test_a_teacher_of_another_vocabulary(self, service: TeacherService, tmp_path: Path) -> None:
        teacher = other_vocabulary(tmp_path / "other")
        with pytest.raises(ConfigurationError, match="different vocabularies"):
            run(make_config(tmp_path / "log", source(teacher)))
        assert service.calls == []
