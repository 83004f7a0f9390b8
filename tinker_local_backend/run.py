"""Run an unmodified program written for the Tinker SDK on the local engine.

    python -m tinker_local_backend.run script.py key=value ...
    python -m tinker_local_backend.run -m package.module key=value ...

While it runs, the local engine's classes replace `tinker.ServiceClient` and the other clients of the SDK, so the program needs
no change, no API key and no network. From Python, `use_local()` does the same for a block of code:

    with tinker_local_backend.use_local():
        client = tinker.ServiceClient().create_lora_training_client(base_model="example_data/tiny_chat", rank=8)

Models are directories or Hugging Face ids: give the program one that fits this machine.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tinker_local_backend.binding import use_local
from tinker_local_backend.command import fail
from tinker_local_backend.environment import PREFIX, check_variables
from tinker_local_backend.errors import RequestError
from tinker_local_backend.replicas.group import serve_as_replica


def find_program(arguments: Sequence[str]) -> Callable[[], object]:
    """A function that runs `[-m package.module | script.py] args...` as `python` would.
    Raises RequestError if no program is named, or the script or module does not exist."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        module = arguments[1]
        sys.path.insert(0, os.getcwd())
        if missing := _missing(module):
            is_named = f"{module}.".startswith(f"{missing}.")
            fix = "for a file leave out -m" if is_named else f"{module!r} imports it"
            raise RequestError(f"there is no module {missing!r} on the path; {fix}")
        sys.argv = list(arguments[1:])
        return partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
    if not arguments or arguments[0].startswith("-"):
        raise RequestError("name a program: python -m tinker_local_backend.run [-m package.module | script.py] args...")
    script = Path(arguments[0])
    if not script.is_file():
        raise RequestError(f"there is no script {str(script)!r}; for a module use -m package.module")
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = list(arguments)
    return partial(runpy.run_path, str(script), run_name="__main__")


def _missing(module: str) -> str | None:
    """The missing module: `module`, a parent package, or one that a parent imports; None if nothing is missing."""
    try:
        return None if importlib.util.find_spec(module) is not None else module
    except ModuleNotFoundError as error:
        return error.name or module


def main(arguments: Sequence[str]) -> None:
    """The command line: help without arguments or for --help; exit code 2 for a missing program."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    try:
        check_variables(PREFIX)  # other TINKER_ variables may be the program's
        program = find_program(arguments)
    except RequestError as error:
        fail(error)
    serve_as_replica()
    with use_local():
        program()


if __name__ == "__main__":
    main(sys.argv[1:])
