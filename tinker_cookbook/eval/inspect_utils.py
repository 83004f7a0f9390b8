"""Re-exports benchmarks/inspect_model.py, for scripts that import this path."""

from tinker_cookbook.benchmarks.inspect_model import (
    DEFAULT_MAX_TOKENS,
    InspectAPIFromTinkerSampling,
    convert_inspect_messages,
    get_model_usage,
)

__all__ = ["DEFAULT_MAX_TOKENS", "InspectAPIFromTinkerSampling", "convert_inspect_messages", "get_model_usage"]
