"""Evaluators for training loops. Names are imported lazily, on first access."""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "tinker_cookbook.runs.evaluation": "Evaluator EvaluatorBuilder SamplingClientEvaluator SamplingClientEvaluatorBuilder "
        "TrainingClientEvaluator",
        "tinker_cookbook.stores.eval_store": "BenchmarkResult EvalStore RunMetadata StoredTrajectory",
    },
)
