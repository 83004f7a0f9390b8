"""Python processes that tests start.

Importing the libraries takes seconds of a processor, in each process anew. A process of `preloaded()` is forked from a server
that has them loaded, and costs what it computes. Tests of what a command line prints and leaves use `run_forked`; those of
how a process starts, of signals and of exit handlers, which a forked one does not run, start a real one.
"""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]

_PRELOADED = [
    "tests.killing",
    "recipes.debate_rs_grpo",
    "recipes.rl_common",
    "recipes.sl_common",
    "tinker",
    "tinker_cookbook.debate.dataset",
    "tinker_local_backend.service_client",
    "transformers.models.qwen3.modeling_qwen3",
    "pandas",  # pyarrow looks for it when it is given a list
    "pyarrow.parquet",
    "tests.frozen",
]


def python_path() -> str:
    """PYTHONPATH for a child process: this checkout, then what this process got, where its packages may lie."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def preloaded() -> ForkServerContext:
    """Its processes have the libraries from the start, and nothing else of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_forked(
    words: list[str], *, env: Mapping[str, str], cwd: Path = ROOT, typed: str = "", timeout: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """`python words...` in a process of `preloaded()`, with what it prints. The words are `-m package.module key=value ...`.

    Raises:
        subprocess.TimeoutExpired: it was still running after `timeout` seconds, and has been killed.
    """
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        stdin, stdout, stderr = (Path(folder) / name for name in ("stdin", "stdout", "stderr"))
        stdin.write_text(typed)
        process = preloaded().Process(target=_as_program, args=(words, dict(env), str(cwd), (stdin, stdout, stderr)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, stdout.read_text(), stderr.read_text())
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, stdout.read_text(), stderr.read_text())


def _as_program(words: list[str], env: dict[str, str], cwd: str, files: tuple[Path, Path, Path]) -> None:
    """In the child: what the interpreter does with a command line."""
    stdin, *outputs = files
    sys.stdin = stdin.open()
    for stream, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    flag, module, *arguments = words
    assert flag == "-m", words
    sys.argv = [module, *arguments]
    sys.path.insert(0, cwd)
    # As the interpreter does it: `__main__` stays after the last line, and pickles of processes that this one spawns know it
    # by its second name.
    program = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None, module
    program.__spec__, program.__package__ = spec, spec.parent
    code = getattr(spec.loader, "get_code")(spec.name)  # noqa: B009 (what runpy asks a loader for, of any class)
    assert code is not None, module
    sys.argv[0] = program.__dict__["__file__"] = str(spec.origin)
    exec(code, program.__dict__)
