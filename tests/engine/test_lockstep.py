"""Lockstep only where it is asked for, and bounded there: no client waits for another's code."""

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.helpers import params, prompt, random_tokens
from tests.engine.test_async import request, run
from tests.waiting import HANG_SECONDS, until
from tinker_local_backend import SamplingClient, ServiceClient
from tinker_local_backend.engine import gate
from tinker_local_backend.engine.gate import QUIET_PASSES


@pytest.fixture(scope="module")
def deterministic(home: Path) -> Iterator[ServiceClient]:
    with ServiceClient(home=home, deterministic=True) as service:
        yield service


@pytest.fixture(params=["default", "deterministic"])
def client(
    request: pytest.FixtureRequest, service: ServiceClient, deterministic: ServiceClient, tied_model: str
) -> SamplingClient:
    own = deterministic if request.param == "deterministic" else service
    return own.create_sampling_client(base_model=tied_model).result()


@pytest.fixture
def no_backstop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a loop that does not rest waits for ever."""
    monkeypatch.setattr(gate, "BACKSTOP_SECONDS", math.inf)


def test_a_program_that_never_rests_is_answered(client: SamplingClient, no_backstop: None) -> None:
    """It submits a request every few passes of its loop, fewer than count as rest, and looks after none of them."""

    async def main() -> None:
        asked: list[asyncio.Task] = []
        while sum(task.done() for task in asked[:100]) < 100:
            asked.append(asyncio.ensure_future(request(client, len(asked) % 5, 2).result_async()))
            for _ in range(QUIET_PASSES - 4):
                await asyncio.sleep(0)

    run(main())


def test_a_loop_that_blocks_on_a_future_is_answered(client: SamplingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """concurrent.futures.wait tells nobody that it blocks the loop; without lockstep nothing has to know."""
    monkeypatch.setattr(gate, "BACKSTOP_SECONDS", 0.5)

    async def main() -> int:
        futures = [request(client, i, 4) for i in range(3)]
        plain = [future.future() for future in futures]
        done, _ = concurrent.futures.wait(plain, HANG_SECONDS)
        return len(done)

    assert run(main()) == 3


def test_a_blocked_loop_holds_up_no_other_client(client: SamplingClient, no_backstop: None) -> None:
    """Neither a thread nor another loop waits until the code of the first has come to an end."""
    blocked, release = threading.Event(), threading.Event()

    async def blocks() -> None:
        await request(client, 0, 2)
        request(client, 1, 2)
        blocked.set()
        release.wait(HANG_SECONDS)

    async def other() -> int:
        return len((await request(client, 2, 3)).sequences[0].tokens)

    thread = threading.Thread(target=run, args=(blocks(),))
    thread.start()
    try:
        assert blocked.wait(HANG_SECONDS)
        assert run(other()) == 3
        from_thread = client.sample(prompt(random_tokens(5, 3)), 1, params(4, seed=1, stop=[])).result(HANG_SECONDS)
        assert len(from_thread.sequences[0].tokens) == 4
    finally:
        release.set()
        thread.join()


def test_the_default_answers_while_the_program_computes(service: ServiceClient, tied_model: str) -> None:
    """A request goes out when it is made, and not when the loop has nothing else to do."""
    client = service.create_sampling_client(base_model=tied_model).result()

    async def main() -> None:
        until(request(client, 0, 4).future().done)  # the loop does not turn

    run(main())
