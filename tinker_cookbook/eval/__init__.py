"""Evaluators for training loops, and benchmarks. Names are imported lazily, on first access."""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "tinker_cookbook.runs.evaluation": "Evaluator EvaluatorBuilder SamplingClientEvaluator SamplingClientEvaluatorBuilder "
        "TrainingClientEvaluator",
        "tinker_cookbook.eval.benchmark_evaluator": "BenchmarkEvaluator",
        "tinker_cookbook.eval.benchmarks.builder": "BenchmarkBuilder",
        "tinker_cookbook.eval.benchmarks.registry": "REGISTRY register run_benchmark",
        "tinker_cookbook.eval.benchmarks.runner": "BenchmarkConfig run_benchmarks",
        "tinker_cookbook.eval.benchmarks.stored": "print_trajectory",
        "tinker_cookbook.stores.eval_store": "BenchmarkResult EvalStore RunMetadata StoredTrajectory",
    },
)
