"""Settings that come from environment variables, read with an error that names the variable."""

import os

from tinker_local_backend.errors import RequestError


def env_int(name: str, minimum: int | None = None) -> int | None:
    """The integer in this variable; None when it is unset or empty. Raises RequestError for anything else."""
    value = os.environ.get(name)
    if value is None or value == "":
        return None
    try:
        number = int(value)
    except ValueError:
        raise RequestError(f"{name} must be an integer, got {value!r}") from None
    if minimum is not None and number < minimum:
        raise RequestError(f"{name} must be at least {minimum}, got {number}")
    return number
