"""Lockstep only where it is asked for, and bounded there: no client waits for another's code."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.helpers import params, prompt, random_tokens
from tests.engine.test_async import SECONDS, request, run
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


def test_a_program_that_never_rests_is_answered(client: SamplingClient) -> None:
    """It submits a request every few passes of its loop, fewer than count as rest, and looks after none of them."""

    async def main() -> tuple[int, int]:
        answered: list[asyncio.Task] = []
        stop = time.monotonic() + 3.0
        while time.monotonic() < stop:
            task = asyncio.ensure_future(request(client, len(answered) % 5, 2).result_async())
            answered.append(task)
            for _ in range(QUIET_PASSES - 4):
                await asyncio.sleep(0)
            await asyncio.sleep(0.01 if len(answered) % 50 == 0 else 0)
        return sum(task.done() for task in answered), len(answered)

    done, asked = run(main())
    assert asked > 20
    assert done > 0.5 * asked


def test_a_loop_that_blocks_on_a_future_is_answered(client: SamplingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """concurrent.futures.wait tells nobody that it blocks the loop; without lockstep nothing has to know."""
    monkeypatch.setattr(gate, "BACKSTOP_SECONDS", 0.5)

    async def main() -> int:
        futures = [request(client, i, 4) for i in range(3)]
        plain = [future.future() for future in futures]
        done, _ = concurrent.futures.wait(plain, SECONDS)
        return len(done)

    assert run(main()) == 3


def test_a_blocked_loop_holds_up_no_other_client(client: SamplingClient) -> None:
    """Neither a thread nor another loop waits until the code of the first has come to an end."""
    blocked, release = threading.Event(), threading.Event()

    async def blocks() -> None:
        await request(client, 0, 2)
        request(client, 1, 2)
        blocked.set()
        release.wait(SECONDS)

    async def other() -> int:
        return len((await request(client, 2, 3)).sequences[0].tokens)

    thread = threading.Thread(target=run, args=(blocks(),))
    thread.start()
    try:
        assert blocked.wait(SECONDS)
        started = time.monotonic()
        assert run(other()) == 3
        from_thread = client.sample(prompt(random_tokens(5, 3)), 1, params(4, seed=1, stop=[])).result(SECONDS)
        assert len(from_thread.sequences[0].tokens) == 4
        assert time.monotonic() - started < 5, "the blocked loop was waited for"
    finally:
        release.set()
        thread.join()


def test_the_default_answers_while_the_program_computes(service: ServiceClient, tied_model: str) -> None:
    """A request goes out when it is made, and not when the loop has nothing else to do."""
    client = service.create_sampling_client(base_model=tied_model).result()

    async def main() -> bool:
        future = request(client, 0, 4).future()
        deadline = time.monotonic() + 10
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.01)  # the loop does not turn
        return future.done()

    assert run(main())
