"""The supervised recipes from command line to files, on the shipped tiny model."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest

from recipes import chat_sl, rl_loop, sl_basic, sl_loop
from recipes.chat_sl import parse_mixture
from tests.killing import untimed_row
from tinker_cookbook import cli_utils
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.hub import FromHFConversationsBuilder
from tinker_cookbook.supervised.mixture import InterleavedDatasetBuilder
from tinker_cookbook.utils.files import read_jsonl


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def run(recipe: ModuleType, log_path: Path, *argv: str) -> list[dict[str, Any]]:
    run_recipe(recipe.CLIConfig, recipe.main, argv=[f"log_path={log_path}", *argv])
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def fails(recipe: ModuleType, capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as raised:
        run_recipe(recipe.CLIConfig, recipe.main, argv=list(argv))
    assert raised.value.code == code
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_mixture_is_learned(tmp_path: Path) -> None:
    rows = run(chat_sl, tmp_path / "run", "max_steps=8", "eval_every=8", "lora_rank=8", "test_size=8")
    before, after = (row["test/nll"] for row in rows if "test/nll" in row)
    assert after < 0.9 * before
    assert [row["num_sequences"] for row in rows[:-1]] == [16] * 8


def test_a_folder_of_the_hub_s_form_is_trained_on(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": "A"}]} for n in range(9)
    ]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ("test_size=3", "batch_size=2", "num_epochs=1", "lora_rank=2", "eval_every=3", "train_on_what=all_tokens")
    rows = run(sl_basic, tmp_path / "run", f"dataset={tmp_path / 'chats'}", *argv)
    assert len(rows) == 4 and rows[-1]["test/nll"] < rows[0]["test/nll"]
    assert all(row["num_loss_tokens"] == row["num_tokens"] for row in rows[:-1])


@pytest.mark.slow
def test_the_plain_loop_learns_and_starts_anew_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("num_epochs=1", "lora_rank=8", "batch_size=32")
    rows = run(sl_loop, tmp_path / "run", *argv)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["train_mean_nll"] < 0.95 * rows[0]["train_mean_nll"]
    path = capsys.readouterr().out.partition("Weights: tinker://")[2].splitlines()[0]
    assert (tmp_path / "home" / "runs" / path / "adapter_model.safetensors").is_file()
    assert "exists already" in fails(sl_loop, capsys, f"log_path={tmp_path / 'run'}", *argv)
    again = run(sl_loop, tmp_path / "run", *argv, "behavior_if_log_dir_exists=resume")
    assert [untimed_row(row) for row in again] == [untimed_row(row) for row in rows]


@pytest.mark.slow
def test_the_plain_loops_count_tokens_and_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(sl_loop, tmp_path / "sl", "num_epochs=1", "lora_rank=2", "batch_size=64", "learning_rate=1e-3")
    assert rows[0]["optim/lr"] == rows[0]["learning_rate"] == 1e-3 > rows[1]["optim/lr"]
    trained, seconds = ([row[f"progress/{name}"] for row in rows] for name in ("trained_tokens", "seconds"))
    assert 0 < trained[0] < trained[1] and 0 < seconds[0] < seconds[1]
    small = ("lora_rank=2", "groups_per_batch=4", "group_size=4", "max_steps=2")
    rows = run(rl_loop, tmp_path / "rl", *small, "max_tokens=12", "learning_rate=1e-3")
    assert [(row["optim/lr"], row["learning_rate"]) for row in rows] == [(1e-3, 1e-3)] * 2
    sampled, trained = ([row[f"progress/{name}"] for row in rows] for name in ("sampled_tokens", "trained_tokens"))
    assert 0 < sampled[0] < sampled[1] <= 2 * 16 * 12 and 0 < trained[0] <= trained[1] < sampled[1]
    # Replies of one token are all wrong.
    assert "nothing was trained" in fails(
        rl_loop, capsys, f"log_path={tmp_path / 'no'}", *small, "max_tokens=1", code=1
    )


def test_the_plain_loop_fits_on_a_screen() -> None:
    assert sl_loop.__file__ is not None
    assert len(Path(sl_loop.__file__).read_text().splitlines()) <= 92


@pytest.mark.parametrize("train_on_what", list(TrainOnWhat))
def test_every_selection_can_be_asked_for(
    tmp_path: Path, train_on_what: TrainOnWhat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    if train_on_what is TrainOnWhat.CUSTOMIZED:
        messages = [{**message, "trainable": message["role"] == "user"} for message in messages]
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    configs = []

    def keep(cli: sl_basic.CLIConfig) -> None:
        configs.append(sl_basic.build_config(cli))

    run_recipe(
        sl_basic.CLIConfig, keep, argv=[f"dataset={file}", "test_size=0", f"train_on_what={train_on_what.value}"]
    )
    assert configs[0].dataset_builder.common_config.train_on_what is train_on_what


@pytest.mark.parametrize(
    ("mixture", "parsed"),
    [
        ("a.jsonl:0.7,b.jsonl:0.3", (["a.jsonl", "b.jsonl"], [0.7, 0.3])),
        ("tulu3", (["tulu3"], None)),
        ("owner/name, library", (["owner/name", "library"], None)),
        ("conversations:3", (["conversations"], [3.0])),
    ],
)
def test_mixtures_are_read(mixture: str, parsed: tuple[list[str], list[float] | None]) -> None:
    assert parse_mixture(mixture) == parsed


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ("a:0.7,b", "give every dataset a share, or none"),
        ("a:much,b:1", "the share 'much' of 'a' is not a number"),
        ("a:1,,b:1", "a dataset has no name"),
        ("", "a dataset has no name"),
        ("a:1,a:2", "a dataset is named twice"),
    ],
)
def test_bad_mixtures(mixture: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_mixture(mixture)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("mixture=conversations:0,library:1",), "must be greater than 0; leave the source out instead"),
        (
            ("mixture=conversations,nonesuch",),
            "dataset='nonesuch' is unknown; use a shipped name (conversations, library)",
        ),
        (("mixture=library", "hub.streaming=true"), "library is a file, which is read whole"),
        (("mixture=tulu3", "streaming=true"), "streaming=true: this key is now hub.streaming"),
        (("mixture=tulu3", "hub.stream_length=9"), "stream_length=9 is for streams; set streaming=True with it"),
        (("test_size=64",), "test_size=64 leaves nothing to train on"),
        (("max_length=5",), "no trained token is left"),
    ],
)
def test_mistakes_on_the_command_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path / "logs"))
    assert message in fails(chat_sl, capsys, *argv)
    assert not (tmp_path / "logs").exists()


def test_thirty_rows_hold_out_a_tenth(tmp_path: Path) -> None:
    rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}] for n in range(30)]
    file = tmp_path / "thirty.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = sl_basic.build_config(sl_basic.CLIConfig(dataset=str(file), batch_size=9, log_path=str(tmp_path / "run")))
    train, test = config.dataset_builder()
    assert test is not None and sum(len(test.get_batch(i)) for i in range(len(test))) == 3
    assert sum(len(train.get_batch(i)) for i in range(len(train))) == 27


def test_a_selection_that_the_data_do_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (f"log_path={tmp_path / 'run'}", "train_on_what=customized")
    message = fails(sl_basic, capsys, *argv, code=2)
    assert "conversations.jsonl:" in message and "lacks the key 'trainable'" in message
    assert not (tmp_path / "run").exists()


class TestHubKeys:
    """What the library's config says of a dataset of the hub is a key of the recipes, under its own name."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        splits = {
            split: datasets.Dataset.from_list([{"chat": [{"role": "system", "content": split}, *turns]}] * 3)
            for split in ("first", "second")
        }
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))  # pyright: ignore[reportArgumentType, reportCallIssue]
        return str(tmp_path / "saved")

    KEYS = ("hub.split=first", "hub.test_split=second", "hub.messages_column=chat", "test_size=2", "max_length=64")

    def test_a_run_on_other_splits_and_another_column(self, tmp_path: Path, folder: str) -> None:
        argv = [f"dataset={folder}", *self.KEYS, "max_steps=1", "batch_size=3", f"log_path={tmp_path / 'run'}"]
        run_recipe(sl_basic.CLIConfig, sl_basic.main, argv=argv)
        row, *_ = read_jsonl(tmp_path / "run" / "metrics.jsonl")
        assert row["num_sequences"] == 3 and "test/nll" in row
        assert json.loads((tmp_path / "run" / "run_metadata.json").read_text())["system_prompt"] == "first"

    def test_in_a_mixture_they_are_for_the_datasets_of_the_hub(self, tmp_path: Path, folder: str) -> None:
        cli = cli_utils.parse(chat_sl.CLIConfig, [f"mixture={folder},library", *self.KEYS, f"log_path={tmp_path}/run"])
        builder = chat_sl.build_config(cli).dataset_builder
        assert isinstance(builder, InterleavedDatasetBuilder)
        of_hub, of_file = builder.sources
        assert isinstance(of_hub, FromHFConversationsBuilder) and of_hub.messages_column == "chat"
        assert isinstance(of_file, FromConversationFileBuilder)
