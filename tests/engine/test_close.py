"""Closing: what has not run fails with EngineClosedError, and nobody waits for ever."""

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engine.helpers import STEP, cross_entropy_datum, params, prompt, random_tokens
from tests.engine.test_async import SECONDS, run
from tinker_local_backend import EngineClosedError, SamplingClient, ServiceClient, TrainingClient

DATA = [cross_entropy_datum(7, 0)]


@pytest.fixture
def own(tmp_path: Path, tied_model: str) -> Iterator[tuple[ServiceClient, TrainingClient, SamplingClient]]:
    """An engine that a test may close."""
    with ServiceClient(home=tmp_path) as service:
        client = service.create_lora_training_client(tied_model, rank=2, seed=0).result()
        yield service, client, client.save_weights_and_get_sampling_client().result()


def long_request(sampler: SamplingClient):
    return sampler.sample(prompt(random_tokens(4, 0)), 1, params(250, stop=[]))


def test_what_has_not_run_fails(own: tuple[ServiceClient, TrainingClient, SamplingClient]) -> None:
    service, client, sampler = own
    futures = [long_request(sampler), *(client.forward_backward(DATA, "cross_entropy") for _ in range(200))]
    service.close()
    assert not service._engine._worker.is_alive()
    failed = 0
    for future in futures:
        try:
            future.result(SECONDS)
        except EngineClosedError as error:
            assert "closed before this request ran" in str(error)
            failed += 1
    assert failed > 100
    with pytest.raises(EngineClosedError):
        futures[0].result(SECONDS)


def test_a_closed_client_refuses_new_work(own: tuple[ServiceClient, TrainingClient, SamplingClient], tied_model: str):
    service, client, sampler = own
    service.close()
    service.close()
    calls = [
        lambda: service.create_lora_training_client(tied_model),
        lambda: service.create_sampling_client(base_model=tied_model),
        lambda: client.forward_backward(DATA, "cross_entropy"),
        lambda: client.optim_step(STEP),
        lambda: client.save_state("x"),
        lambda: sampler.compute_logprobs(prompt([1, 2])),
    ]
    for call in calls:
        with pytest.raises(EngineClosedError, match="closed before this request ran; create a new one"):
            call()


def test_a_closed_client_refuses_to_sample(own: tuple[ServiceClient, TrainingClient, SamplingClient]) -> None:
    service, _, sampler = own
    service.close()
    with pytest.raises(EngineClosedError, match="closed before this request ran; create a new one"):
        sampler.sample(prompt([1, 2]), 1, params())


@pytest.mark.parametrize("started", [False, True])
def test_closing_inside_a_coroutine(own: tuple[ServiceClient, TrainingClient, SamplingClient], started: bool) -> None:
    service, client, sampler = own

    async def main() -> None:
        futures = [long_request(sampler) for _ in range(3)]
        if started:
            await client.forward(DATA, "cross_entropy")
        futures.append(client.forward_backward(DATA, "cross_entropy"))  # pyright: ignore[reportArgumentType]
        service.close()
        assert not service._engine._worker.is_alive()
        for future in futures:
            with pytest.raises(EngineClosedError):
                await future

    run(main())


def test_closing_from_another_thread_reaches_who_awaits(
    own: tuple[ServiceClient, TrainingClient, SamplingClient],
) -> None:
    service, client, sampler = own

    async def main() -> None:
        waiting = asyncio.create_task(asyncio.wait_for(long_request(sampler), SECONDS))
        await client.forward(DATA, "cross_entropy")
        await asyncio.to_thread(service.close)
        with pytest.raises(EngineClosedError):
            await waiting

    run(main())


def test_closing_from_another_thread_reaches_what_is_still_held_back(tmp_path: Path, tied_model: str) -> None:
    """In lockstep a request is held back until the loop rests."""
    service = ServiceClient(home=tmp_path, deterministic=True)
    client = service.create_lora_training_client(tied_model, rank=2, seed=0).result()

    async def main() -> None:
        future = client.forward_backward(DATA, "cross_entropy")
        closer = threading.Thread(target=service.close)
        closer.start()
        closer.join(SECONDS)
        with pytest.raises(EngineClosedError):
            await future.result_async(2)

    run(main())


def test_a_client_keeps_its_engine_alive_and_nothing_else_does(tmp_path: Path, tied_model: str) -> None:
    sampler = ServiceClient(home=tmp_path).create_sampling_client(base_model=tied_model).result()
    worker = sampler._engine._worker
    gc.collect()
    assert sampler.sample(prompt([1, 2]), 1, params()).result(SECONDS).sequences
    assert worker.is_alive()
    del sampler
    gc.collect()
    worker.join(SECONDS)
    assert not worker.is_alive()


def test_an_unused_service_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    with ServiceClient():
        pass
    assert not (tmp_path / "home").exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_is_told_at_once_that_nobody_answers(
    own: tuple[ServiceClient, TrainingClient, SamplingClient],
) -> None:
    service, client, sampler = own

    def ask_all() -> list[str]:
        calls = (
            lambda: long_request(sampler),
            lambda: client.forward_backward(DATA, "cross_entropy"),
            lambda: service.create_sampling_client(base_model=sampler.get_base_model()),
        )
        answers = []
        for call in calls:
            try:
                call()
                answers.append("no error")
            except EngineClosedError as error:
                answers.append(str(error))
        return answers

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.write(write, "\n".join(ask_all()).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answers:
        told = answers.read().splitlines()
    assert len(told) == 3
    assert all(f"this engine runs in process {os.getpid()}" in line and "spawn" in line for line in told), told
    assert client.forward(DATA, "cross_entropy").result(SECONDS).metrics["loss:sum"] > 0, "the parent goes on"
