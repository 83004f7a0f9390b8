"""Run checks one after the other, each on its own thread with its own time limit, and report the outcome of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import tinker

from tinker_local_backend.conformance.probe import Probe, Target

T = TypeVar("T")
Outcome = Literal["passed", "failed", "refused"]
SECONDS = 120.0
"""Time limit of a check. The SDK repeats a request for minutes if the server answers with a status that it retries."""
REFUSING = (400, 403, 404, 405, 422, 501)
"""HTTP statuses of a permanent refusal, which the SDK does not retry."""


class NonconformingError(Exception):
    """The server's response does not follow the protocol."""


class RefusedError(Exception):
    """The server does not offer the requested feature, and its response says so."""


@dataclass(frozen=True)
class Check:
    """A named check of a server. `ask` returns if the server's results are right, and raises otherwise."""

    ask: Callable[[Probe], None]
    seconds: float = SECONDS

    @property
    def name(self) -> str:
        return self.ask.__name__

    @property
    def description(self) -> str:
        return (self.ask.__doc__ or "").strip().split("\n")[0]


@dataclass(frozen=True)
class Row:
    """The result of a check."""

    name: str
    outcome: Outcome
    reason: str
    """empty if it passed"""
    seconds: float


def expect(condition: object, otherwise: str) -> None:
    """Raise NonconformingError unless the condition holds."""
    if not condition:
        raise NonconformingError(otherwise)


def expect_close(actual: object, expected: object, what: str, atol: float = 1e-3, rtol: float = 1e-3) -> None:
    """Raise NonconformingError unless arrays or numbers have the same shape and differ by at most atol + rtol * |expected|."""
    left, right = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    expect(left.shape == right.shape, f"{what}: shape {left.shape}, expected {right.shape}")
    if not np.allclose(left, right, atol=atol, rtol=rtol):
        worst = int(np.argmax(np.nan_to_num(np.abs(left - right), nan=np.inf)))
        raise NonconformingError(f"{what}: {left.flat[worst]:.6g}, expected {right.flat[worst]:.6g} (at {worst})")


def is_refusal(error: BaseException) -> bool:
    """Whether a server refused a request permanently and gave a reason, so that the SDK reports it without retries."""
    if isinstance(error, tinker.RequestFailedError):
        return str(error.category) == "user" and bool(error.message)
    return isinstance(error, tinker.APIStatusError) and error.status_code in REFUSING


def offered(call: Callable[[], T]) -> T:
    """The result of an optional call. Raises RefusedError if the server does not offer it."""
    try:
        return call()
    except Exception as error:
        if is_refusal(error):
            raise RefusedError(describe(error)) from error
        raise


def expect_refusal(call: Callable[[], object], what: str, *classes: type[Exception]) -> str:
    """Call, and return the server's message. Raises NonconformingError unless the call raises one of `classes` (if none are
    given: an error for which `is_refusal` holds)."""
    try:
        call()
    except Exception as error:
        right = isinstance(error, classes) if classes else is_refusal(error)
        names = (
            " or ".join(kind.__name__ for kind in classes)
            or "a refusal (400, 404, 422, or a failed request by the user)"
        )
        expect(right, f"{what}: {describe(error)}; expected {names}")
        return str(error)
    raise NonconformingError(f"{what}: was accepted")


def describe(error: BaseException) -> str:
    """Class and message of an error, on one line."""
    status = f" {error.status_code}" if isinstance(error, tinker.APIStatusError) else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{status}: {text}"[:400]


def run(checks: Sequence[Check], target: Target, seconds: float | None = None) -> Iterator[Row]:
    """The row of each check, as it ends. `seconds` replaces the checks' own limits."""
    for check in checks:
        yield _run_one(check, target, check.seconds if seconds is None else seconds)


def _run_one(check: Check, target: Target, limit: float) -> Row:
    ended: list[tuple[Outcome, str]] = []

    def work() -> None:
        with Probe(target, check.name) as probe:
            try:
                check.ask(probe)
                ended.append(("passed", ""))
            except RefusedError as refusal:
                ended.append(("refused", str(refusal)))
            except NonconformingError as error:
                ended.append(("failed", str(error)))
            except BaseException as error:  # the SDK also raises errors by accident, such as AssertionError
                ended.append(("failed", describe(error)))

    begun = time.monotonic()
    # A daemon thread, so that one that hangs does not keep the process alive.
    thread = threading.Thread(target=work, name=f"conformance-{check.name}", daemon=True)
    thread.start()
    thread.join(limit)
    outcome, reason = ended[0] if ended else ("failed", f"no result within {limit:g} s")
    return Row(check.name, outcome, reason, time.monotonic() - begun)


def line(row: Row) -> str:
    """A row of the table."""
    return f"{row.outcome:<8} {row.seconds:6.1f} s  {row.name:<34} {row.reason}".rstrip()


def summary(rows: Sequence[Row]) -> str:
    """The last line of the table: the number of checks per outcome."""
    outcomes: tuple[Outcome, ...] = ("passed", "failed", "refused")
    return ", ".join(f"{sum(row.outcome == outcome for row in rows)} {outcome}" for outcome in outcomes)
