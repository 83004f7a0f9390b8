"""Reinforcement learning with tools: a calculator, or a search over local news articles.

The environment runs the calls in a reply, shows their results, and grades the answer, which has no call. The
calculator parses arithmetic and never runs code. The shipped model can neither write a call nor copy numbers into one.
A supervised stage teaches it both, from a player that often gives up, so that the model then calls for less than half
of the questions. Reinforcement learning makes it call for nearly all of them, and keep copying well (correct,
used_tools, faithful). The model computes nothing itself, and its prompt does not name the tool.

    python -m recipes.tool_use
    python -m recipes.tool_use env.task=search
    python -m recipes.tool_use model_name=Qwen/Qwen3-4B-Instruct-2507 env.largest=9999 group_size=16
    python -m recipes.tool_use play=True
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import chz

from recipes.common import for_model
from recipes.rl_common import dataset_of
from recipes.warm_up import GENTLE_RATES, GameConfig, demonstrate, play_or_train
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA, is_tiny
from tinker_cookbook.env.dataset import DatasetSettings, EnvMaker, Episodes, Groups
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.field_groups import TurnLimit
from tinker_cookbook.renderers import Message, Renderer, ToolCall, get_text_content
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.types import Metrics
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.supervised.conversations import shared_system_prompt
from tinker_cookbook.tool_use import AgentToolMessageEnv, ArticleSearch, ToolRegistry, calculate, tool
from tinker_cookbook.tool_use.agent_tool_message_env import tool_conversation
from tinker_cookbook.utils.files import read_jsonl

RECIPE = "tool_use"
SYSTEM = "Put only the final answer between <SOLUTION> and </SOLUTION>."
FORMAT_PENALTY = 0.1
NO_ANSWER = "?"
CALL_SHARE = 0.82
TINY_STEPS = 180
"""Supervised steps, after which the shipped model copies the numbers of nearly every question."""
ARTICLES = EXAMPLE_DATA / "summary" / "articles_train.jsonl"
ToolTask = Literal["calculator", "search"]

_GAP = re.compile(r"\b(?:[A-Z][a-z]+ [A-Z][a-z]+|\d[\d,]*)\b")
"""The words that a question removes from a summary: a full name or a number."""


@dataclass(frozen=True)
class Question:
    """A question, the right answer, and the tool arguments that return it."""

    text: str
    answer: str
    arguments: dict[str, str]


@cache
def registry(task: ToolTask) -> ToolRegistry:
    """The one tool of each task."""
    return ToolRegistry([ArticleSearch.from_jsonl(ARTICLES).tool() if task == "search" else tool(calculate)])


@cache
def article_questions() -> list[Question]:
    """Summaries with a name or number removed from the last sentence, in the order of the articles."""
    questions = []
    for row in read_jsonl(ARTICLES):
        start, _, end = row["highlights"].removesuffix(".").rpartition(". ")
        if start and (gap := _GAP.search(end)):
            text = f"Fill the gap: {start}. {end[: gap.start()]}___{end[gap.end() :]}."
            questions.append(Question(text, gap.group(), {"query": start}))
    return questions


def draw_question(task: ToolTask, largest: int, rng: random.Random) -> Question:
    if task == "search":
        return rng.choice(article_questions())
    a, b = (rng.randint(1, largest) for _ in range(2))
    expression = f"{a} {rng.choice('+-*')} {b}"
    return Question(f'What is "{expression}"?', calculate(expression), {"expression": expression})


@dataclass(frozen=True)
class AnswerGrader:
    """1 for the right answer between <SOLUTION> tags; an answer without tags costs FORMAT_PENALTY.

    `faithful` is only reported: whether a tool's result contains the answer.
    """

    answer: str

    async def __call__(self, messages: list[Message]) -> tuple[float, Metrics]:
        solution = parse_solution(get_text_content(messages[-1]))
        results = [get_text_content(message) for message in messages if message["role"] == "tool"]
        correct, tagged = solution == self.answer, solution is not None
        faithful = bool(solution) and any(solution in result for result in results)
        reward = 1.0 if correct else 0.0 if tagged else -FORMAT_PENALTY
        return reward, {"correct": float(correct), "format": float(tagged), "faithful": float(faithful)}


def make_tool_env(task: ToolTask, question: Question, declare: bool, renderer: Renderer) -> AgentToolMessageEnv:
    """`declare`: show the tool in the renderer's format and ask for the answer's form; otherwise only the question."""
    tools = registry(task)
    if declare:
        messages = tool_conversation(renderer, tools, SYSTEM, question.text)
    else:
        messages = [Message(role="user", content=question.text)]
    return AgentToolMessageEnv(tools, messages, None, AnswerGrader(question.answer), tool_errors="answer")


def half_hearted(task: ToolTask, question: Question, rng: random.Random, messages: list[Message]) -> Message:
    """A player that calls the tool for most questions and copies the result, and gives up on the others.

    Each conversation has the same weight in training, so a token of a short one weighs more: with CALL_SHARE calls,
    the shipped model learns to call for about a third of the questions, and to copy most of the results.
    """
    answer = question.answer if messages[-1]["role"] == "tool" else NO_ANSWER
    if messages[-1]["role"] == "user" and rng.random() < CALL_SHARE:
        name = registry(task).specs[0]["name"]
        call = ToolCall.FunctionBody(name=name, arguments=json.dumps(question.arguments))
        return {"role": "assistant", "content": "", "tool_calls": [ToolCall(function=call)]}
    return {"role": "assistant", "content": f"<SOLUTION>{answer}</SOLUTION>"}


@chz.chz(typecheck=True)
class ToolUse(TurnLimit, Episodes):
    """Sums, or summaries with a gap that an article fills."""

    task: ToolTask = chz.field(default="calculator", doc="calculator, or search (extra: search)")
    largest: int = chz.field(
        default=9, doc="largest operand of the calculator's questions", validator=chz.validators.gt(0)
    )
    declare_tools: bool | None = chz.field(
        default=None,
        doc="declare the tool's JSON schema in the renderer's format; default: yes, except for tiny models, where it is too long",
    )

    @chz.validate
    def _check_turns(self) -> None:
        chz.validators.gt(1)(self, "max_turns")  # a call and an answer

    def for_model(self, model_name: str) -> "ToolUse":
        """The environment with the model's default of `declare_tools`."""
        declares = not is_tiny(model_name) if self.declare_tools is None else self.declare_tools
        return chz.replace(self, declare_tools=declares)

    @property
    def dataset_name(self) -> str:
        return self.task

    def shared_system_prompt(self, settings: DatasetSettings) -> str | None:
        if not self.for_model(settings.model_name).declare_tools:
            return None
        return shared_system_prompt([tool_conversation(settings.renderer(), registry(self.task), SYSTEM, "")])

    def check(self, settings: DatasetSettings) -> None:
        """Raises RendererError for a renderer without tools."""
        tool_conversation(settings.renderer(), registry(self.task), SYSTEM, "")

    async def groups(self, settings: DatasetSettings) -> Groups:
        return await Episodes.groups(self.for_model(settings.model_name), settings)

    async def make_env_maker(self) -> EnvMaker:
        def make_env(renderer: Renderer, rng: random.Random) -> Callable[[], AgentToolMessageEnv]:
            question = draw_question(self.task, self.largest, rng)
            return partial(make_tool_env, self.task, question, bool(self.declare_tools), renderer)

        return make_env

    def env_options(self) -> dict[str, Any]:
        return {
            "context_overflow_reward": -1.0,
            "parse_error_policy": ParseErrorPolicy(max_consecutive=1, penalty_per_error=FORMAT_PENALTY),
            "rollout_limits": RolloutLimits(max_turns=self.max_turns),
        }


@chz.chz(typecheck=True)
class CLIConfig(GameConfig, rates=GENTLE_RATES, max_steps=16, num_test=32):
    """Keys of `python -m recipes.tool_use`."""

    env: ToolUse = chz.field(default_factory=ToolUse, doc="the questions and the tool")


async def main(cli: CLIConfig) -> RunSummary | None:
    cli = for_model(cli)
    env = cli.env.for_model(cli.model_name)

    async def half_hearted_episode(renderer: Renderer, rng: random.Random) -> list[Message]:
        question = draw_question(env.task, env.largest, rng)
        player = partial(half_hearted, env.task, question, rng)
        return await demonstrate(make_tool_env(env.task, question, bool(env.declare_tools), renderer), player)

    metrics = ["reward/total", "correct", "used_tools", "faithful", "format"]
    return await play_or_train(cli, RECIPE, dataset_of(cli, env), half_hearted_episode, metrics, [env.task], TINY_STEPS)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
