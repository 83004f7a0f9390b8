"""Programs that pass tests: GRPO on the share of hidden tests that a program passes, run in a sandbox.

A failing program gets feedback (errors in full, of hidden tests the number that failed) and may be revised. Needs a sandbox
(docs/sandbox.md: bubblewrap by default) and a model that writes code; the shipped tiny models do not.

    python -m recipes.code_rl model_name=Qwen/Qwen3-4B-Instruct-2507 max_tokens=2048
    python -m recipes.code_rl model_name=Qwen/Qwen3-4B-Instruct-2507 dataset=deepcoder env.shown_tests=0 env.on_bad_row=skip
    python -m recipes.code_rl model_name=Qwen/Qwen3-4B-Instruct-2507 sandbox=docker env.max_turns=4

A line of a file is {"question": "...", "tests": [{"input": "...", "output": "..."}]}, for a program; with "function": "name",
inputs are lists of arguments. env.columns.question=NAME names another column.
"""

import chz

from recipes.common import GroupKeys, dataset_label, for_model
from recipes.rl_common import RLConfig, dataset_of, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.shipped.code.code_env import CodeProblems
from tinker_cookbook.env.shipped.code.problems import SHIPPED
from tinker_cookbook.rl import train
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "code_rl"


@chz.chz(typecheck=True)
class CLIConfig(GroupKeys, RLConfig, max_steps=20, num_test=12):
    """Keys of `python -m recipes.code_rl`."""

    env: CodeProblems = chz.field(default_factory=CodeProblems, doc="the problems, the sandbox and the rewards")


def build_config(cli: CLIConfig) -> train.Config:
    """The run's full config. Raises ConfigurationError for every problem that can be found before a model is loaded."""
    cli = for_model(cli)
    folder = [dataset_label(cli.env.dataset, SHIPPED), f"{cli.groups_per_batch}x{cli.group_size}"]
    return train_config(cli, RECIPE, dataset_of(cli, cli.env), folder)


async def main(cli: CLIConfig) -> RunSummary:
    return await train_and_show(build_config(cli), ["correct", "tests_passed", "format", "compile_error"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
