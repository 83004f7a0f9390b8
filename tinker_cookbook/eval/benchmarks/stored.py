"""Read the runner's files as tinker-cookbook's records, and regrade stored replies without sampling."""

from collections.abc import Callable, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any

from tinker_cookbook.eval.benchmarks.builder import QuestionBenchmark, logged_item
from tinker_cookbook.eval.benchmarks.runner import (
    RESULT_BASE_NAME,
    SUMMARY_BASE_NAME,
    TRAJECTORIES_BASE_NAME,
    folder_name,
    pass_at_k,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.stores.eval_store import BenchmarkResult, StoredTrajectory, StoredTurn
from tinker_cookbook.utils.files import read_json_object, read_jsonl

GradeFn = Callable[[str, dict[str, str | int | float]], float]
"""(text of the reply without reasoning, logs of the try) -> reward."""


def load_trajectories(
    save_dir: str | Path, benchmark_name: str, *, correct_only: bool = False, incorrect_only: bool = False
) -> list[StoredTrajectory]:
    """The tries of a benchmark by item: the question and the reply as turns, `expected`, `extracted` and more as logs.

    Raises:
        ConfigurationError: there are no results of this benchmark.
        DataFormatError: a line is damaged.
    """
    return [
        trajectory
        for trajectory, solved in _tries(save_dir, benchmark_name)
        if not (correct_only and not solved) and not (incorrect_only and solved)
    ]


def _tries(save_dir: str | Path, name: str) -> list[tuple[StoredTrajectory, bool]]:
    """The tries by item, and whether the run counted each as solved."""
    path = _folder(save_dir, name) / TRAJECTORIES_BASE_NAME
    if not path.exists():
        raise ConfigurationError(f"{path}: there are no trajectories of benchmark {name!r}")
    rows = sorted(read_jsonl(path), key=lambda row: row["item"])
    return [(_trajectory(name, row["item"], one), one["solved"]) for row in rows for one in row["tries"]]


def _trajectory(name: str, item: int, one: dict[str, Any]) -> StoredTrajectory:
    logs = one.get("logs", {})  # older files have none
    turns: list[StoredTurn] = [StoredTurn("user", logs["input"])] if "input" in logs else []
    for turn in one["turns"]:
        text = logs.get("reply", turn["raw_response"])
        metadata = {"stop_reason": turn["stop_reason"]}
        turns.append(StoredTurn("assistant", text, turn["completion_token_count"], metadata))
    return StoredTrajectory(item, name, str(logs.get("example_id", "")), turns, one["reward"], one["metrics"], logs)


def load_result(save_dir: str | Path, benchmark_name: str) -> BenchmarkResult | None:
    """The result of a benchmark from its tries; None: it is not finished. Raises as `load_trajectories`."""
    path = _folder(save_dir, benchmark_name) / RESULT_BASE_NAME
    if not path.exists():
        return None
    metrics = read_json_object(path, "run the benchmark again")["metrics"]
    tries = _tries(save_dir, benchmark_name)
    result = summarize(benchmark_name, [one for one, _ in tries], [float(solved) for _, solved in tries])
    result.metrics = metrics
    return result


def load_summary(save_dir: str | Path) -> dict[str, dict[str, float]]:
    """Name -> metrics of all benchmarks of a folder; empty if there are none."""
    path = Path(save_dir).expanduser() / SUMMARY_BASE_NAME
    return read_json_object(path, "run the benchmarks again")["benchmarks"] if path.exists() else {}


def summarize(name: str, tries: Sequence[StoredTrajectory], rewards: Sequence[float]) -> BenchmarkResult:
    """The result of tries with these rewards, where a positive one means right; pass@k up to the fewest tries per item."""
    by_item: dict[int, list[bool]] = {}
    for one, reward in zip(tries, rewards, strict=True):
        by_item.setdefault(one.idx, []).append(reward > 0)
    right = sum(reward > 0 for reward in rewards)
    max_k = min((len(item) for item in by_item.values()), default=0)
    passed = {
        k: sum(pass_at_k(len(item), sum(item), k) for item in by_item.values()) / len(by_item)
        for k in range(1, max_k + 1)
    }
    truncated = sum(
        reward <= 0 and any(turn.metadata.get("stop_reason") == "length" for turn in one.turns)
        for one, reward in zip(tries, rewards, strict=True)
    )
    return BenchmarkResult(
        name, right / len(tries) if tries else 0.0, len(tries), right, num_truncated=truncated, pass_at_k=passed
    )


def regrade_trajectories(save_dir: str | Path, benchmark_name: str, grade_fn: GradeFn) -> BenchmarkResult:
    """Grade stored replies with another function, without sampling. The files are unchanged.

    Raises:
        ConfigurationError: as in `load_trajectories`.
    """
    tries = load_trajectories(save_dir, benchmark_name)
    return summarize(benchmark_name, tries, [grade_fn(_last_reply(one), one.logs) for one in tries])


async def regrade_with(save_dir: str | Path, benchmark: QuestionBenchmark) -> BenchmarkResult:
    """Grade stored replies with a benchmark's grader, for example after it has changed. The files are unchanged.

    Raises:
        ConfigurationError: as in `load_trajectories`; or the tries are not those of a `QuestionBenchmark`.
    """
    tries = load_trajectories(save_dir, benchmark.name)
    rewards: list[float] = []
    for one in tries:
        if "reply" not in one.logs:
            if _last_reply(one):
                where = _folder(save_dir, benchmark.name)
                raise ConfigurationError(
                    f"{where} has replies without the logs of a QuestionBenchmark; use regrade_trajectories"
                )
            rewards.append(0.0)  # the prompt was too long
            continue
        graded = benchmark.grade(logged_item(one.logs), _last_reply(one))
        rewards.append(float((await graded if isawaitable(graded) else graded).correct))
    return summarize(benchmark.name, tries, rewards)


def print_trajectory(traj: StoredTrajectory) -> None:
    """Print a try: its turns, the expected answer and the extracted one."""
    print(f"--- {traj.benchmark} {traj.example_id or traj.idx}: reward {traj.reward:g}")
    for turn in traj.turns:
        print(f"[{turn.role}] {turn.content}")
    for key in ("expected", "extracted"):
        if key in traj.logs:
            print(f"{key}: {traj.logs[key]}")


def _last_reply(one: StoredTrajectory) -> str:
    return next((turn.content for turn in reversed(one.turns) if turn.role == "assistant"), "")


def _folder(save_dir: str | Path, name: str) -> Path:
    return Path(save_dir).expanduser() / folder_name(name)
