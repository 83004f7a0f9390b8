"""Labelled debates become conversations and questions for a judge, in both orders, with the right verdict in each."""

import asyncio
import json
from pathlib import Path

import pytest

from recipes.debate_judge import create_data, rl, sl
from tests.debate.arena import RIGHT, TINY, WRONG, JudgeByIndex, hold, make_renderer, reply_ids, three_turns
from tinker_cookbook import cli_utils
from tinker_cookbook.debate.judge_training import (
    JudgeChatBuilder,
    JudgeEnv,
    JudgeTraining,
    both_orders,
    split_views,
)
from tinker_cookbook.debate.judges import Winner
from tinker_cookbook.debate.saved import SavedDebate, labelled, load_debates
from tinker_cookbook.debate.views import DebateView, SeatView
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.rl.records import make_records
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.utils.files import read_jsonl

RENDERER = make_renderer("qwen3_instruct")


def debate(name: str, *correct: bool | None) -> SavedDebate:
    seats = tuple(SeatView([f"{name} {i} says"], correct=one) for i, one in enumerate(correct))
    return SavedDebate(name, DebateView(f"Question {name}", seats, (0, 0, 1)), Winner.TIE)


@pytest.fixture
def file(tmp_path: Path) -> str:
    debates = [debate(f"q{i}", i % 3 == 0, i % 3 != 0) for i in range(8)] + [debate("both", True, True)]
    (tmp_path / "debates.jsonl").write_text("".join(json.dumps(one.row()) + "\n" for one in debates))
    return str(tmp_path / "debates.jsonl")


class TestSaved:
    @pytest.mark.parametrize(
        ("correct", "label"),
        [((True, False), "A"), ((False, True), "B"), ((False, False, True), "C"), ((True,), "A"), ((False,), "B")],
    )
    def test_the_one_side_that_is_right(self, correct: tuple[bool, ...], label: str) -> None:
        assert debate("x", *correct).label is Winner(label)

    @pytest.mark.parametrize("correct", [(True, True), (False, False), (None, True), (None,)])
    def test_else_there_is_no_label(self, correct: tuple[bool | None, ...]) -> None:
        assert debate("x", *correct).label is None
        with pytest.raises(ConfigurationError, match="none of the 1 debates has exactly one right side"):
            labelled([debate("x", *correct)])

    def test_a_file_comes_back_as_it_was_written(self, file: str) -> None:
        debates = load_debates(file)
        assert debates[:8] == [debate(f"q{i}", i % 3 == 0, i % 3 != 0) for i in range(8)]

    def test_the_records_of_a_run_are_debates_too(self, tmp_path: Path) -> None:
        members = [three_turns(RENDERER, answer) for answer in (RIGHT, WRONG, WRONG, RIGHT)]
        group = hold(RENDERER, members, JudgeByIndex((Winner.A, Winner.TIE))).group
        for i, record in enumerate(make_records(group)):
            folder = tmp_path / f"iteration_{i:06d}"
            folder.mkdir()
            (folder / f"debate_{i}.json").write_text(json.dumps(record.content))
        found = load_debates(tmp_path)
        assert [(one.label, one.verdict) for one in found] == [(Winner.A, Winner.A), (Winner.B, Winner.TIE)]
        assert found[0].view.rounds_a == [RIGHT, " rebuts", " closes"] and found[0].view.key == (4, 2, 0)

    def test_errors_name_the_place(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"neither a \.jsonl file nor a folder"):
            load_debates(tmp_path)
        (tmp_path / "bad.jsonl").write_text('{"instance_id": "x", "verdict": "A"}\n')
        with pytest.raises(DataFormatError, match=r"holds no view of a debate .KeyError: 'view'"):
            load_debates(tmp_path / "bad.jsonl")
        (tmp_path / "debate_1.json").write_text("{")
        with pytest.raises(DataFormatError, match=r"debate_1\.json"):
            load_debates(tmp_path)


class TestViews:
    def test_both_orders_have_the_right_verdict_and_no_position_has_it_more_often(self, file: str) -> None:
        train, test = split_views(file, 0.25, 0)
        assert (len(train), len(test)) == (12, 4)
        assert not {view.instance_id for view in train} & {view.instance_id for view in test}
        for views in (train, test):
            assert sum(view.label is Winner.A for view in views) == len(views) / 2
            assert all(view.view.seats["AB".index(str(view.label))].correct for view in views)

    def test_three_seats_and_one(self) -> None:
        first, second = both_orders(debate("x", False, False, True))
        assert (first.label, second.label) == (Winner.C, Winner.A) and second.view.seats[0].correct
        assert [view.label for view in both_orders(debate("x", False))] == [Winner.B]

    def test_a_split_without_a_side_is_refused(self, file: str) -> None:
        with pytest.raises(ConfigurationError, match="one side of the split is empty"):
            split_views(file, 0.01, 0)


def test_conversations_end_with_the_right_verdict_and_train_nothing_else(file: str) -> None:
    settings = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=TINY, renderer_name="qwen3_instruct", max_length=None, batch_size=12
    )
    train, test = JudgeChatBuilder(common_config=settings, debates=file)()
    assert test is not None and len(train) == 1
    replies = []
    for datum in train.get_batch(0):
        weights, targets = (datum.loss_fn_inputs[key].tolist() for key in ("weights", "target_tokens"))
        replies.append([target for target, weight in zip(targets, weights, strict=True) if weight > 0])
    expected = [reply_ids(RENDERER, f"<VERDICT>{view.label}</VERDICT>") for view in split_views(file, 0.25, 0)[0]]
    assert sorted(replies) == sorted(expected)


class TestRewards:
    @pytest.mark.parametrize(
        ("said", "reward", "parsed"),
        [
            ("<VERDICT>B</VERDICT>", 1.0, 1.0),
            ("<VERDICT>A</VERDICT>", 0.0, 1.0),
            ("<VERDICT>TIE</VERDICT>", 0.0, 1.0),
            ("B", 0.0, 0.0),
        ],
    )
    def test_only_the_right_verdict_is_rewarded(self, said: str, reward: float, parsed: float) -> None:
        view = debate("x", False, True)
        env = JudgeEnv(view, RENDERER, None, None)
        assert asyncio.run(env.initial_observation())
        result = asyncio.run(env.step(reply_ids(RENDERER, said)))
        assert (result.reward, result.metrics["parsed"]) == (reward, parsed)

    def test_the_dataset_asks_each_view_of_the_test_once(self, file: str) -> None:
        builder = DatasetBuilder(
            env=JudgeTraining(debates=file),
            model_name=TINY,
            renderer_name="qwen3_instruct",
            groups_per_batch=4,
            group_size=3,
            num_batches=2,
            num_test=None,
        )
        train, test = asyncio.run(builder())
        assert test is not None and len(train) == 2 and [len(test.get_batch(0)), len(train.get_batch(0))] == [4, 4]
        envs = asyncio.run(train.get_batch(0)[0].make_envs())
        assert len(envs) == 3 and all(isinstance(env, JudgeEnv) for env in envs)


@pytest.mark.slow
def test_ten_debates_per_question_teach_the_tiny_model_who_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own debates the shipped model is a coin; after training it is none, also on questions that are new to it."""
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    debates = tmp_path / "debates.jsonl"
    made = ["model_name=tiny_debate", "task=collatz", "protocol.rounds=1", "max_tokens=64", "debates=10", "seed=5"]
    asyncio.run(create_data.main(cli_utils.parse(create_data.CLIConfig, [*made, f"output_path={debates}"])))
    argv = [f"debates={debates}", "num_epochs=5", "learning_rate=2e-3", "eval_every=0", f"log_path={tmp_path / 'sl'}"]
    asyncio.run(sl.main(cli_utils.parse(sl.CLIConfig, argv)))
    record = get_last_checkpoint(tmp_path / "sl")
    assert record is not None

    def right_verdicts(*keys: str) -> float:
        """Measured before the first step."""
        folder = tmp_path / f"measured_{len(keys)}"
        argv = [f"debates={debates}", "max_steps=1", "learning_rate=1e-9", "group_size=2", f"log_path={folder}", *keys]
        asyncio.run(rl.main(cli_utils.parse(rl.CLIConfig, argv)))
        return read_jsonl(folder / "metrics.jsonl")[0]["test/env/all/correct"]

    before, after = right_verdicts(), right_verdicts(f"load_checkpoint_path={record.state_path}")
    assert before < 0.58 and after > 0.6 and after > before + 0.1, (before, after)
