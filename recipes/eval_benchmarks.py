"""Benchmarks of finished weights: several tries per question, pass@k, every trajectory on disk.

    python -m recipes.eval_benchmarks                                   # the shipped tiny model on the shipped tasks
    python -m recipes.eval_benchmarks log_path=<run> benchmarks=qa/arithmetic num_samples=8 pass_at=1,4,8
    python -m recipes.eval_benchmarks model_path=tinker://<run>/sampler_weights/final benchmarks=qa/my_questions.jsonl

A benchmark is task/dataset; summaries have no right answer, so set a criterion: success_metric=reward
success_threshold=0.4. The same command with the same save_dir resumes with the missing items.
"""

import chz
from rich.console import Console
from rich.table import Table

from recipes.policy import PolicyCLIConfig, open_policy, reply_tokens
from recipes.results import ResultKeys
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.lm_grader import GraderConfig
from tinker_cookbook.eval.benchmarks import (
    BenchmarkConfig,
    BenchmarkKeys,
    check_config,
    run_benchmarks,
    task_benchmark,
    task_items,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import ItemLimit
from tinker_cookbook.utils.fields import docs, fill

RECIPE = "eval_benchmarks"


@chz.chz(typecheck=True)
class CLIConfig(ItemLimit, PolicyCLIConfig, BenchmarkKeys, ResultKeys, num_samples=4, pass_at=(1, 4), seed=0):
    """Keys of `python -m recipes.eval_benchmarks`."""

    DOCS = docs(max_items="questions per benchmark")

    benchmarks: tuple[str, ...] = chz.field(
        default=("qa/arithmetic", "qa/test"), doc="task/dataset, separated by commas; a dataset may be a file"
    )
    grader: GraderConfig = chz.field(
        default_factory=GraderConfig,
        doc="an endpoint whose grades are the rewards; with success_metric=reward they decide what is solved",
    )


async def main(cli: CLIConfig) -> None:
    check_config(_config(cli, ""))
    cli.grader.open("grader")
    for spec in cli.benchmarks:
        task_items(spec)  # checked before anything loads
    policy = await open_policy(cli)
    config = _config(cli, policy.base_model)
    room = None if policy.context_length is None else policy.context_length - config.max_tokens
    if room is not None and room < 1:
        raise ConfigurationError(
            f"max_tokens={config.max_tokens} leaves no room for a question in the context of {policy.context_length}; lower it"
        )
    benchmarks = [
        task_benchmark(
            spec, policy.renderer, cli.num_samples, max_items=cli.max_items, max_prompt_tokens=room, grader=cli.grader
        )
        for spec in cli.benchmarks
    ]
    save_dir = str(cli.folder(RECIPE))
    tokenizer = policy.renderer.tokenizer
    results = await run_benchmarks(benchmarks, policy.sampling_client, tokenizer, save_dir, config, policy.name)
    table = Table(title=policy.name, title_justify="left")
    keys = [f"pass@{k}" for k in cli.pass_at]
    for header in ("benchmark", *keys, "reward", "items", "tries"):
        table.add_column(header, justify="left" if header == "benchmark" else "right")
    for result in results:
        metrics = result.metrics
        passed = [f"{metrics[key]:.3f} ± {metrics.get(f'{key}/stderr', 0.0):.3f}" for key in keys]
        counts = [f"{metrics[key]:.0f}" for key in ("num_items", "num_tries")]
        table.add_row(result.name, *passed, f"{metrics['reward']:.3f}", *counts)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"Files: {save_dir}", highlight=False)


def _config(cli: CLIConfig, base_model: str) -> BenchmarkConfig:
    return fill(BenchmarkConfig, cli, max_tokens=reply_tokens(cli, base_model))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
