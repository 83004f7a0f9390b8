"""Re-exports benchmarks/run_inspect.py, for scripts that import this path or run it with `tasks=... model_path=...`."""

from tinker_cookbook.benchmarks.run_inspect import Config, main
from tinker_cookbook.cli_utils import run_recipe

__all__ = ["Config", "main"]

if __name__ == "__main__":
    run_recipe(Config, main)
