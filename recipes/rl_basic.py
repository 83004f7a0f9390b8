"""The smallest reinforcement learning run: sums with a checkable answer, GRPO, reward goes up.

Everything an environment of one's own needs is in this file: a ProblemEnv (question, check), a dataset of groups, and
the config that the training loop takes.

    python -m recipes.rl_basic
    python -m recipes.rl_basic model_name=Qwen/Qwen3-4B-Instruct-2507 group_size=16 max_number=999
"""

import operator
import random
from collections.abc import Sequence
from functools import partial

import chz

from recipes.rl_common import RLConfig, for_model, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.tasks.qa import QA_SYSTEM
from tinker_cookbook.tasks.types import parse_solution
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.seeds import derive_seed

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


class ArithmeticDataset(RLDataset):
    """Problem i of batch n depends on the seed, n and i alone, so a run resumes without replaying anything."""

    def __init__(self, renderer: Renderer, groups: int, group_size: int, batches: int, max_number: int, seed: int):
        self.renderer, self.groups, self.group_size = renderer, groups, group_size
        self.batches, self.max_number, self.seed = batches, max_number, seed

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        return [self._group(random.Random(derive_seed(self.seed, index, i))) for i in range(self.groups)]

    def _group(self, rng: random.Random) -> ProblemGroupBuilder:
        sign = rng.choice(list(OPERATIONS))
        a, b = (rng.randint(0, self.max_number) for _ in range(2))
        if sign == "-":
            a, b = max(a, b), min(a, b)
        env = partial(ArithmeticEnv, a, sign, b, renderer=self.renderer)
        return ProblemGroupBuilder(env, self.group_size, dataset_name="arithmetic")

    def __len__(self) -> int:
        return self.batches


@chz.chz(typecheck=True)
class ArithmeticDatasetBuilder(RLDatasetBuilder):
    """Random sums, a training set and a small test set drawn with another seed."""

    model_name: str = chz.field(doc="whose tokenizer to use")
    renderer_name: str = chz.field(doc="how messages become tokens")
    groups_per_batch: int = chz.field(doc="problems per batch")
    group_size: int = chz.field(doc="attempts per problem")
    num_batches: int = chz.field(doc="training batches")
    max_number: int = chz.field(doc="largest operand")
    num_test: int = chz.field(doc="problems of an evaluation")
    seed: int = chz.field(doc="seed of the problems")

    @property
    def shared_system_prompt(self) -> str:
        return QA_SYSTEM

    async def __call__(self) -> tuple[ArithmeticDataset, ArithmeticDataset]:
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name), model_name=self.model_name)
        training = ArithmeticDataset(
            renderer, self.groups_per_batch, self.group_size, self.num_batches, self.max_number, self.seed
        )
        test_seed = derive_seed(self.seed, "test")
        return training, ArithmeticDataset(renderer, self.num_test, 1, 1, self.max_number, test_seed)


@chz.chz(typecheck=True)
class CLIConfig(RLConfig):
    """Keys of `python -m recipes.rl_basic`."""

    groups_per_batch: int = chz.field(default=16, doc="problems per step", validator=chz.validators.gt(0))
    group_size: int = chz.field(default=8, doc="attempts per problem", validator=chz.validators.gt(1))
    max_number: int = chz.field(default=20, doc="largest operand", validator=chz.validators.gt(0))
    num_test: int = chz.field(default=100, doc="problems of an evaluation", validator=chz.validators.gt(0))


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for whatever can be wrong before a model is loaded."""
    cli = for_model(cli)
    dataset_builder = cli.fill(ArithmeticDatasetBuilder, num_batches=cli.max_steps)
    return train_config(cli, RECIPE, dataset_builder, [f"{cli.groups_per_batch}x{cli.group_size}"])


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["reward/total", "correct"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
