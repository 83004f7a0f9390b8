"""Promises about a run's files and settings that belong to no single loop."""

import asyncio
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import datasets
import pytest

from recipes import chat_sl, eval_inspect, single_turn, sl_basic
from recipes.preference import train as preference_train
from tests.fakes import FakeServiceClient
from tests.preference.test_train_dpo import make_config as dpo_config
from tests.rl.loop import NumberDataset, make_config
from tests.supervised.test_train import config as supervised_config
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import CheckpointError, DataFormatError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models.hyperparameters import get_lr
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.item_dataset import ItemDataset, TrainingBatches
from tinker_cookbook.runs.bootstrap import open_run
from tinker_cookbook.runs.checkpoints import load_checkpoints_file
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.runs.reference import KLReferenceConfig
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.files import read_jsonl, write_jsonl

TINY = str(EXAMPLE_DATA / "tiny_chat")


class TestDamagedFiles:
    @pytest.mark.parametrize(
        ("line", "error"), [('{"name": "a", "batch', DataFormatError), ('{"batch": 1}', CheckpointError)]
    )
    def test_of_checkpoints(self, tmp_path: Path, line: str, error: type[Exception]) -> None:
        (tmp_path / "checkpoints.jsonl").write_text(
            f'{{"name": "a", "batch": 1}}\n{line}\n{{"name": "b", "batch": 2}}\n'
        )
        with pytest.raises(error, match=r"checkpoints\.jsonl:2: .*Remove that line: the run then resumes from"):
            load_checkpoints_file(tmp_path)

    def test_of_metrics(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "los\n{"step": 2}\n')
        told = r"metrics\.jsonl:2: .*Remove that line: its step's numbers are lost"
        with pytest.raises(DataFormatError, match=told):
            read_metrics(tmp_path)
        with open_run(tmp_path, config={}, recipe_name="x") as run, pytest.raises(DataFormatError, match=told):
            run.rewind_metrics(1)


class TestShippedModel:
    """`tiny_chat` is a name everywhere, from whatever folder."""

    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(backends, "_local_clients", WeakValueDictionary())

    def test_what_is_known_of_it(self) -> None:
        assert get_tokenizer("tiny_chat").get_vocab() == get_tokenizer(TINY).get_vocab()
        assert model_info.get_context_length("tiny_chat") == model_info.get_context_length(TINY)
        assert model_info.get_recommended_renderer_name("tiny_chat") == model_info.get_recommended_renderer_name(TINY)
        assert KLReferenceConfig(base_model="tiny_chat").base_model == TINY

    def test_a_run_from_python(self, tmp_path: Path) -> None:
        common = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer="tiny_chat", renderer_name="qwen3_instruct", max_length=64, batch_size=4
        )
        data = FromConversationFileBuilder(common_config=common, file_path=str(EXAMPLE_DATA / "conversations.jsonl"))
        config = train.Config(
            log_path=str(tmp_path / "log"),
            model_name="tiny_chat",
            recipe_name="mine",
            dataset_builder=data,
            lora_rank=2,
            max_steps=1,
            eval_every=0,
        )
        asyncio.run(train.main(config))
        assert len(read_jsonl(tmp_path / "log" / "metrics.jsonl")) == 1

    def test_a_folder_of_that_name_is_given_by_its_path(self) -> None:
        Path("tiny_chat").mkdir()
        assert KLReferenceConfig(base_model="./tiny_chat").base_model == "./tiny_chat"


class TestLearningRates:
    KNOWN = "Qwen/Qwen3-4B-Instruct-2507"

    def test_the_rule_is_the_default_of_fine_tuning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recipes.common.resolve_model", lambda cli: (cli.model_name, "role_colon"))

        def default(model_name: str, **keys: Any) -> float | None:
            return sl_basic.for_model(sl_basic.CLIConfig(model_name=model_name, **keys)).learning_rate

        assert default(self.KNOWN) == get_lr(self.KNOWN) != 2e-4
        assert default("openai/gpt-oss-20b") == default("nobody/knows") == 2e-4
        assert default("tiny_chat") == 1e-3 and default(self.KNOWN, learning_rate=3e-5) == 3e-5

    @pytest.mark.parametrize(
        ("share", "warned"),
        [(1 / 9, []), (1 / 11, ["supervised", "rl"])],
    )
    def test_a_rate_far_below_it_is_pointed_out(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        share: float,
        warned: list[str],
    ) -> None:
        monkeypatch.setattr(backends, "check_backend", lambda *args, **kwargs: "local")
        keys: dict[str, Any] = {"model_name": self.KNOWN, "learning_rate": share * get_lr(self.KNOWN)}
        checks = {
            "supervised": lambda: train.check_config(supervised_config(tmp_path, **keys)),
            "rl": lambda: rl_train.check_config(make_config(tmp_path, **keys)),
            "dpo": lambda: train_dpo.check_config(dpo_config(tmp_path, **keys)),
        }
        found = []
        for name, check in checks.items():
            caplog.clear()
            check()
            found += [name] if "the weights will hardly move" in caplog.text else []
        assert found == warned

    @pytest.mark.parametrize("recipe", [chat_sl, single_turn], ids=["supervised", "rl"])
    def test_the_defaults_are_not(self, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recipes.common.resolve_model", lambda cli: (cli.model_name, "role_colon"))
        rate = recipe.for_model(recipe.CLIConfig(model_name=self.KNOWN)).learning_rate
        assert rate is not None and rate >= 0.1 * get_lr(self.KNOWN)

    def test_that_of_preferences_is_the_same_for_every_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recipes.common.resolve_model", lambda cli: (cli.model_name, "role_colon"))
        monkeypatch.setattr(preference_train, "run_config", lambda cli, *_, **__: cli)
        for model in (self.KNOWN, "meta-llama/Llama-3.2-1B", "nobody/knows"):
            cli = preference_train.CLIConfig(model_name=model)
            assert preference_train.build_config(cli).learning_rate == 1e-5


class TestBatchesAreNotMadeToBeCounted:
    def test_a_dataset_that_knows_its_batches(self) -> None:
        made: list[int] = []

        def make(item: int, key: tuple[int, int]) -> Any:
            made.append(item)
            return item

        batches = TrainingBatches(ItemDataset(range(6000), make, 3), groups_per_batch=7)
        assert len(batches) == 858 and made == []
        assert batches.get_batch(857) == [5999] and batches.get_batch(1) == list(range(7, 14))
        assert len(made) < 20

    def test_one_that_does_not_is_looked_at_as_far_as_the_run_goes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        original = NumberDataset.get_batch

        def get_batch(dataset: NumberDataset, index: int) -> Any:
            asked.append(index)
            return original(dataset, index)

        monkeypatch.setattr(NumberDataset, "get_batch", get_batch)
        batches = TrainingBatches(NumberDataset(2000, 3, 1, 0), groups_per_batch=5, max_steps=4)
        assert len(batches) == 4 and max(asked) <= 7
        assert len(batches.get_batch(3)) == 5

    def test_an_end_before_max_steps(self) -> None:
        batches = TrainingBatches(NumberDataset(2, 3, 1, 0), groups_per_batch=4, max_steps=9)
        assert [len(batches.get_batch(i)) for i in range(len(batches))] == [4, 2]


def test_a_stream_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the recipe's check, which comes before the run's folder, and by the run together."""
    read: list[int] = []

    def rows() -> Any:
        for number in range(12):
            read.append(number)
            messages = [{"role": "user", "content": f"Q{number}"}, {"role": "assistant", "content": "A"}]
            yield {"messages": messages}

    monkeypatch.setattr("tinker_cookbook.data.hub.load", lambda *args: datasets.IterableDataset.from_generator(rows))
    fake = FakeServiceClient()
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    argv = ["mixture=owner/stream", "hub.streaming=true", "test_size=0", "num_epochs=1", "batch_size=4"]
    monkeypatch.setattr(
        "tinker_cookbook.supervised.hub.FromHFConversationsBuilder._known_length", lambda self, stream: 12
    )
    monkeypatch.setattr("tinker_cookbook.supervised.train.nll_metrics", lambda *args: {})
    monkeypatch.setattr("tinker_cookbook.supervised.train._Loop._show", lambda self, datum: None)
    run_recipe(chat_sl.CLIConfig, chat_sl.main, argv=[*argv, f"log_path={tmp_path / 'log'}", "eval_every=0"])
    assert [row["num_sequences"] for row in read_jsonl(tmp_path / "log" / "metrics.jsonl")] == [4, 4, 4]
    assert sorted(read) == list(range(12))


def test_inspect_tasks_may_be_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "mine.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    monkeypatch.chdir(tmp_path)
    assert eval_inspect.name_task(str(tmp_path / "mine.jsonl")) == f"qa/{tmp_path}/mine.jsonl"
    assert eval_inspect.name_task(str(tmp_path / "tasks" / "own.py@arithmetic")) == "tasks/own.py@arithmetic"
    assert [eval_inspect.name_task(name) for name in ("qa/arithmetic", "inspect_evals/gsm8k", "qa/mine.jsonl")] == [
        "qa/arithmetic",
        "inspect_evals/gsm8k",
        "qa/mine.jsonl",
    ]
