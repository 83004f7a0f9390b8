"""Reinforcement learning on a taskset of the package verifiers (0.4), unmodified, with all of its trainable roles.

    python -m recipes.verifiers_rl taskset=my_taskset.py
    python -m recipes.verifiers_rl taskset=gsm8k_v1 test_taskset.split=test model_name=Qwen/Qwen3-4B-Instruct-2507
    python -m recipes.verifiers_rl taskset=kuhn_poker verifiers.player0.max_turns=4

`taskset` is an installed taskset, a module or a file. taskset.key=value and verifiers.key=value set fields of
verifiers' configs of the taskset and of the env; for a role: verifiers.solver.max_turns=3. Needs the extra
`verifiers`: docs/verifiers.md.
"""

import logging
from collections.abc import Mapping
from typing import Any

import chz

from recipes.common import GroupKeys, for_model
from recipes.rl_common import RLConfig, dataset_of, train_and_show, train_config
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.env.verifiers.dataset import VerifiersEnvironment, VerifiersKeys
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.runs.outcome import RunSummary

ADVANTAGE = AdvantageConfig(baseline="role_mean")
RECIPE = "verifiers_rl"


@chz.chz(typecheck=True)
class CLIConfig(VerifiersKeys, GroupKeys, RLConfig, max_steps=12, num_test=32):
    """Keys of `python -m recipes.verifiers_rl`."""


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"solver/max_turns": 3} as {"solver": {"max_turns": 3}}."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split("/")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return nested


def make_dataset_builder(cli: CLIConfig) -> DatasetBuilder:
    """The taskset of resolved keys, checked. Raises ConfigurationError."""
    flat = {name: getattr(cli, name) for name in ("taskset_args", "test_taskset_args", "verifiers_args")}
    nested = {name: None if keys is None else _nested(keys) for name, keys in flat.items()}
    return dataset_of(cli, cli.fill(VerifiersEnvironment, **nested))


async def main(cli: CLIConfig) -> RunSummary:
    for name in ("verifiers", "aiohttp.access"):  # several lines for each rollout
        logging.getLogger(name).setLevel(logging.WARNING)
    cli = for_model(cli)
    size = f"{cli.groups_per_batch}x{cli.group_size}"
    name = cli.taskset.removesuffix(".py").replace(".", "/").rpartition("/")[2]
    config = train_config(cli, RECIPE, make_dataset_builder(cli), [name, size], advantage=ADVANTAGE)
    return await train_and_show(config, ["reward/total"])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
