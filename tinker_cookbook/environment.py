"""The library's environment variables: one table, through which every value is read and checked.

Those of the local engine (TINKER_LOCAL_*) are in its own table, `tinker_local_backend/environment.py`.
"""

import difflib
import os

from tinker_cookbook.exceptions import ConfigurationError

PREFIXES = ("TINKER_DEBATE_", "TINKER_COOKBOOK_")
"""Of these families every variable that is set must be one of the table. The SDK reads others that begin with TINKER_."""

VARIABLES = {
    "TINKER_BACKEND": "`local` or `tinker` (also `api`), where the config has no `backend`",
    "TINKER_API_KEY": "key of the hosted service",
    "TINKER_BASE_URL": "where the hosted service, or a server with its protocol, is, where the config has no `base_url`",
    "TINKER_DEBATE_BASE_MODEL": "the model of a recipe that is given no `model_name`; default: `tiny_chat`",
    "TINKER_DEBATE_LOG_ROOT": "where runs without `log_path` go",
    "TINKER_COOKBOOK_RUNS_DIR": "folder of runs that are given no path; default: `tinker-cookbook` in the user's data folder",
    "TINKER_COOKBOOK_TRACEBACK": "1 prints the traceback of an error; otherwise only its message is printed",
}
"""By name: what the library reads from the environment."""


def read(name: str) -> str | None:
    """The value of a variable of the table; None when it is unset or empty."""
    assert name in VARIABLES, name
    return os.environ.get(name) or None


def check_environment() -> None:
    """Raise ConfigurationError for a variable that is set and not understood, with the list of those that are known."""
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigurationError(
                f"{name} is set, but there is no such variable; {hint}Known: {', '.join(VARIABLES)}"
            )
    if (shown := read("TINKER_COOKBOOK_TRACEBACK")) not in (None, "0", "1"):
        raise ConfigurationError(f"TINKER_COOKBOOK_TRACEBACK={shown!r} must be 0 or 1")
