"""The error that benchmarks raise on purpose."""


class BenchmarkError(Exception):
    """A benchmark cannot run as asked; the message names the key and the fix."""
