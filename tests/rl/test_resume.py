"""A run that is killed and resumed gives the metrics of one that was not, on the fakes and on the shipped tiny model."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes import rl_basic
from tests.fakes import FakeServiceClient, SampleCall, seeded_reply
from tests.rl.loop import NumberDatasetBuilder, WhichWeights, make_config, rows, untimed
from tinker_cookbook import backends
from tinker_cookbook.exceptions import CheckpointError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.sampler import Sampler
from tinker_cookbook.rl.train import Loop
from tinker_cookbook.runs.checkpoints import PendingCheckpoint
from tinker_cookbook.runs.manager import CheckpointManager
from tinker_cookbook.utils.files import append_jsonl
from tinker_cookbook.utils.metric_names import each_once


class Killed(BaseException):
    """Stands for a signal: nothing in the library may catch and swallow it."""


def new_service(monkeypatch: pytest.MonkeyPatch, kill_at: int | None = None) -> FakeServiceClient:
    """A fake that is killed when the first prompt of batch `kill_at` comes."""
    fake = FakeServiceClient()

    def reply(call: SampleCall) -> list[int]:
        if call.prompt[2] == kill_at:
            raise Killed
        return seeded_reply(call)

    fake.reply = reply
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


class TestOnFakes:
    def test_a_checkpoint_that_does_not_say_its_batch_is_no_place_to_go_on_from(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        service = new_service(monkeypatch)
        config = make_config(tmp_path, NumberDatasetBuilder(batches=2))
        asyncio.run(train.main(config))
        (tmp_path / "checkpoints.jsonl").unlink()
        append_jsonl(tmp_path / "checkpoints.jsonl", {"name": "20", "state_path": "tinker://old/weights/20"})
        with pytest.raises(
            CheckpointError, match=r"'20' does not say which batch is the next one.*load_checkpoint_path="
        ):
            asyncio.run(train.main(config))
        assert len(service.created) == 1, "said before weights are loaded"

    @pytest.mark.parametrize("kill_at", [0, 1, 2, 3, 5])
    def test_metrics_are_those_of_an_uninterrupted_run(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kill_at: int
    ) -> None:
        dataset = NumberDatasetBuilder(batches=6)
        settings = {"save_every": 2, "eval_every": 2, "evaluator_builders": [WhichWeights]}
        new_service(monkeypatch)
        asyncio.run(train.main(make_config(tmp_path / "whole", dataset, **settings)))

        service = new_service(monkeypatch, kill_at)
        with pytest.raises(Killed):
            asyncio.run(train.main(make_config(tmp_path / "killed", dataset, **settings)))
        service.reply = seeded_reply
        trained_before = service.trainers[0].weights
        asyncio.run(train.main(make_config(tmp_path / "killed", dataset, **settings)))

        assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
        resumed_at = kill_at // 2 * 2
        how = ("state with optimizer", f"tinker://run0/weights/{resumed_at:06d}") if resumed_at else ("lora",)
        assert service.created[1][: len(how)] == how
        assert (trained_before, service.trainers[1].weights) == (kill_at, 6)
        records = rows(tmp_path / "killed", "checkpoints.jsonl")
        assert [record["batch"] for record in records] == [2, 4, 6] and records[-1]["final"]

    def test_a_finished_run_has_nothing_left_to_do(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        service = new_service(monkeypatch)
        asyncio.run(train.main(make_config(tmp_path, eval_every=1, evaluator_builders=[WhichWeights])))
        files = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "checkpoints.jsonl")}
        asyncio.run(train.main(make_config(tmp_path, eval_every=1, evaluator_builders=[WhichWeights])))
        assert service.trainers[1].passes == []
        # The last evaluation is part of the result and must survive.
        assert {name: (tmp_path / name).read_bytes() for name in files} == files

    def test_more_steps_go_on_from_the_end(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        new_service(monkeypatch)
        dataset = NumberDatasetBuilder(batches=4)
        asyncio.run(train.main(make_config(tmp_path / "whole", dataset, max_steps=4)))
        asyncio.run(train.main(make_config(tmp_path / "longer", dataset, max_steps=2)))
        asyncio.run(train.main(make_config(tmp_path / "longer", dataset, max_steps=4)))
        done = "progress/done_frac"
        whole, longer = (
            [{**row, done: 0} for row in each_once(untimed(tmp_path / name))] for name in ("whole", "longer")
        )
        assert longer == whole

    def test_the_first_weights_are_not_loaded_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        service = new_service(monkeypatch, kill_at=3)
        service.saved["tinker://other/weights/x"] = 7
        config = make_config(tmp_path, save_every=2, load_checkpoint_path="tinker://other/weights/x")
        with pytest.raises(Killed):
            asyncio.run(train.main(config))
        service.reply = seeded_reply
        asyncio.run(train.main(config))
        assert service.created[1] == ("state with optimizer", "tinker://run0/weights/000002")
        assert service.trainers[1].weights == 7 + 4


def kill_before_sampling(step: int) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Sampler.sample_group

        async def sample_group(self, at, *rest):
            if at == step:
                raise Killed
            return await original(self, at, *rest)

        monkeypatch.setattr(Sampler, "sample_group", sample_group)

    return patch


def kill_after_training(step: int) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Loop.train

        async def train_(self, at, *rest, **kwargs):
            outcome = await original(self, at, *rest, **kwargs)
            if at == step:
                raise Killed
            return outcome

        monkeypatch.setattr(Loop, "train", train_)

    return patch


def kill_after_logging(step: int) -> Callable[[pytest.MonkeyPatch], None]:
    """The row is written, the checkpoint that is due is not."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = CheckpointManager.maybe_save

        async def maybe_save(self, done, *rest):
            if done == step + 1:
                raise Killed
            await original(self, done, *rest)

        monkeypatch.setattr(CheckpointManager, "maybe_save", maybe_save)

    return patch


def kill_while_saving(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The weights are saved, the line that names them is not yet written."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = PendingCheckpoint.finish

        async def finish(self):
            if self.name == name:
                for save in self.saves.values():
                    await save
                raise Killed
            return await original(self)

        monkeypatch.setattr(PendingCheckpoint, "finish", finish)

    return patch


def run_tiny(log_path: Path) -> None:
    """Four steps, saved after the second."""
    cli = rl_basic.CLIConfig(
        groups_per_batch=4,
        group_size=8,
        num_test=4,
        max_steps=4,
        save_every=2,
        eval_every=3,
        lora_rank=4,
        log_path=str(log_path),
        behavior_if_log_dir_exists="resume",
    )
    asyncio.run(train.main(rl_basic.build_config(cli)))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    log_path = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path_factory.mktemp("home")))
        run_tiny(log_path)
    return untimed(log_path)


class TestOnTheTinyModel:
    @pytest.mark.parametrize(
        "kill",
        [
            pytest.param(kill_before_sampling(3), id="before sampling", marks=pytest.mark.slow),
            pytest.param(kill_after_training(2), id="after training"),
            pytest.param(kill_after_training(1), id="before the first checkpoint", marks=pytest.mark.slow),
            pytest.param(kill_after_logging(1), id="between row and checkpoint"),
            pytest.param(kill_while_saving("000002"), id="while saving"),
            pytest.param(kill_while_saving("final"), id="at the very end", marks=pytest.mark.slow),
        ],
    )
    def test_metrics_are_those_of_an_uninterrupted_run(
        self,
        kill: Callable[[pytest.MonkeyPatch], None],
        uninterrupted: list[dict],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
        with monkeypatch.context() as patched:
            kill(patched)
            with pytest.raises(Killed):
                run_tiny(tmp_path / "run")
        run_tiny(tmp_path / "run")
        assert untimed(tmp_path / "run") == uninterrupted
        assert rows(tmp_path / "run", "checkpoints.jsonl")[-1]["final"]
