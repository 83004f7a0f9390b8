"""A small benchmark runner: samples every item of a dataset several times, computes pass@k, and stores every
trajectory.

Files: `<save_dir>/<benchmark>/trajectories.jsonl` (a line per item, written when it is done), `settings.json`,
    `result.json`, and `<save_dir>/summary.json` over all benchmarks. An interrupted run resumes with the missing
    items; each item's seed depends only on its position, so the result is the same.
"""

import asyncio
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import chz

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.data.rows import is_data_file
from tinker_cookbook.env.lm_grader import GraderConfig, LMGrader
from tinker_cookbook.env.single_turn import single_turn_group
from tinker_cookbook.env.task import Task, TaskItem
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.field_groups import LongestReply, Seeded, SystemPrompt, Temperature
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.metric_util import dataset_to_env_group_builders
from tinker_cookbook.rl.records import transition_record
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, TrajectoryGroup
from tinker_cookbook.utils.fields import REQUIRED, docs
from tinker_cookbook.utils.files import (
    append_jsonl,
    read_json_object,
    read_jsonl,
    to_jsonable,
    truncate_jsonl,
    write_json,
)
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.seeds import derive_seed

TRAJECTORIES_BASE_NAME, RESULT_BASE_NAME = "trajectories.jsonl", "result.json"
SETTINGS_BASE_NAME, SUMMARY_BASE_NAME = "settings.json", "summary.json"
GRADER_METRICS = f"reward/{LMGrader.__name__}/"
"""Prefix of a grader's metrics (calls, tokens, cost), which are summed over all tries."""
REWARD = "reward"
"""Value of success_metric that means the total reward of a trajectory."""


@dataclass(frozen=True)
class Benchmark:
    """Items to try. Each builder makes the environments of one item; each member of its group is one try."""

    name: str
    builders: Sequence[EnvGroupBuilder]
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    """identifies the items; a folder never mixes results with different values"""
    means: tuple[str, ...] = ()
    """metrics of tries whose means are in the result too"""


@chz.chz(typecheck=True)
class BenchmarkKeys(SystemPrompt):
    """How often items are tried, and what counts as solved."""

    DOCS = docs(system_prompt="before each question of a benchmark by name; None: none. Tasks set theirs")

    num_samples: int = chz.field(
        default=1, doc="tries per item; rounded up to whole groups", validator=chz.validators.gt(0)
    )
    pass_at: tuple[int, ...] = chz.field(default=(1,), doc="the k of pass@k, each at most num_samples, e.g. 1,4")
    success_metric: str = chz.field(
        default="correct",
        doc="a try is solved if this metric of its trajectory (or `reward`) is at least the threshold",
    )
    success_threshold: float = chz.field(default=0.5, doc="see success_metric")


@chz.chz(typecheck=True)
class BenchmarkConfig(LongestReply, Temperature, Seeded, BenchmarkKeys, max_tokens=REQUIRED):
    """How to sample items, and what counts as solved."""

    concurrent_items: int = chz.field(default=64, doc="concurrent items", validator=chz.validators.gt(0))


@dataclass(frozen=True)
class BenchmarkResult:
    """The result of a benchmark. `metrics` contains pass@k, its standard error over items, mean reward and counts."""

    name: str
    metrics: dict[str, float]

    @property
    def score(self) -> float:
        """The fraction of solved tries."""
        return self.metrics["score"]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k tries is right, an unbiased estimate from c right ones of n.

    1 - C(n - c, k) / C(n, k): equation 1 of Chen et al. 2021, "Evaluating Large Language Models Trained on Code".

    Raises:
        ConfigurationError: not 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ConfigurationError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def dataset_benchmark(name: str, dataset: RLDataset, max_items: int | None = None) -> Benchmark:
    """A benchmark of all groups of an RLDataset, in order."""
    builders = dataset_to_env_group_builders(dataset)[:max_items]
    return Benchmark(name, builders, {"items": len(builders)})


def task_benchmark(
    spec: str,
    renderer: Renderer,
    num_samples: int = 1,
    split: Literal["train", "test"] = "test",
    max_items: int | None = None,
    max_prompt_tokens: int | None = None,
    grader: GraderConfig | None = None,
) -> Benchmark:
    """A benchmark of a task's items, from `task/dataset`: `qa/arithmetic`, `summary/articles`, `qa/my_questions.jsonl`.

    A file has no test split: all of its lines are used. If a grader's endpoint is set, its grades are the rewards.

    Raises:
        ConfigurationError: unknown task or dataset, or it has no such items.
        DataFormatError: a line of a file cannot be read.
    """
    grades = None if grader is None else grader.open("grader")
    task, items = task_items(spec, split, grades)
    chosen = items[:max_items]
    builders = [
        single_turn_group(task, item, renderer, num_samples, max_prompt_tokens=max_prompt_tokens) for item in chosen
    ]
    about: dict[str, Any] = {"split": split, "items": [item.id for item in chosen]}
    if grades is not None and grader is not None:
        about["grader"] = grader.identity
    return Benchmark(spec, builders, about)


def task_items(
    spec: str, split: Literal["train", "test"] = "test", grader: LMGrader | None = None
) -> tuple[Task, Sequence[TaskItem]]:
    """The task and the items of `task/dataset`; needs no model. Raises as in `task_benchmark`."""
    task_name, slash, dataset = spec.partition("/")
    if not slash or not dataset:
        raise ConfigurationError(
            f"benchmark {spec!r}: must be task/dataset, such as qa/arithmetic or qa/my_items.jsonl"
        )
    task = get_task(task_name, grader)
    train, test = load_items(task, dataset)
    items = train if split == "train" or is_data_file(dataset) else test
    if not items:
        raise ConfigurationError(f"benchmark {spec!r}: has no {split} items; try split=train")
    return task, items


def check_config(config: BenchmarkConfig) -> None:
    """Check everything before sampling. Raises ConfigurationError."""
    wrong = [k for k in config.pass_at if not 1 <= k <= config.num_samples]
    if wrong or not config.pass_at:
        raise ConfigurationError(
            f"pass_at={config.pass_at}: must be from 1 to num_samples={config.num_samples}; raise num_samples"
        )
    if config.temperature == 0 and config.num_samples > 1:
        raise ConfigurationError(
            f"num_samples={config.num_samples} at temperature=0 gives the same reply each time; use num_samples=1"
        )


async def run_benchmarks(
    benchmarks: Sequence[Benchmark],
    sampling_client: SamplingClient,
    tokenizer: Any,
    save_dir: str | Path,
    config: BenchmarkConfig,
    policy_name: str,
) -> list[BenchmarkResult]:
    """Run the missing items of each benchmark, one benchmark after the other, and write their files.

    Args:
        tokenizer: decodes replies for the files.
        policy_name: identifies the evaluated policy; results of different policies are not mixed.

    Raises:
        ConfigurationError: as in `check_config`; or the folder has results with other settings.
        DataValidationError: the trajectories do not report `success_metric`.
    """
    check_config(config)
    if len({folder_name(benchmark.name) for benchmark in benchmarks}) < len(benchmarks):
        raise ConfigurationError(f"benchmarks {[benchmark.name for benchmark in benchmarks]}: two have the same name")
    root = Path(save_dir).expanduser()
    for benchmark in benchmarks:
        _check_settings(root / folder_name(benchmark.name), benchmark, config, policy_name)
    results: list[BenchmarkResult] = []
    for benchmark in benchmarks:
        result = await _run_benchmark(benchmark, sampling_client, tokenizer, root / folder_name(benchmark.name), config)
        results.append(result)
        summary = {result.name: result.metrics for result in results}
        write_json(root / SUMMARY_BASE_NAME, {"policy": policy_name, "benchmarks": summary})
    return results


async def _run_benchmark(
    benchmark: Benchmark, sampling_client: SamplingClient, tokenizer: Any, folder: Path, config: BenchmarkConfig
) -> BenchmarkResult:
    path = folder / TRAJECTORIES_BASE_NAME
    truncate_jsonl(path, keep=lambda row: True)  # drop the partial line of a killed run
    done: set[int] = {row["item"] for row in read_jsonl(path)} if path.exists() else set()
    slots = asyncio.Semaphore(config.concurrent_items)

    async def run_item(index: int) -> None:
        async with slots:
            tries = await _try_item(benchmark, index, sampling_client, tokenizer, config)
            append_jsonl(path, {"item": index, "tags": benchmark.builders[index].logging_tags(), "tries": tries})

    await gather_all(run_item(index) for index in range(len(benchmark.builders)) if index not in done)
    rows = sorted(read_jsonl(path), key=lambda row: row["item"])
    result = BenchmarkResult(benchmark.name, score(rows, config, benchmark.means))
    write_json(folder / RESULT_BASE_NAME, asdict(result))
    return result


async def _try_item(
    benchmark: Benchmark, index: int, sampling_client: SamplingClient, tokenizer: Any, config: BenchmarkConfig
) -> list[dict[str, Any]]:
    seed = derive_seed(config.seed, "benchmark", benchmark.name, index)
    policy = TinkerTokenCompleter(sampling_client, config.max_tokens, config.temperature, seed=seed)
    tries: list[dict[str, Any]] = []
    repeat = 0
    while len(tries) < config.num_samples:
        group = await do_group_rollout(benchmark.builders[index], policy.fork("repeat", repeat))
        tries += _tries(group, tokenizer, config)
        repeat += 1
    return tries


def _tries(group: TrajectoryGroup, tokenizer: Any, config: BenchmarkConfig) -> list[dict[str, Any]]:
    tries: list[dict[str, Any]] = []
    for member in group.members():
        metrics: dict[str, float] = {}
        logs: dict[str, Any] = {}
        for transition in member.trajectory.transitions:
            metrics |= transition.metrics
            logs |= transition.logs
        metrics |= member.metrics
        solved_by = member.total_reward if config.success_metric == REWARD else metrics.get(config.success_metric)
        if solved_by is None and metrics.get("context_overflow"):
            solved_by = -math.inf  # the prompt was too long
        if solved_by is None:
            raise DataValidationError(
                f"success_metric={config.success_metric!r}: the trajectories do not report it, but "
                f"{', '.join(sorted(metrics)) or 'no metric'}; choose one of these, or `reward`"
            )
        turns = [
            transition_record(transition, tokenizer.decode(transition.ac.tokens))
            for transition in member.trajectory.transitions
        ]
        tries.append(
            {
                "solved": solved_by >= config.success_threshold,
                "reward": member.total_reward,
                "metrics": metrics,
                "logs": logs,
                "stop_reason": member.trajectory.stop_reason,
                "turns": turns,
            }
        )
    return tries


def score(rows: Sequence[Mapping[str, Any]], config: BenchmarkConfig, means: Sequence[str] = ()) -> dict[str, float]:
    """The metrics from a benchmark's lines: pass@k with standard errors over items, mean reward, tokens, counts, and
    the means of some metrics of the tries.
    """
    if not rows:
        raise ConfigurationError("the benchmark has no items")
    metrics: dict[str, float] = {}
    for k in config.pass_at:
        per_item = [pass_at_k(len(row["tries"]), sum(one["solved"] for one in row["tries"]), k) for row in rows]
        metrics[f"pass@{k}"] = statistics.fmean(per_item)
        if len(per_item) > 1:
            metrics[f"pass@{k}/stderr"] = statistics.stdev(per_item) / math.sqrt(len(per_item))
    tries = [one for row in rows for one in row["tries"]]
    metrics["score"] = statistics.fmean(one["solved"] for one in tries)
    metrics["reward"] = statistics.fmean(one["reward"] for one in tries)
    turns = [turn for one in tries for turn in one["turns"]]
    metrics["tokens_per_try"] = sum(turn["completion_token_count"] for turn in turns) / len(tries)
    metrics["num_items"], metrics["num_tries"] = len(rows), len(tries)
    for key in means:
        metrics[key] = statistics.fmean(one["metrics"].get(key, 0.0) for one in tries)
    for key in sorted({key for one in tries for key in one["metrics"] if key.startswith(GRADER_METRICS)}):
        metrics[key] = sum(one["metrics"].get(key, 0.0) for one in tries)
    return metrics


def folder_name(name: str) -> str:
    """The folder of a benchmark in `save_dir`."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", name).strip("-.") or "benchmark"


def _check_settings(folder: Path, benchmark: Benchmark, config: BenchmarkConfig, policy_name: str) -> None:
    """Record the settings of the folder's results. Raises ConfigurationError if they differ from the recorded ones."""
    about_config = {
        key: value for key, value in chz.asdict(config).items() if key not in ("concurrent_items", "pass_at")
    }
    if config.system_prompt is None:
        del about_config["system_prompt"]  # folders of earlier versions have none
    settings = to_jsonable(
        {"benchmark": benchmark.name, "about": benchmark.about, "policy": policy_name, "config": about_config}
    )
    path = folder / SETTINGS_BASE_NAME
    if path.exists():
        if read_json_object(path, "remove the folder or give another save_dir") != settings:
            raise ConfigurationError(f"{folder} has results with other settings ({path}); give another save_dir")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)
