"""Python's logging in a run: records go to the terminal and to the run's `logs.log`, even when several runs share a
process.

The context of a record determines its run: every asyncio task of a run inherits the run's context. A record from
elsewhere (a worker thread, say) belongs to all open runs.
"""

import contextvars
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tinker_cookbook.utils.secrets import RedactingFormatter

logger = logging.getLogger(__name__)

FILE_ONLY = {"file_only": True}
"""`extra=FILE_ONLY` in a logging call sends the record to `logs.log` and not to the terminal."""

_FOR_THE_FILE = frozenset({"tinker.lib.retry_handler", "tinker.lib.telemetry"})
"""Loggers of the SDK that log every failed request, hundreds of times when a server restarts. The error is also raised, and
the run reports it once."""

_current_file: contextvars.ContextVar["_RunFile | None"] = contextvars.ContextVar("run_log_file", default=None)
_label: contextvars.ContextVar[str] = contextvars.ContextVar("run_label", default="")


class _RunFile(logging.FileHandler):
    """The `logs.log` of one run; receives the records of its own context and those without a run."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _current_file.get() not in (None, self):
            return False
        return bool(super().filter(record))


class _Terminal(logging.StreamHandler[Any]):
    """Writes to the current stderr everything that is not only for the file. Shared by all open runs."""

    def __init__(self, replaced: list[logging.Handler], level: int, terminal_level: int) -> None:
        logging.Handler.__init__(self, terminal_level)
        self.replaced, self.replaced_level = replaced, level
        self.setFormatter(RedactingFormatter("%(run_label)s%(levelname)s %(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self.stream.isatty():
            return text
        width = shutil.get_terminal_size().columns
        lines = (_fill(line, width) for line in text.splitlines())
        return "\n".join(lines)

    @property
    def stream(self) -> TextIO:
        """A live display replaces stderr, so that lines appear above it."""
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        record.run_label = label_prefix()
        file_only = getattr(record, "file_only", False) or record.name in _FOR_THE_FILE
        return not file_only and bool(super().filter(record))


def _fill(line: str, width: int) -> str:
    """Wrapped between words if it is too wide."""
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def configure_logging_module(
    path: str | Path, level: int = logging.INFO, terminal_level: int = logging.NOTSET
) -> Callable[[], None]:
    """Send Python's logging to the terminal (stderr) and, appended, to the file `path`; record the command line there.

    Handlers of the root logger are replaced, so that no record appears twice. While another run of this process is open,
    the terminal is shared and each file gets the records of its own run.

    Args:
        terminal_level: level of the terminal; that of the first open run applies.

    Returns:
        A function that closes the file and, after the last run, restores the earlier handlers.
    """
    root = logging.getLogger()
    terminal = next((handler for handler in root.handlers if isinstance(handler, _Terminal)), None)
    if terminal is None:
        terminal = _Terminal(root.handlers[:], root.level, terminal_level)
        root.handlers[:] = [terminal]
    file = _RunFile(path, mode="a", encoding="utf-8")
    file.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(file)
    root.setLevel(level)
    outer = _current_file.get()
    _current_file.set(file)

    def restore() -> None:
        file.close()
        root.removeHandler(file)
        if _current_file.get() is file:
            _current_file.set(outer)
        # If other code has replaced the handlers meanwhile, keep its handlers.
        if root.handlers == [terminal]:
            root.handlers[:] = terminal.replaced
            root.setLevel(terminal.replaced_level)

    logger.info("command line: %s", sys.argv, extra=FILE_ONLY)
    return restore


@contextmanager
def label(text: str) -> Generator[None]:
    """Prefix every terminal line from this context with `[text]`, for several runs that share a terminal."""
    token = _label.set(text)
    try:
        yield
    finally:
        _label.reset(token)


def label_prefix() -> str:
    """`[text] ` of the innermost `label`, or ""."""
    return f"[{text}] " if (text := _label.get()) else ""
