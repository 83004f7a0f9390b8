"""Debate on programs: a critic names an input, the judge runs that one, and the controls differ in who names it."""

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes import debate_runs, debate_study
from tests.debate.arena import decode, make_renderer, speech
from tests.fakes import ScriptedCompleter
from tests.sandbox.running import usable
from tests.waiting import HANG_SECONDS
from tinker_cookbook import cli_utils
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import KeyJudge
from tinker_cookbook.debate.oversight import OversightProtocol
from tinker_cookbook.debate.protocols import OVERSIGHT, ProtocolName
from tinker_cookbook.env.shipped.code import grading
from tinker_cookbook.env.shipped.code.problems import CodeProblem, CodeTest, load_problems
from tinker_cookbook.env.shipped.questions import code
from tinker_cookbook.env.shipped.questions.code import CodeTask, problem_row, problem_rows
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")
PROBLEM = CodeProblem("double", "Return twice a number.", tuple(CodeTest([n], 2 * n) for n in (0, 1, 2, 3)), "double")
ROW = problem_row(PROBLEM)
ITEM = TaskItem(ROW["id"], ROW["question"], ROW["reference"])
RIGHT = "<SOLUTION>def double(n): return n + n</SOLUTION>"
WRONG = "<SOLUTION>\n```python\ndef double(n):\n    return n * n\n```\n</SOLUTION>"
"""Right for 0 and 2, wrong for 1 (input a) and 3 (input c)."""


@pytest.fixture
def task() -> CodeTask:
    usable()
    made = get_task("code")
    assert isinstance(made, CodeTask)
    return made


def play(
    task: CodeTask, name: ProtocolName, members: Sequence[Sequence[str]]
) -> tuple[TrajectoryGroup, ScriptedCompleter]:
    protocol = OversightProtocol.make(name, task, RENDERER, KeyJudge())
    builder = DebateGroupBuilder(protocol, ITEM, len(members) // protocol.config.num_speakers, (0, 0))
    turns: dict[int, Sequence[TokensWithLogprobs]] = {
        i: [speech(RENDERER, text) for text in member] for i, member in enumerate(members)
    }
    policy = ScriptedCompleter(turns)

    async def bounded() -> TrajectoryGroup:
        async with asyncio.timeout(HANG_SECONDS):
            return await do_group_rollout(pickle.loads(pickle.dumps(builder)), policy)

    return asyncio.run(bounded()), policy


def rewards(group: TrajectoryGroup) -> list[list[float]]:
    return [[transition.reward for transition in trajectory.transitions] for trajectory in group.trajectories_G]


class TestQuestion:
    def test_inputs_are_named_and_their_outputs_are_not_told(self) -> None:
        assert ITEM.question.endswith("double(0) returns 0\n\nInputs that may be checked:\na: [1]\nb: [2]\nc: [3]")

    def test_all_shipped_problems_are_items(self, task: CodeTask) -> None:
        train, test = load_items(task, task.default_dataset)
        assert (len(train), len(test)) == tuple(map(len, load_problems("problems"))) == tuple(map(len, problem_rows()))
        steps = task.steps(train[0], RIGHT)
        assert steps is not None and [step.name for step in steps] == list("abcdefghi")


class TestWhoNamesTheInput:
    def test_debate_the_critic_wins_with_an_input_that_fails(self, task: CodeTask) -> None:
        group, policy = play(task, "debate", [[RIGHT, "Input c is wrong."], [WRONG, "input b is wrong."]])
        assert rewards(group) == [[1.0, 1.0], [0.0, 0.0]]
        assert "return n * n" in decode(RENDERER, policy.heard[0][1])
        assert group.metrics_G[0]["debate/pair_accuracy"] == 1.0

    def test_debate_a_critic_who_names_an_input_that_passes_loses(self, task: CodeTask) -> None:
        group, _ = play(task, "debate", [[RIGHT, "input b is wrong."], [WRONG, "input a is wrong."]])
        assert rewards(group)[1][0] == 1.0, (
            "the wrong program is accepted: the judge ran the one input where it is right"
        )
        assert rewards(group)[0] == [1.0, 0.0]

    def test_debate_an_input_that_there_is_not(self, task: CodeTask) -> None:
        group, _ = play(task, "debate", [[RIGHT, "input z is wrong."], [WRONG, "it is all wrong"]])
        assert rewards(group) == [[1.0, 0.0], [1.0, 0.0]]

    def test_consultancy_the_author_names_it(self, task: CodeTask) -> None:
        group, _ = play(task, "consultancy", [[WRONG, "input b is right."], [WRONG, "input a is right."]])
        assert rewards(group) == [[1.0, 1.0], [0.0, 0.0]]

    def test_direct_a_random_one(self, task: CodeTask) -> None:
        group, _ = play(task, "direct", [[WRONG]] * 12 + [[RIGHT]] * 2)
        accepted = [reward for (reward,) in rewards(group)]
        assert set(accepted[:12]) == {0.0, 1.0} and accepted[12:] == [1.0, 1.0]

    def test_self_consistency_and_truth_ask_no_judge(self, task: CodeTask) -> None:
        group, _ = play(task, "self_consistency", [[WRONG], [WRONG], [RIGHT]])
        assert rewards(group) == [[1.0], [1.0], [0.0]]
        group, _ = play(task, "truth", [[WRONG], ["no program"], [RIGHT]])
        assert rewards(group) == [[0.0], [0.0], [1.0]]
        assert [metrics["debate/accepted"] for metrics in group.metrics_G] == [0.0, 0.0, 1.0]

    def test_an_answer_without_a_program_is_rejected(self, task: CodeTask) -> None:
        group, _ = play(task, "debate", [["double it", "input a is wrong."], [RIGHT, "input a is wrong."]])
        assert rewards(group) == [[0.0, 0.0], [1.0, 1.0]]


class TestJudge:
    def test_it_runs_the_one_input_alone(self, task: CodeTask, monkeypatch: pytest.MonkeyPatch) -> None:
        run: list[list[object]] = []
        real = grading.grade

        async def counted(problem, program, sandbox, limits, tests=None):
            run.append([test.input for test in tests or problem.tests])
            return await real(problem, program, sandbox, limits, tests)

        monkeypatch.setattr(code, "grade", counted)
        steps = task.steps(ITEM, WRONG)
        assert steps is not None and run == []
        checked = asyncio.run(task.check_step(ITEM, WRONG, steps[2]))
        assert run == [[[3]]] and not checked.holds
        assert checked.claim == "the output for [3] is right (run: the output is 9, and should be 6)"
        assert asyncio.run(task.check_step(ITEM, WRONG, steps[1])).holds

    def test_errors_are_part_of_what_it_sees(self, task: CodeTask) -> None:
        text = "<SOLUTION>def double(n): return n / 0</SOLUTION>"
        steps = task.steps(ITEM, text)
        assert steps is not None
        assert "ZeroDivisionError" in asyncio.run(task.check_step(ITEM, text, steps[0])).claim

    def test_truth_is_every_test(self, task: CodeTask) -> None:
        score = asyncio.run(task.score(ITEM, WRONG))
        assert (score.reward, score.correct) == (1 / 3, False)
        assert asyncio.run(task.score(ITEM, RIGHT)).correct


class TestStudy:
    @pytest.mark.parametrize("protocol", OVERSIGHT)
    def test_every_control_is_a_dataset_of_the_study(self, protocol: ProtocolName, task: CodeTask) -> None:
        cli = cli_utils.parse(debate_study.CLIConfig, ["task=code", "num_test=2"])
        builder = debate_runs.dataset_builder(cli, protocol, 0, 2, 1)
        builder.check()
        train, _ = asyncio.run(builder())
        assert len(train.get_batch(0)) == 2

    def test_a_missing_sandbox_is_told_before_a_model_loads(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(CodeTask, "sandbox", "sandbox_fusion")
        with pytest.raises(ConfigurationError, match="does not answer"):
            get_task("code")

    def test_another_reward(self) -> None:
        with pytest.raises(ConfigurationError, match="task=code is rewarded by its tests; leave it out"):
            get_task("code", "rouge")
