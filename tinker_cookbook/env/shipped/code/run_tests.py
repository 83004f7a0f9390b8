"""Runs a solution on the inputs of its tests, inside a sandbox (`grading`): needs only Python, and imports nothing of ours.

It reads {"function": name or null, "inputs": [...], "seconds": per test, "most_bytes": per test} from stdin and prints a
line of JSON for each test, in order: {"status": "ok", "output": ...}, {"status": "error", "error": "..."}, or
{"status": "timeout"}. If the solution cannot be compiled, there is one line, {"status": "compile", "error": "..."}. It knows no
expected output: whatever a solution does to it, it cannot learn one, and results are compared outside.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

SOLUTION = "solution.py"


def describe(error: BaseException) -> str:
    """The error with the last line of the solution that it went through."""
    lines: list[int | None] = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SOLUTION
    ]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    place = f" (line {lines[-1]})" if lines else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message[:300]}{place}"


def call(code: CodeType, function: str | None, given: Any, report: Callable[[dict[str, Any]], None]) -> None:
    """In the process of one test: run the solution, and report a value or an error."""
    names: dict[str, Any] = {"__name__": "__main__" if function is None else "solution", "__file__": SOLUTION}
    try:
        exec(code, names)
        if function is not None:
            owner = names["Solution"]() if function not in names and "Solution" in names else None
            target: Any = getattr(owner, function) if owner is not None else names.get(function)
            if target is None:
                raise NameError(f"there is no function {function}")
            report({"value": target(*given)})
    except SystemExit as error:
        if function is not None or error.code not in (None, 0):
            report({"error": f"SystemExit: {error.code}"})
    except BaseException as error:
        report({"error": describe(error)})
    finally:
        sys.stdout.flush()


def start(code: CodeType, function: str | None, given: Any) -> tuple[int, int, int]:
    """Fork the process of one test; returns its id, its stdout and its report, as file descriptors."""
    out_read, out_write = os.pipe()
    report_read, report_write = os.pipe()
    child = os.fork()
    if child:
        os.close(out_write)
        os.close(report_write)
        return child, out_read, report_read
    os.setsid()
    with open("stdin.txt", "w") as file:
        file.write(given if function is None else "")
    os.dup2(os.open("stdin.txt", os.O_RDONLY), 0)
    os.dup2(out_write, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115

    def report(what: dict[str, Any]) -> None:
        with open(report_write, "w", closefd=False) as file:
            file.write(json.dumps(what))

    try:
        call(code, function, given, report)
    except BaseException as error:
        report({"error": f"its return value is not JSON: {error}"})
    finally:
        os._exit(0)


def follow(out: int, report: int, seconds: float, most_bytes: int) -> tuple[dict[int, bytes], str]:
    """Read both to their ends; returns the data, and whether the process ended in time and within the size limit."""
    read, until = {out: b"", report: b""}, time.monotonic() + seconds
    waiting = [out, report]
    while waiting:
        ready, _, _ = select.select(waiting, [], [], max(0, until - time.monotonic()))
        if not ready:
            return read, "timeout"
        for file in ready:
            chunk = os.read(file, 65536)
            read[file] += chunk
            if not chunk:
                waiting.remove(file)
            if len(read[file]) > most_bytes:
                return read, "too long"
    return read, "ended"


def run_test(code: CodeType, function: str | None, given: Any, seconds: float, most_bytes: int) -> dict[str, Any]:
    """The line of one test."""
    child, out, report = start(code, function, given)
    read, end = follow(out, report, seconds, most_bytes)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it is not yet in its own group
    _, status = os.waitpid(child, 0)
    os.close(out)
    os.close(report)
    if end == "timeout":
        return {"status": "timeout"}
    if end == "too long":
        return {"status": "error", "error": f"it writes more than {most_bytes} bytes"}
    said: dict[str, Any] = json.loads(read[report]) if read[report] else {}
    if "error" in said:
        return {"status": "error", "error": said["error"]}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return {"status": "error", "error": f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}"}
    if function is None:
        return {"status": "ok", "output": read[out].decode(errors="replace")}
    if "value" not in said:
        return {"status": "error", "error": "it ended without returning"}
    return {"status": "ok", "output": said["value"]}


def main() -> None:
    """Compile the solution, and run all tests."""
    asked = json.load(sys.stdin)
    try:
        with open(SOLUTION) as file:
            code = compile(file.read(), SOLUTION, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        print(json.dumps({"status": "compile", "error": describe(error)}))
        return
    for given in asked["inputs"]:
        line = run_test(code, asked["function"], given, asked["seconds"], asked["most_bytes"])
        print(json.dumps(line), flush=True)
