"""Refuses to be imported, and says what there is in place of an SQL store."""

from tinker_cookbook.exceptions import MissingPackageError

raise MissingPackageError(
    "tinker_cookbook.capture.store: this library keeps what is captured in files, without a SQL store and its daemon; "
    "use capture.JsonlFileSink, whose capture/*.jsonl DuckDB or pandas can query"
)
