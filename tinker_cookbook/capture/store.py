"""Importing this raises an error that names the alternatives to an SQL store."""

from tinker_cookbook.exceptions import MissingPackageError

raise MissingPackageError(
    "tinker_cookbook.capture.store: this library keeps captured records in files, without an SQL store and its daemon; "
    "use capture.JsonlFileSink, whose capture/*.jsonl DuckDB or pandas can query"
)
