"""What goes wrong in a benchmark on purpose, with a message that says what to change."""


class BenchmarkError(Exception):
    """A benchmark cannot run as asked; the message names the key and the fix."""
