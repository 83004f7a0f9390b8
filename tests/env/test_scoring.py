"""What the functions of a rubric are given, messages or text, and what is said of one that fails."""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.debate.arena import TINY, make_renderer, reply_ids
from tests.fakes import ScriptedCompleter, said
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env import Rubric, get_env
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, RewardError
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")
ROWS = [{"question": "What is 2 + 1?", "answer": "3", "task": "sums"}]
SHOTS = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
ASKED = {"role": "user", "content": "What is 2 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def play(*functions: Callable[..., Any], replies: tuple[str, ...] = ("3", "four"), **parts: Any) -> TrajectoryGroup:
    found = SimpleNamespace(**{"dataset": ROWS, "rubric": Rubric(functions), **parts})
    training, _ = asyncio.run(get_env(found).dataset_builder(TINY, group_size=len(replies))())
    policy = ScriptedCompleter({i: [said(reply_ids(RENDERER, text))] for i, text in enumerate(replies)})
    return asyncio.run(do_group_rollout(training.get_batch(0)[0], policy))


def test_a_function_is_given_lists_of_messages() -> None:
    seen: list[Any] = []

    def right(prompt, completion, answer, task, **kwargs):
        seen.append((prompt, completion, task, sorted(kwargs)))
        return float(completion[-1]["content"] == answer) if completion[-1]["role"] == "assistant" else -1

    group = play(right, system_prompt="Be brief.", few_shot=SHOTS)
    assert group.get_total_rewards() == [1.0, 0.0]
    assert seen[0] == (
        [SYSTEM, *SHOTS, ASKED],
        [{"role": "assistant", "content": "3"}],
        "sums",
        ["info", "state"],
    )
    shown = str(RENDERER.tokenizer.decode(group.trajectories_G[0].transitions[0].ob.to_ints()))
    assert shown.index("Be brief.") < shown.index("What is 1 + 1?") < shown.index("What is 2 + 1?")


def test_a_parameter_that_is_annotated_as_text_is_given_text() -> None:
    def right(prompt: str, completion: str) -> float:
        return float((prompt, completion) == ("What is 2 + 1?", "3"))

    def mixed(prompt: "list[Mapping[str, str]]", completion: "str") -> float:
        return 10.0 * (prompt[-1]["content"] == "What is 2 + 1?" and completion == "3")

    class Counted:
        def __call__(self, completion: str) -> float:
            return 100.0 * len(completion)

    def scaled(completion: str, by: float = 0.0) -> float:
        return by * len(completion)

    scaled_1000: Any = partial(scaled, by=1000.0)
    group = play(right, mixed, Counted(), scaled_1000, system_prompt="Be brief.")
    assert group.get_total_rewards() == [1111.0, 4400.0]


Text = str


def by_alias(completion: "Text") -> float:
    return float(completion == "3")


def test_an_annotation_may_be_another_name_of_text() -> None:
    assert play(by_alias).get_total_rewards() == [1.0, 0.0]


def test_a_function_of_the_group_too() -> None:
    def texts(completions: list[str], prompts: list[str], tasks) -> list[float]:
        return [len(text) + float(prompt == "What is 2 + 1?" and task == "sums") for text, prompt, task in
                zip(completions, prompts, tasks, strict=True)]  # fmt: skip

    def messages(completions, **kwargs):
        assert sorted(kwargs) == ["answers", "infos", "prompts", "states", "tasks"]
        return [100.0 * len(completion[-1]["content"]) for completion in completions]

    assert play(texts, messages).get_total_rewards() == [102.0, 405.0]


def test_what_a_function_does_to_its_messages_no_other_sees() -> None:
    def spoils(prompt, completion):
        prompt.clear()
        completion[-1]["content"] = "spoilt"
        return 0.0

    def reads(prompt, completion):
        return float(len(prompt) == 1 and completion[-1]["content"] == "3")

    assert play(spoils, reads).get_total_rewards() == [1.0, 0.0]


def compares(completion, answer):
    return float(completion == answer)


def differs(completion, answer):
    return float(completion != answer)


def looks_in(completion, answer):
    return float(answer in completion)


@pytest.mark.parametrize(("function", "operator"), [(compares, "=="), (differs, "!="), (looks_in, "in")])
def test_messages_are_never_read_as_a_text_in_silence(function: Any, operator: str) -> None:
    with pytest.raises(RewardError, match=f"a text {operator} a list of messages .* annotate the parameter as `str`"):
        play(function)


def test_messages_are_a_list_otherwise() -> None:
    def function(completion):
        same = [{"role": "assistant", "content": "3"}]
        return float(completion == same and same[0] in completion) + 0.5 * (completion != same)

    assert play(function).get_total_rewards() == [1.0, 0.5]


def strips(completion, answer, info):
    return float(completion.strip() == answer)


def test_a_failing_function_is_told_in_one_line_with_what_it_was_given() -> None:
    with pytest.raises(RewardError) as raised:
        play(strips, replies=("3" * 500,))
    line = str(raised.value)
    place = strips.__code__.co_firstlineno + 1
    assert re.match(
        r"rubric function strips of .*SimpleNamespace.* failed: AttributeError: .*strip.* "
        rf"\(test_scoring.py, line {place}\); it was given completion: list of 1 \(message\) \[.*33\.\.\.33.*, "
        r"answer: str '3', info: dict \{",
        line,
    ), line
    assert "\n" not in line and len(line) < 700
    assert isinstance(raised.value.__cause__, AttributeError)


async def fails_at_step(self, text):
    raise KeyError("moss")


def test_a_failing_step_too() -> None:
    kind = type("Game", (), {"initial_observation": lambda self: "Go.", "step": fails_at_step})
    training, _ = asyncio.run(get_env(kind).dataset_builder(TINY, group_size=1)())
    policy = ScriptedCompleter({0: [said(reply_ids(RENDERER, "fern"))]})
    with pytest.raises(
        RewardError, match=r"step of Game failed: KeyError: 'moss' .*; it was given action_text: str 'fern'"
    ):
        asyncio.run(do_group_rollout(training.get_batch(0)[0], policy))


def test_an_error_that_says_itself_what_is_wrong_stays_as_it_is() -> None:
    def refuses(completion):
        raise ConfigurationError("grader=None: give one")

    with pytest.raises(ConfigurationError) as raised:
        play(refuses)
    assert str(raised.value) == "grader=None: give one"


def test_the_command_ends_with_that_line_and_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_recipe(AdvantageConfig, lambda config: play(strips), argv=[], prog="run")
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and len(error.splitlines()) <= 4, error
    assert "rubric function strips" in error


class Stepped:
    dataset = ROWS
    system_prompt = "Be brief."

    def __init__(self) -> None:
        self.steps = 0

    async def step(self, action, info):
        self.steps += 1
        return {"reward": float(action == info["sample"]["answer"]) * self.steps, "metrics": {"steps": self.steps}}


def test_rows_may_be_scored_by_step_and_an_observation_by_a_rubric() -> None:
    def replies_of(env: Any) -> TrajectoryGroup:
        training, _ = asyncio.run(get_env(lambda: env).dataset_builder(TINY, group_size=2)())
        policy = ScriptedCompleter({i: [said(reply_ids(RENDERER, text))] for i, text in enumerate(("3", "four"))})
        return asyncio.run(do_group_rollout(training.get_batch(0)[0], policy))

    group = replies_of(Stepped())
    assert group.get_total_rewards() == [1.0, 0.0]  # each reply meets the object as it was loaded
    assert group.trajectories_G[0].transitions[0].metrics["reward/step/steps"] == 1.0
    seen = str(RENDERER.tokenizer.decode(group.trajectories_G[0].transitions[0].ob.to_ints()))
    assert "Be brief." in seen and "What is 2 + 1?" in seen

    def length(prompt: str, completion: str) -> float:
        return len(completion) + 10.0 * (prompt == "Go.")

    asked = SimpleNamespace(initial_observation=lambda: "Go.", rubric=Rubric([length]))
    assert replies_of(asked).get_total_rewards() == [11.0, 14.0]

    goes_on = type("On", (), {"dataset": ROWS, "step": lambda self, text: {"reward": 1, "next_observation": "More."}})
    with pytest.raises(
        DataValidationError, match="step continues after a reply to a row of dataset, which is a single turn"
    ):
        replies_of(goes_on())


def test_few_shot_is_messages() -> None:
    with pytest.raises(ConfigurationError, match=r"few_shot is \[3\]; it is a list of messages"):
        play(compares, few_shot=[3])


def test_the_metrics_of_group_functions_are_those_of_each_member() -> None:
    """Also where several functions and those of one reply have some."""

    def shortest(completions: list[str]) -> list[Any]:
        return [(float(len(text) == 1), {"characters": len(text)}) for text in completions]

    def places(completions):
        return list(range(len(completions)))

    def right(completion: str, answer: str) -> float:
        return float(completion == answer)

    def is_number(completion: str) -> tuple[float, dict[str, float]]:
        return float(completion.isdigit()), {"digits": sum(map(str.isdigit, completion))}

    rubric = Rubric([shortest, is_number, right, places], [2.0, 0.0, 10.0, 0.5])
    group = play(rubric=rubric, replies=("3", "four", "5"))
    assert group.get_total_rewards() == [12.0, 0.5, 3.0]
    names = (
        "reward/shortest",
        "reward/shortest/characters",
        "reward/places",
        "reward/is_number/digits",
        "reward/right",
    )
    found = []
    for trajectory, of_group in zip(group.trajectories_G, group.metrics_G, strict=True):
        metrics = {**trajectory.transitions[-1].metrics, **of_group}
        found.append([metrics[name] for name in names])
    assert found == [[1.0, 1.0, 0.0, 1.0, 1.0], [0.0, 4.0, 1.0, 0.0, 0.0], [1.0, 1.0, 2.0, 1.0, 0.0]]


def test_a_rubric_s_own_objects_are_given_by_name() -> None:
    class Parser:
        def read(self, text: str) -> str:
            return text.strip("!")

    parser = Parser()

    def right(completion: str, answer, parser):
        return float(parser.read(completion) == answer)

    def anything(**kwargs):
        return 10.0 * (kwargs["parser"] is parser and sorted(kwargs)[:2] == ["answer", "completion"])

    def shortest(completions: list[str], parser):
        lengths = [len(parser.read(text)) for text in completions]
        return [100.0 * (length == min(lengths)) for length in lengths]

    def plain(completion: str) -> float:
        return 1000.0 * len(completion)

    objects = {"parser": parser, "unused": object()}
    rubric = {"funcs": [right, anything, shortest, plain], "class_objects": objects}
    assert play(rubric=rubric, replies=("3!", "four")).get_total_rewards() == [2111.0, 4010.0]
    with pytest.raises(
        ConfigurationError, match=r"takes reader, which is not available; .*, info, parser, unused, or, for a"
    ):
        play(rubric={"funcs": [lambda reader: 1.0], "class_objects": objects})


@pytest.mark.parametrize("returned", [[1.0], "12", 1.0, [1.0, float("nan")], [1.0, "x"]])
def test_a_group_function_gives_one_number_for_each_member(returned: Any) -> None:
    def shares(completions):
        return returned

    with pytest.raises(DataValidationError, match="rubric function shares"):
        play(shares)
