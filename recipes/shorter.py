"""Reinforcement learning from comparisons at its smallest: of two replies to a prompt the shorter one wins. Replies shrink.

The preference model is three lines of Python, so nothing has to be trained first. The recipe shows how comparisons
become rewards, and how a policy reacts to a preference that ignores the content.

    python -m recipes.shorter
    python -m recipes.shorter model_name=Qwen/Qwen3-4B-Instruct-2507 group_size=16 max_steps=40
"""

import chz

from recipes.common import GroupKeys, for_model
from recipes.rl_common import RLConfig, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.rows import BadRows
from tinker_cookbook.preference.envs import PairwisePreferenceRLDatasetBuilder
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder, ComparisonRow, Rows
from tinker_cookbook.preference.types import Comparison, LabeledComparison, PreferenceModel, PreferenceModelBuilder
from tinker_cookbook.renderers import Message, get_text_content
from tinker_cookbook.rl import train
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "shorter"
PROMPTS = (
    "Who are you?",
    "What can you do?",
    "Hello!",
    "Good morning.",
    "Hello, how are you?",
    "Tell me about rain.",
    "What is a library?",
    "What does a baker do?",
    "Write a sentence about a lamp.",
    "When should I water the violet?",
    "My fern has small flies.",
    "Why is the sky blue?",
)
HELD_OUT = ("Hi.", "What is snow made of?", "What does a teacher do?", "There are bugs on my ivy. What now?")


class ShorterPreferenceModel(PreferenceModel):
    """The reply with fewer characters is better."""

    async def __call__(self, comparison: Comparison) -> float:
        a, b = (
            sum(len(get_text_content(message)) for message in completion)
            for completion in (comparison.completion_A, comparison.completion_B)
        )
        return float((b < a) - (a < b))


@chz.chz(typecheck=True)
class ShorterPreferenceModelBuilder(PreferenceModelBuilder):
    """Makes the preference model."""

    async def __call__(self) -> ShorterPreferenceModel:
        return ShorterPreferenceModel()


@chz.chz(typecheck=True)
class PromptsBuilder(ComparisonDatasetBuilder):
    """The prompts of this file. They have no replies yet, so there is nothing to compare."""

    num_test: int = chz.field(doc="most held-out prompts")

    def read(self, bad: BadRows) -> tuple[Rows, Rows]:
        return [_row(prompt) for prompt in PROMPTS], [_row(prompt) for prompt in HELD_OUT[: self.num_test]]


def _row(prompt: str) -> ComparisonRow:
    message: Message = {"role": "user", "content": prompt}
    return ComparisonRow(prompt, LabeledComparison(Comparison([message], [], []), "Tie"))


@chz.chz(typecheck=True)
class CLIConfig(GroupKeys, RLConfig):
    """Keys of `python -m recipes.shorter`. There are 12 prompts, so groups_per_batch is at most 12."""


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    dataset_builder = cli.fill(
        PairwisePreferenceRLDatasetBuilder,
        comparison_builder=PromptsBuilder(shuffle_seed=cli.seed, num_test=cli.num_test),
        preference_model_builder=ShorterPreferenceModelBuilder(),
        policy_model_name=cli.model_name,
        policy_renderer_name=cli.renderer_name,
        batch_size=cli.groups_per_batch,
        matchup_group_size=cli.group_size,
        num_batches=cli.max_steps,
    )
    return train_config(cli, RECIPE, dataset_builder, [f"{cli.groups_per_batch}x{cli.group_size}"])


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["ac_tokens_per_turn"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
