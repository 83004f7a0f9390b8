"""The smallest reinforcement learning run: sums with a checkable answer, GRPO, reward goes up.

This file has everything that a custom environment needs: a ProblemEnv (question, check), the function that draws a
group of attempts, and the config of the training loop.

    python -m recipes.rl_basic
    python -m recipes.rl_basic model_name=Qwen/Qwen3-4B-Instruct-2507 group_size=16 max_number=999
"""

import operator
import random
from functools import partial

import chz

from recipes.rl_common import RLConfig, dataset_of, for_model, train_and_show, train_config
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

    max_number: int = chz.field(doc="largest operand")

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
class CLIConfig(RLConfig):
    """Keys of `python -m recipes.rl_basic`."""

    groups_per_batch: int = chz.field(default=16, doc="problems per step", validator=chz.validators.gt(0))
    group_size: int = chz.field(default=8, doc="attempts per problem", validator=chz.validators.gt(1))
    max_number: int = chz.field(default=20, doc="largest operand", validator=chz.validators.gt(0))
    num_test: int = chz.field(default=100, doc="problems of an evaluation", validator=chz.validators.gt(0))


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    dataset_builder = dataset_of(cli, cli.fill(Arithmetic))
    return train_config(cli, RECIPE, dataset_builder, [f"{cli.groups_per_batch}x{cli.group_size}"])


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["reward/total", "correct"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
