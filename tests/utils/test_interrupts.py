"""What waits for a step hears that it was cancelled, whatever the step does."""

import asyncio

import pytest

from tinker_cookbook.utils.interrupts import Ending


def test_a_cancellation_is_not_lost_to_work_that_ends_at_that_moment() -> None:
    async def work(done: list[str]) -> str:
        done.append("work")
        return "result"

    async def main() -> None:
        done: list[str] = []
        waiting = asyncio.ensure_future(Ending(None).unless_insisted(work(done)))
        await asyncio.sleep(0)  # it waits now, and the work is about to begin
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert done == ["work"]
        assert await Ending(None).unless_insisted(work(done)) == "result"

    asyncio.run(main())
