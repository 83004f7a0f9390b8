"""Benchmarks of finished weights: several tries per question, pass@k, every trajectory on disk.

    python -m recipes.eval_benchmarks                                   # the shipped tiny model on the shipped tasks
    python -m recipes.eval_benchmarks log_path=<run> benchmarks=qa/arithmetic num_samples=8 pass_at=1,4,8
    python -m recipes.eval_benchmarks model_path=tinker://<run>/sampler_weights/final benchmarks=qa/my_questions.jsonl
    python -m recipes.eval_benchmarks model_name=Qwen/Qwen3-8B benchmarks=gsm8k,mmlu_pro max_items=200

A benchmark is a name such as gsm8k (docs/evaluation.md has them all), that name with a local file of the same columns
(gsm8k/my.jsonl), or task/dataset. mbpp runs programs of the model in `sandbox`. Summaries have no right answer, so set a
criterion: success_metric=reward success_threshold=0.4. The same command with the same save_dir resumes with the missing items.
"""

import chz
from rich.console import Console
from rich.table import Table

from recipes.policy import PolicyCLIConfig, open_policy, reply_tokens
from recipes.results import ResultKeys
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.lm_grader import GraderConfig
from tinker_cookbook.eval.benchmarks.builder import BenchmarkBuilder, QuestionBenchmark
from tinker_cookbook.eval.benchmarks.mbpp import MBPPBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.registry import REGISTRY, find_benchmark
from tinker_cookbook.eval.benchmarks.runner import (
    Benchmark,
    BenchmarkConfig,
    BenchmarkKeys,
    check_config,
    run_benchmarks,
    task_benchmark,
    task_items,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import ItemLimit
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.sandbox.backends import SandboxKeys
from tinker_cookbook.utils.fields import docs, fill

RECIPE = "eval_benchmarks"


@chz.chz(typecheck=True)
class CLIConfig(
    ItemLimit, PolicyCLIConfig, BenchmarkKeys, SandboxKeys, ResultKeys, num_samples=4, pass_at=(1, 4), seed=0
):
    """Keys of `python -m recipes.eval_benchmarks`."""

    DOCS = docs(max_items="questions per benchmark")

    benchmarks: tuple[str, ...] = chz.field(
        default=("qa/arithmetic", "qa/test"),
        doc=f"names ({', '.join(sorted(REGISTRY))}), names with a local file (gsm8k/my.jsonl), or task/dataset, separated by "
        "commas; a dataset may be a file",
    )
    grader: GraderConfig = chz.field(
        default_factory=GraderConfig,
        doc="an endpoint whose grades are the rewards; with success_metric=reward they decide which items are solved",
    )


async def main(cli: CLIConfig) -> None:
    check_config(_config(cli, ""))
    cli.grader.open("grader")
    named = {spec: _named(cli, spec) for spec in cli.benchmarks}
    policy = await open_policy(cli)
    config = _config(cli, policy.base_model)
    room = None if policy.context_length is None else policy.context_length - config.max_tokens
    if room is not None and room < 1:
        raise ConfigurationError(
            f"max_tokens={config.max_tokens} leaves no room for a question in the context of {policy.context_length}; lower it"
        )
    benchmarks = [_benchmark(cli, spec, named[spec], policy.renderer, config, room) for spec in cli.benchmarks]
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


def _named(cli: CLIConfig, spec: str) -> BenchmarkBuilder | None:
    """The benchmark of a name; None for task/dataset. All is checked that can be before a model loads."""
    builder = find_benchmark(spec)
    if builder is None:
        task_items(spec)
        if cli.system_prompt is not None:
            raise ConfigurationError(f"system_prompt: the task of benchmark {spec} has its own; leave it out")
        return None
    if cli.grader.endpoint.is_named:
        raise ConfigurationError(f"grader: benchmark {spec} has its own; leave it out")
    if isinstance(builder, MBPPBenchmarkBuilder):
        builder = builder.with_sandbox(fill(SandboxKeys, cli))
    builder.check()
    if isinstance(builder, QuestionBenchmark):
        builder.load(cli.max_items)
    return builder


def _benchmark(
    cli: CLIConfig,
    spec: str,
    named: BenchmarkBuilder | None,
    renderer: Renderer,
    config: BenchmarkConfig,
    room: int | None,
) -> Benchmark:
    if named is not None:
        return named.make_benchmark(renderer, config, cli.max_items, room)
    return task_benchmark(
        spec, renderer, cli.num_samples, max_items=cli.max_items, max_prompt_tokens=room, grader=cli.grader
    )


def _config(cli: CLIConfig, base_model: str) -> BenchmarkConfig:
    return fill(BenchmarkConfig, cli, max_tokens=reply_tokens(cli, base_model))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
