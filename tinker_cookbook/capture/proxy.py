"""Importing this raises an error that names the alternatives to a recording proxy."""

from tinker_cookbook.exceptions import MissingPackageError

raise MissingPackageError(
    "tinker_cookbook.capture.proxy: there is no recording proxy here; for programs that speak OpenAI's or Anthropic's API run "
    "`python -m tinker_local_backend.server`, and record calls of clients with capture.instrument_tinker"
)
