"""The second task with steps: what a step is, what it claims, and what a debate about it comes to."""

import asyncio
import pickle

import pytest

from tests.debate.arena import make_renderer, speech
from tests.fakes import ScriptedCompleter
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import KeyJudge
from tinker_cookbook.debate.oversight import OversightProtocol
from tinker_cookbook.env.shipped.questions.sorting import SortingTask, trace
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.rl.rollouts import do_group_rollout

ITEM = TaskItem("i", "7 3 9 1", "1 3 7 9")
RIGHT = "1: 7\n2: 3 7\n3: 3 7 9\n4: 1 3 7 9\n<SOLUTION>1 3 7 9</SOLUTION>"
WRONG = "1: 7\n2: 7 3\n3: 3 7 9\n4: 1 3 7 9\n<SOLUTION>1 3 7 9</SOLUTION>"
TASK = SortingTask()


def test_the_right_answer_is_its_trace() -> None:
    assert trace([7, 3, 9, 1]) == RIGHT
    steps = TASK.steps(ITEM, RIGHT)
    assert steps is not None and all(step.holds for step in steps)
    assert [step.name for step in steps] == ["1", "2", "3", "4"]
    assert [step.claim for step in steps][:2] == ["7 put into nothing makes 7", "3 put into 7 makes 3 7"]


def test_a_step_is_judged_by_the_line_before_it() -> None:
    """The third line repairs what the second did: it sorts, and so both hold alone; dropping a number does not."""
    steps = TASK.steps(ITEM, WRONG)
    assert steps is not None and [step.holds for step in steps] == [True, False, True, True]
    steps = TASK.steps(ITEM, RIGHT.replace("3: 3 7 9", "3: 3 9"))
    assert steps is not None and [step.holds for step in steps] == [True, True, False, False]
    assert steps[3].claim == "1 put into 3 9 makes 1 3 7 9"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<SOLUTION>1 3 7 9</SOLUTION>",
        RIGHT.replace("2:", "3:"),
        RIGHT.replace("4: 1 3 7 9\n", ""),
        RIGHT.replace("<SOLUTION>1 3", "<SOLUTION>3 1"),
        RIGHT.removesuffix("</SOLUTION>"),
        RIGHT.replace("2: 3 7", "2: three 7"),
    ],
)
def test_what_has_not_the_form_has_no_steps(text: str) -> None:
    assert TASK.steps(ITEM, text) is None


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("step 2 is wrong", "2"),
        ("Step 02 is right.", "2"),
        ("I think step 2 is wrong", None),
        ("step two is wrong", None),
        ("step 2 was wrong", None),
    ],
)
def test_which_step_a_speech_names(said: str, named: str | None) -> None:
    assert TASK.named_step(said) == named


def test_a_debate_and_a_random_look() -> None:
    renderer = make_renderer("qwen3_instruct")

    def rewards(name: str, members: list[list[str]]) -> list[list[float]]:
        protocol = OversightProtocol.make(name, TASK, renderer, KeyJudge())
        builder = DebateGroupBuilder(protocol, ITEM, len(members) // protocol.config.num_speakers, (0, 0))
        policy = ScriptedCompleter({i: [speech(renderer, text) for text in one] for i, one in enumerate(members)})
        group = asyncio.run(do_group_rollout(pickle.loads(pickle.dumps(builder)), policy))
        return [[transition.reward for transition in trajectory.transitions] for trajectory in group.trajectories_G]

    assert rewards("debate", [[RIGHT, "step 2 is wrong"], [WRONG, "step 4 is wrong"]]) == [[1.0, 1.0], [0.0, 0.0]]
    assert rewards("direct_all", [[RIGHT], [WRONG]]) == [[1.0], [0.0]]
    assert rewards("truth", [[RIGHT], [WRONG]]) == [[1.0], [1.0]], "the end is right, whatever the way"
