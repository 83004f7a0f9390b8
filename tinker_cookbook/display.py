"""Re-exports rl/trajectory_text.py and renderers/datum_text.py, for scripts that import this path."""

from tinker_cookbook.renderers.datum_text import colorize_example, example_text, to_ints
from tinker_cookbook.rl.trajectory_text import format_trajectory

__all__ = ["colorize_example", "example_text", "format_trajectory", "to_ints"]
