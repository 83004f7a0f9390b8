"""Environment variables of the library. The table of all variables is in the engine's `environment.py`;
`backends.check_variables` checks the set ones against it, at the start of every command.
"""

import os


def read(name: str) -> str | None:
    """The value of a variable in the table; None when it is unset or empty."""
    return os.environ.get(name) or None
