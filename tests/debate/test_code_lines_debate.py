"""Debate on one-line functions: the critic writes down an argument of its own, and the judge looks at that one."""

import asyncio
import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from recipes import debate_runs, debate_study
from tests.debate.arena import make_renderer, speech
from tests.fakes import ScriptedCompleter
from tinker_cookbook.cli_utils import parse
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import KeyJudge
from tinker_cookbook.debate.oversight import OversightProtocol
from tinker_cookbook.debate.protocols import OVERSIGHT, ProtocolName
from tinker_cookbook.env.shipped.code.lines import CHECKED, line_programs, split_programs
from tinker_cookbook.env.shipped.questions.code_lines import STEPS, CodeLinesTask, line_row, line_rows
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tools import warm_up_rows
from tools.warm_up_rows import debate_conversations, written_line

RENDERER = make_renderer("qwen3_instruct")
PROGRAM = next(program for program in line_programs(STEPS) if program.words == "add 1, then at least 4")
ITEM = TaskItem("one", line_row(PROGRAM)["question"], PROGRAM.line)
RIGHT, WRONG = "<SOLUTION>max(1 + x, 4)</SOLUTION>", "<SOLUTION>x + 1</SOLUTION>"
"""WRONG forgets a step, and is right for all x of at least 3."""
TASK = CodeLinesTask()


def rewards(name: ProtocolName, members: Sequence[Sequence[str]]) -> list[list[float]]:
    protocol = OversightProtocol.make(name, TASK, RENDERER, KeyJudge())
    builder = DebateGroupBuilder(protocol, ITEM, len(members) // protocol.config.num_speakers, (0, 0))
    turns = {i: [speech(RENDERER, text) for text in member] for i, member in enumerate(members)}
    group = asyncio.run(do_group_rollout(builder, ScriptedCompleter(turns)))
    return [[transition.reward for transition in trajectory.transitions] for trajectory in group.trajectories_G]


class TestTask:
    def test_it_is_found_by_its_name_with_the_programs_of_the_environment(self) -> None:
        task = get_task("code_lines")
        train, test = load_items(task, task.default_dataset)
        assert [item.reference for item in train] == [program.line for program in split_programs(STEPS, "train")]
        assert len(test) == len(line_rows()[1]) == len(split_programs(STEPS, "test")) > 200

    def test_a_step_for_each_argument(self) -> None:
        steps = TASK.steps(ITEM, WRONG)
        assert steps is not None and [step.name for step in steps] == [str(x) for x in CHECKED]
        assert [step.holds for step in steps] == [x >= 3 for x in CHECKED]
        assert steps[CHECKED.index(-2)].claim == "add 1, then at least 4: f(-2) is -1"

    def test_a_line_that_cannot_be_read_gives_nothing(self) -> None:
        steps = TASK.steps(ITEM, "<SOLUTION>print(x)</SOLUTION>")
        assert steps is not None and not any(step.holds for step in steps) and steps[0].claim.endswith("is nothing")
        assert TASK.steps(ITEM, "x + 1") is None, "an answer without tags has no steps"

    @pytest.mark.parametrize(
        ("said", "named"),
        [
            ("f(7) is wrong.", "7"),
            (" f(-12) is right", "-12"),
            ("f(07) is wrong", "7"),
            ("f(x) is wrong", None),
            ("7", None),
        ],
    )
    def test_what_a_speech_names(self, said: str, named: str | None) -> None:
        assert TASK.named_step(said) == named

    def test_the_reward_is_the_share_of_arguments_and_right_is_all_of_them(self) -> None:
        right, wrong = (asyncio.run(TASK.score(ITEM, text)) for text in (RIGHT, WRONG))
        assert (right.reward, right.correct) == (1.0, True)
        assert (wrong.reward, wrong.correct) == (pytest.approx(22 / 37), False)
        assert asyncio.run(TASK.score(ITEM, "nothing")).reward == 0.0


class TestProtocols:
    def test_debate_a_critic_s_own_argument_decides(self) -> None:
        assert rewards("debate", [[RIGHT, "f(-5) is wrong."], [WRONG, "f(-5) is wrong."]]) == [[1.0, 1.0], [0.0, 0.0]]
        assert rewards("debate", [[WRONG, "f(2) is wrong."], [WRONG, "f(3) is wrong."]]) == [[1.0, 1.0], [0.0, 0.0]]

    def test_debate_an_argument_that_is_not_checked_loses(self) -> None:
        assert rewards("debate", [[RIGHT, "f(99) is wrong."], [WRONG, "no idea"]]) == [[1.0, 0.0], [1.0, 0.0]]

    def test_consultancy_the_author_chooses(self) -> None:
        assert rewards("consultancy", [[WRONG, "f(7) is right."], [WRONG, "f(0) is right."]]) == [
            [1.0, 1.0],
            [0.0, 0.0],
        ]

    def test_direct_a_random_one(self) -> None:
        accepted = [reward for (reward,) in rewards("direct", [[WRONG]] * 40 + [[RIGHT]] * 2)]
        assert 0.3 < sum(accepted[:40]) / 40 < 0.9 and accepted[40:] == [1.0, 1.0]

    @pytest.mark.parametrize("protocol", OVERSIGHT)
    def test_every_signal_is_a_dataset_of_the_study(self, protocol: ProtocolName) -> None:
        cli = parse(debate_study.CLIConfig, ["task=code_lines", "num_test=2", "model_name=tiny_chat"])
        builder = debate_runs.dataset_builder(cli, protocol, 0, 2, 1)
        builder.check()
        assert len(asyncio.run(builder())[0].get_batch(0)) == 2


class TestWarmUp:
    def test_writers_forget_steps_and_critics_mostly_find_where(self) -> None:
        rng = random.Random(0)
        lines = {written_line(PROGRAM, rng) for _ in range(200)}
        assert PROGRAM.line in lines and "x + 1" in lines
        spoken = [c for c in islice(debate_conversations(0), 2000) if c[-1]["content"].endswith("is wrong.")]  # type: ignore[union-attr]
        by_question = {line_row(program)["question"]: program for program in split_programs(STEPS, "train")}
        found, wrong = 0, 0
        for conversation in spoken:
            program = by_question[str(conversation[1]["content"])]
            theirs = str(conversation[3]["content"]).split("\n")[1]
            steps = TASK.steps(TaskItem("", line_row(program)["question"], program.line), theirs)
            assert steps is not None
            if all(step.holds for step in steps):
                continue
            wrong += 1
            name = TASK.named_step(str(conversation[-1]["content"]))
            found += not next(step.holds for step in steps if step.name == name)
        assert wrong > 300 and 0.85 < found / wrong < 1.0

    def test_the_same_keys_give_the_same_file_of_training_programs(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            keys = ["rows=code_debate", "count=300", f"out={tmp_path / name}"]
            warm_up_rows.main(parse(warm_up_rows.CLIConfig, keys))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        train, test = ({row["question"] for row in rows} for rows in line_rows())
        rows = map(json.loads, (tmp_path / "a").read_text().splitlines())
        asked = {row["messages"][1]["content"] for row in rows}
        assert asked <= train and asked.isdisjoint(test)

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            (["rows=lines"], "rows='lines' is unknown"),
            (["rows=code_lines", "config.max_terms=2"], "config is only for reasoning_gym:NAME"),
        ],
    )
    def test_mistakes(self, keys: list[str], message: str) -> None:
        with pytest.raises((ConfigurationError, SystemExit), match=message):
            parse(warm_up_rows.CLIConfig, [*keys, "out=x"])
