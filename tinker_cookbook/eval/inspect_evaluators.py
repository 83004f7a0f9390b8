"""Re-exports benchmarks/inspect_adapter.py, for scripts that import this path."""

from tinker_cookbook.benchmarks.inspect_adapter import InspectEvaluator, InspectEvaluatorBuilder

__all__ = ["InspectEvaluator", "InspectEvaluatorBuilder"]
