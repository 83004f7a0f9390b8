"""What the library reads from the environment. The table of all variables is the engine's, in its `environment.py`;
`backends.check_variables` holds what is set against it, at the start of every command."""

import os


def read(name: str) -> str | None:
    """The text of a variable of the table; None when it is unset or empty."""
    return os.environ.get(name) or None
