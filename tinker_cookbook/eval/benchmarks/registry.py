"""Benchmarks by name, and one call that runs one of them."""

import difflib
from pathlib import Path

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.eval.benchmarks.aime import (
    AIME2024BenchmarkBuilder,
    AIME2025BenchmarkBuilder,
    AIME2026BenchmarkBuilder,
    AIMEBenchmarkBuilder,
)
from tinker_cookbook.eval.benchmarks.builder import BenchmarkBuilder, QuestionBenchmark
from tinker_cookbook.eval.benchmarks.ceval import CEvalBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.gpqa import GPQABenchmarkBuilder
from tinker_cookbook.eval.benchmarks.gsm8k import GSM8KBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.ifbench import IFBenchBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.ifeval import IFEvalBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.math500 import MATH500BenchmarkBuilder
from tinker_cookbook.eval.benchmarks.mbpp import MBPPBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.mmlu_pro import MMLUProBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.mmlu_redux import MMLUReduxBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.runner import BenchmarkConfig, BenchmarkResult, check_config, run_benchmarks
from tinker_cookbook.eval.benchmarks.supergpqa import SuperGPQABenchmarkBuilder
from tinker_cookbook.exceptions import BenchmarkNotFoundError, ConfigurationError
from tinker_cookbook.renderers import Renderer

REGISTRY: dict[str, BenchmarkBuilder] = {
    make.name: make()
    for make in (
        AIMEBenchmarkBuilder,
        AIME2024BenchmarkBuilder,
        AIME2025BenchmarkBuilder,
        AIME2026BenchmarkBuilder,
        CEvalBenchmarkBuilder,
        GPQABenchmarkBuilder,
        GSM8KBenchmarkBuilder,
        IFBenchBenchmarkBuilder,
        IFEvalBenchmarkBuilder,
        MATH500BenchmarkBuilder,
        MBPPBenchmarkBuilder,
        MMLUProBenchmarkBuilder,
        MMLUReduxBenchmarkBuilder,
        SuperGPQABenchmarkBuilder,
    )
}
"""Benchmarks by name: the library's, and those of `register`."""


def register(builder: BenchmarkBuilder) -> BenchmarkBuilder:
    """Register a custom benchmark under its name. Raises ConfigurationError for a name that is taken or invalid."""
    if builder.name in REGISTRY or not builder.name.isidentifier():
        raise ConfigurationError(
            f"benchmark {builder.name!r}: the name is taken, or is not an identifier; choose another"
        )
    REGISTRY[builder.name] = builder
    return builder


def get_benchmark(name: str, dataset_path: str | None = None) -> BenchmarkBuilder:
    """The benchmark of a name.

    Args:
        dataset_path: a local file with the columns of its dataset, read instead of the dataset on the hub.

    Raises:
        BenchmarkNotFoundError: no such name; the message lists the known and close ones.
        ConfigurationError: `dataset_path` is not a file of rows, or the benchmark does not read files.
    """
    if name not in REGISTRY:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), REGISTRY, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise BenchmarkNotFoundError(
            f"benchmark {name!r} is unknown: {hint}must be task/dataset, such as qa/arithmetic, or one of "
            f"{', '.join(sorted(REGISTRY))}"
        )
    builder = REGISTRY[name]
    if dataset_path is None:
        return builder
    if not isinstance(builder, QuestionBenchmark):
        raise ConfigurationError(f"dataset_path={dataset_path!r}: benchmark {name} reads no file; leave it out")
    return builder.with_dataset(dataset_path)


def find_benchmark(spec: str) -> BenchmarkBuilder | None:
    """The benchmark of `name` or `name/FILE`; None for `task/dataset`. Raises as `get_benchmark`."""
    name, slash, dataset = spec.partition("/")
    if slash and name not in REGISTRY:
        return None
    return get_benchmark(name, dataset or None)


async def run_benchmark(
    benchmark: str | BenchmarkBuilder,
    sampling_client: SamplingClient,
    renderer: Renderer,
    config: BenchmarkConfig,
    save_dir: str | Path,
    *,
    dataset_path: str | None = None,
    max_items: int | None = None,
    policy_name: str = "policy",
) -> BenchmarkResult:
    """Run the missing items of one benchmark, and write its files (see `runner`).

    Args:
        benchmark: a name of `REGISTRY`, or a custom one.
        save_dir: the folder of results; the same call resumes an interrupted run.
        dataset_path: as in `get_benchmark`.
        max_items: None: all.
        policy_name: identifies the weights; a folder never mixes results of different weights.

    Raises:
        BenchmarkNotFoundError: as in `get_benchmark`.
        ConfigurationError, DataFormatError: as in `QuestionBenchmark.make_benchmark` and `run_benchmarks`.
    """
    check_config(config)
    if isinstance(benchmark, str):
        benchmark = get_benchmark(benchmark, dataset_path)
    elif dataset_path is not None:
        raise ConfigurationError(f"dataset_path={dataset_path!r}: needs a benchmark name; pass the file to the builder")
    made = benchmark.make_benchmark(renderer, config, max_items)
    (result,) = await run_benchmarks([made], sampling_client, renderer.tokenizer, save_dir, config, policy_name)
    return result
