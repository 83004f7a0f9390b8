"""Command lines of the earlier debate scripts, such as `--mode debate -n 256 --mock-judge`: a table from flags to keys.

The programs in `scripts/` use it under their old names. `recipes.debate_rs_grpo` and `recipes.single_turn` accept
these flags too; other recipes print the line to type (`tinker_cookbook.cli_help`, which has the table).
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tinker_cookbook.cli_help import FLAGS, UnknownFlagError, flags_to_keys

RECIPES = {"debate": "recipes.debate_rs_grpo", "single_turn": "recipes.single_turn"}
"""--mode -> the command to run"""

LOGPROB_FLAGS = {
    "--model": "model={}",
    "--prompt": "prompt={}",
    "--max-tokens": "max_tokens={}",
    "--num-samples": "num_samples={}",
    "--temperature": "temperatures={}",
    "--top-k": "top_k={}",
    "--top-p": "top_p={}",
    "--min-p": "min_p={}",
    "--seed": "seed={}",
    "--tolerance": "tolerance={}",
}
"""Flag of scripts/check_local_sampling_logprobs.py -> key of tinker_local_backend.check_logprobs."""

_LOG_ROOT = "TINKER_DEBATE_LOG_ROOT"


def recipe_and_keys(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe's module and keys for the flags of scripts/train.py. Raises UnknownFlagError."""
    keys = flags_to_keys(arguments, FLAGS)
    modes = [key.partition("=")[2] for key in keys if key.startswith("mode=")]
    if not modes or modes[-1] not in RECIPES:
        given = f"--mode {modes[-1]}" if modes else "no --mode"
        raise UnknownFlagError(f"{given}: give --mode {' or --mode '.join(RECIPES)}")
    return RECIPES[modes[-1]], [key for key in keys if not key.startswith("mode=")]


def _habits(module: str, keys: Sequence[str]) -> list[str]:
    """Defaults of scripts/train.py: write every group, and train equally on every reply to a question."""
    names = {key.partition("=")[0] for key in keys}
    habits = [] if "num_groups_to_log" in names else ["num_groups_to_log=-1"]
    has_questions = "task=qa" in keys or "task" not in names
    chosen = names & {"preset", "accept_min_reward"} or any(name.startswith("advantage") for name in names)
    if module == RECIPES["single_turn"] and has_questions and not chosen:
        habits.append("advantage.baseline=constant")
    return habits


def run(module: str, keys: Sequence[str]) -> None:
    """Print the equivalent command, and run it."""
    print(f"Runs: python -m {shlex.join([module, *keys])}", flush=True)
    sys.argv = [module, *keys]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_train() -> None:
    """scripts/train.py: a recipe; its runs are in `logs/` unless TINKER_DEBATE_LOG_ROOT or log_path is set."""
    try:
        module, keys = recipe_and_keys(sys.argv[1:])
    except UnknownFlagError as error:
        _refuse(error)
    os.environ.setdefault(_LOG_ROOT, "logs")
    run(module, [*keys, *_habits(module, keys)])


def run_check_logprobs() -> None:
    """scripts/check_local_sampling_logprobs.py."""
    try:
        keys = flags_to_keys(sys.argv[1:], LOGPROB_FLAGS)
    except UnknownFlagError as error:
        _refuse(error)
    run("tinker_local_backend.check_logprobs", keys)


def read_by(mode: str) -> Callable[[list[str]], list[str]]:
    """For `run_recipe`: the arguments for the recipe of this mode, with flags of scripts/train.py translated to keys."""

    def prepare(arguments: list[str]) -> list[str]:
        if not any(argument.partition("=")[0] in FLAGS for argument in arguments):
            return arguments
        try:
            module, keys = recipe_and_keys(["--mode", mode, *arguments])
        except UnknownFlagError as error:
            _refuse(error)
        line = f"python -m {shlex.join([module, *keys])}"
        if module != RECIPES[mode]:
            _refuse(f"{RECIPES[mode]} has --mode {mode}; run {line}")
        print(f"Runs: {line}", flush=True)
        return keys

    return prepare


def _refuse(error: object) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)
