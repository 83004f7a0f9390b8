"""The smallest reinforcement learning run: sums with a checkable answer, GRPO, reward goes up.

This file has everything that a custom environment needs: a ProblemEnv (question, check), the function that draws a
group of attempts, and the config of the training loop.

    python -m recipes.rl_basic
    python -m recipes.rl_basic model_name=Qwen/Qwen3-4B-Instruct-2507 group_size=16 env.max_number=999
"""

import operator
import random
from functools import partial

import chz

from recipes.common import GroupKeys, for_model
from recipes.rl_common import RLConfig, dataset_of, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.dataset import DatasetSettings, Environment, Groups, Place
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "rl_basic"
OPERATIONS = {"+": operator.add, "-": operator.sub}


class ArithmeticEnv(ProblemEnv):
    """One sum or difference, answered between <SOLUTION> tags."""

    def __init__(self, a: int, sign: str, b: int, renderer: Renderer):
        system: Message = {"role": "system", "content": QA_SYSTEM}
        super().__init__(renderer, convo_prefix=[system])
        self.question, self.answer = f"What is {a} {sign} {b}?", str(OPERATIONS[sign](a, b))

    def get_question(self) -> str:
        return self.question

    def check_answer(self, sample_str: str) -> bool:
        return parse_solution(sample_str) == self.answer

    def check_format(self, sample_str: str) -> bool:
        return parse_solution(sample_str) is not None

    def get_reference_answer(self) -> str:
        return self.answer


@chz.chz(typecheck=True)
class Arithmetic(Environment):
    """Random sums. A group depends only on its seed, so a run resumes without replaying anything."""

    max_number: int = chz.field(default=20, doc="largest operand", validator=chz.validators.gt(0))

    def shared_system_prompt(self, settings: DatasetSettings) -> str:
        return QA_SYSTEM

    async def groups(self, settings: DatasetSettings) -> Groups:
        renderer = settings.renderer()

        def make(number: int, attempts: int, place: Place) -> ProblemGroupBuilder:
            rng = random.Random(place.seed)
            sign = rng.choice(list(OPERATIONS))
            a, b = (rng.randint(0, self.max_number) for _ in range(2))
            if sign == "-":
                a, b = max(a, b), min(a, b)
            return ProblemGroupBuilder(partial(ArithmeticEnv, a, sign, b, renderer), attempts, "arithmetic")

        return Groups(make)


@chz.chz(typecheck=True)
class CLIConfig(GroupKeys, RLConfig, groups_per_batch=16):
    """Keys of `python -m recipes.rl_basic`."""

    env: Arithmetic = chz.field(default_factory=Arithmetic, doc="the sums")


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    dataset_builder = dataset_of(cli, cli.env)
    return train_config(cli, RECIPE, dataset_builder, [f"{cli.groups_per_batch}x{cli.group_size}"])


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["reward/total", "correct"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
