"""Functions in processes of their own: what they return and raise, how they die, and how they are ended."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import loop_until
from tinker_cookbook.utils.interrupts import interruptible
from tinker_cookbook.utils.processes import ProcessDiedError, RemoteTracebackError, processes


def doubled(number: int) -> tuple[int, int]:
    return 2 * number, os.getpid()


def broken(text: str) -> None:
    raise LookupError(text)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unpicklable() -> Any:
    return lambda: 0


def waits(begun: Path, saved: Path) -> str:
    """Waits for a signal, and then, as a run does, for its own cleaning up; what it returns is larger than a pipe holds."""

    async def forever() -> None:
        begun.touch()
        try:
            await asyncio.Event().wait()
        finally:
            saved.write_text("saved")

    with interruptible() as interrupts:
        try:
            interrupts.run(forever())
        except KeyboardInterrupt:
            return "x" * 1_000_000
    return ""


def test_results_come_from_other_processes() -> None:
    async def both() -> list[tuple[int, int]]:
        with processes(2) as start:
            return list(await asyncio.gather(start(doubled, 3), start(doubled, number=4)))

    (six, first), (eight, second) = asyncio.run(both())
    assert (six, eight) == (6, 8)
    assert len({first, second, os.getpid()}) == 3


def test_errors_come_with_the_place_where_they_were_raised() -> None:
    async def one(function: Any, *arguments: Any) -> None:
        with processes(1) as start:
            await start(function, *arguments)

    with pytest.raises(LookupError, match="what was given") as caught:
        asyncio.run(one(broken, "what was given"))
    assert isinstance(caught.value.__cause__, RemoteTracebackError) and "in broken" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="function cannot be sent"):
        asyncio.run(one(unpicklable))


def test_a_killed_process_is_an_error_and_the_others_go_on() -> None:
    async def three() -> list[Any]:
        with processes(2) as start:
            calls = start(doubled, 1), start(killed), start(doubled, 2)
            return list(await asyncio.gather(*calls, return_exceptions=True))

    first, second, third = asyncio.run(three())
    assert (first[0], third[0]) == (2, 4)
    assert isinstance(second, ProcessDiedError) and "killed by SIGKILL" in str(second)


def test_what_is_under_way_cleans_up_when_the_body_is_left(tmp_path: Path) -> None:
    """As in a study of which one run fails: the other is ended by a signal, saves, and nobody waits for anybody's lock."""

    async def failing() -> None:
        with processes(2) as start:
            async with asyncio.TaskGroup() as group:
                group.create_task(start(waits, tmp_path / "begun", tmp_path / "saved"))
                await loop_until((tmp_path / "begun").exists)
                await start(broken, "one of two")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(failing())
    assert "one of two" in str(caught.value.exceptions[0])
    assert (tmp_path / "saved").read_text() == "saved"
