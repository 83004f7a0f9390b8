"""Benchmarks: by name (`run_benchmark("gsm8k", ...)`), of a task's items, or of an RL dataset, all on one runner.

`runner` samples and scores, `builder` makes a benchmark from a dataset, `registry` has the names, `stored` reads and
regrades results. Each benchmark has a module with its name. Names are imported lazily, on first access.
"""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "runner": "Benchmark BenchmarkConfig BenchmarkKeys BenchmarkResult GRADER_METRICS RESULT_BASE_NAME REWARD "
        "SETTINGS_BASE_NAME SUMMARY_BASE_NAME TRAJECTORIES_BASE_NAME check_config dataset_benchmark pass_at_k "
        "run_benchmarks score task_benchmark task_items",
        "builder": "BenchmarkBuilder Graded QuestionBenchmark",
        "registry": "REGISTRY get_benchmark register run_benchmark",
        "stored": "load_result load_summary load_trajectories print_trajectory regrade_trajectories",
        "tinker_cookbook.rl.types": "Logs Metrics",
        "tinker_cookbook.stores.eval_store": "StoredTrajectory StoredTurn",
    },
)
