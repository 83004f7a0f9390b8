"""The engine under asyncio: nothing deadlocks, both spellings of the SDK work."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tests.engine.helpers import (
    STEP,
    assert_repeats,
    assert_same_tokens,
    cross_entropy_datum,
    params,
    prompt,
    random_tokens,
    stopped,
    weights,
)
from tests.waiting import HANG_SECONDS
from tinker_local_backend import RequestError, RestClient, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.gate import LoopGate
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.futures import completed
from tinker_local_backend.storage.catalog import read_info
from tinker_local_backend.storage.paths import CheckpointPath

DATA = [cross_entropy_datum(7, 0)]


@pytest.fixture(scope="module", params=[False, True], ids=["default", "deterministic"])
def service(request: pytest.FixtureRequest, home: Path) -> Iterator[ServiceClient]:
    """All of this holds with and without lockstep."""
    with ServiceClient(home=home, deterministic=request.param) as service:
        yield service


def run(coroutine):
    """asyncio.run, with an end."""

    async def bounded():
        async with asyncio.timeout(HANG_SECONDS):
            return await coroutine

    return asyncio.run(bounded())


def request(sampler: SamplingClient, index: int, max_tokens: int = 8):
    return sampler.sample(prompt(random_tokens(4 + index, index)), 1, params(max_tokens, seed=index, stop=[]))


def test_waiting_with_result_inside_a_coroutine_lets_others_finish(
    sampler: SamplingClient, training: TrainingClient
) -> None:
    """Each of several tasks blocks the loop on its own future while the others' requests are in flight."""

    async def blocking(index: int) -> int:
        total = 0
        for turn in range(3):
            future = request(sampler, index + turn)
            await asyncio.sleep(0)
            total += len(future.result(HANG_SECONDS).sequences[0].tokens)
            if index % 2:
                training.forward_backward(DATA, "cross_entropy").result(HANG_SECONDS)
        return total

    async def awaiting(index: int) -> int:
        return sum([len((await request(sampler, index + turn)).sequences[0].tokens) for turn in range(3)])

    async def main() -> list[int]:
        return await asyncio.gather(*(blocking(i) if i % 3 else awaiting(i) for i in range(9)))

    assert run(main()) == [24] * 9


@pytest.mark.parametrize("service", [True], indirect=True, ids=["deterministic"])
def test_a_coroutine_may_block_while_the_worker_waits_for_its_loop(
    sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it handed over a result the worker waits for the loop to come to rest, which a blocked loop never does."""
    waits, wait = threading.Event(), LoopGate.wait_until_idle

    def observed(gate: LoopGate, others_wait: Callable[[], bool]) -> None:
        waits.set()
        wait(gate, others_wait)

    monkeypatch.setattr(LoopGate, "wait_until_idle", observed)

    async def main() -> int:
        longer = request(sampler, 1, 60)
        await request(sampler, 0, 1)
        assert waits.wait(HANG_SECONDS)
        return len(longer.result(HANG_SECONDS).sequences[0].tokens)

    assert run(main()) == 60


def test_one_engine_serves_one_loop_after_another(sampler: SamplingClient, training: TrainingClient) -> None:
    async def main() -> list[int]:
        responses = [await future for future in [request(sampler, i) for i in range(3)]]
        await training.forward_backward(DATA, "cross_entropy")
        return responses[1].sequences[0].tokens

    assert len({tuple(run(main())) for _ in range(4)}) == 1
    assert_same_tokens([request(sampler, 1).result(HANG_SECONDS).sequences[0].tokens], [run(main())])


def test_threads_and_a_loop_at_once(sampler: SamplingClient, training: TrainingClient) -> None:
    expected = [request(sampler, i).result(HANG_SECONDS).sequences[0].tokens for i in range(6)]
    found: dict[int, list] = {i: [] for i in range(6)}

    def from_thread(index: int) -> None:
        for _ in range(4):
            found[index].append(request(sampler, index).result(HANG_SECONDS).sequences[0].tokens)

    async def main() -> None:
        async def task(index: int) -> None:
            for _ in range(4):
                found[index].append((await request(sampler, index)).sequences[0].tokens)
                await training.forward_backward(DATA, "cross_entropy")

        await asyncio.gather(*(task(i) for i in range(3)))

    threads = [threading.Thread(target=from_thread, args=(i,)) for i in range(3, 6)]
    for thread in threads:
        thread.start()
    run(main())
    for thread in threads:
        thread.join(HANG_SECONDS)
    for i in range(6):
        assert_same_tokens(found[i], [expected[i]] * 4)


def test_two_loops_in_two_threads(sampler: SamplingClient) -> None:
    async def main(index: int) -> list[list[int]]:
        return [(await request(sampler, index)).sequences[0].tokens for _ in range(4)]

    results: dict[int, list] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: run(main(i))})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    for i in range(2):
        assert_same_tokens(results[i], run(main(i)))


def test_the_older_spelling_gives_the_same_results(service: ServiceClient, tied_model: str) -> None:
    async def current() -> list:
        client = await service.create_lora_training_client(tied_model, rank=2, seed=1)
        loss = await client.forward_backward(DATA, "cross_entropy")
        norm = await client.optim_step(STEP)
        scored = await client.forward(DATA, "cross_entropy")
        saved = await client.save_state("a")
        sampled = await client.save_weights_for_sampler("a")
        await client.load_state(saved.path)
        await client.load_state_with_optimizer(saved.path)
        again = await service.create_training_client_from_state(saved.path)
        more = await service.create_training_client_from_state_with_optimizer(saved.path)
        snapshot = await client.save_weights_and_get_sampling_client()
        loaded = await service.create_sampling_client(model_path=sampled.path)
        base = await service.create_sampling_client(base_model=tied_model)
        results = [loss.metrics, norm.metrics, scored.metrics, client.get_info().lora_rank]
        for made in (snapshot, loaded, base):
            results.append((await made.sample(prompt([1, 2]), 1, params(seed=0))).sequences[0].tokens)
            results.append(await made.compute_logprobs(prompt([1, 2, 3])))
        return [
            *results,
            weights(again)["lm_head.lora_B.weight"].tolist(),
            weights(more)["lm_head.lora_B.weight"].tolist(),
        ]

    async def older() -> list:
        client = await service.create_lora_training_client_async(tied_model, rank=2, seed=1)
        loss = await (await client.forward_backward_async(DATA, "cross_entropy"))
        norm = await (await client.optim_step_async(STEP)).result_async()
        scored = await (await client.forward_async(DATA, "cross_entropy")).result_async()
        saved = await (await client.save_state_async("a")).result_async()
        sampled = await (await client.save_weights_for_sampler_async("a")).result_async()
        await (await client.load_state_async(saved.path)).result_async()
        await (await client.load_state_with_optimizer_async(saved.path)).result_async()
        again = await service.create_training_client_from_state_async(saved.path)
        more = await service.create_training_client_from_state_with_optimizer_async(saved.path)
        snapshot = await client.save_weights_and_get_sampling_client_async()
        loaded = await service.create_sampling_client_async(model_path=sampled.path)
        base = await service.create_sampling_client_async(base_model=tied_model)
        results = [loss.metrics, norm.metrics, scored.metrics, (await client.get_info_async()).lora_rank]
        for made in (snapshot, loaded, base):
            results.append((await made.sample_async(prompt([1, 2]), 1, params(seed=0))).sequences[0].tokens)
            results.append(await made.compute_logprobs_async(prompt([1, 2, 3])))
        return [
            *results,
            weights(again)["lm_head.lora_B.weight"].tolist(),
            weights(more)["lm_head.lora_B.weight"].tolist(),
        ]

    assert_repeats(run(current()), run(older()))


CLIENTS = (SamplingClient, TrainingClient, ServiceClient, RestClient)
TWINS = [
    pytest.param(client, name.removesuffix("_async"), id=f"{client.__name__}.{name}")
    for client in CLIENTS
    for name, _ in inspect.getmembers(client, inspect.iscoroutinefunction)
    if name.endswith("_async")
]


def parameters(function: Callable) -> list[tuple]:
    return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]


def returns(function: Callable) -> str:
    return str(inspect.signature(function).return_annotation)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_method_has_a_twin_where_the_sdks_has_one(client: type) -> None:
    """RestClient's all have one, but for get_telemetry, as in the SDK. Ours may take more, if it has defaults."""
    theirs = getattr(tinker, client.__name__)
    names = [name for name, _ in inspect.getmembers(client, inspect.isfunction) if hasattr(theirs, f"{name}_async")]
    assert len(names) >= 3
    for name in names:
        wanted, found = (parameters(getattr(owner, f"{name}_async")) for owner in (theirs, client))
        assert found[: len(wanted)] == wanted, name
        assert all(default is not inspect.Parameter.empty for _, default, _ in found[len(wanted) :]), name
    if client is RestClient:
        methods = {name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
        methods.remove("get_telemetry")
        assert {f"{name.removesuffix('_async')}_async" for name in methods} <= methods


@pytest.mark.parametrize(("client", "name"), TWINS)
def test_a_twin_is_its_method_as_a_coroutine(client: type, name: str) -> None:
    """With its parameters, and as a subclass has it; it returns the future itself where the SDK's does."""
    method, twin = getattr(client, name), getattr(client, f"{name}_async")
    assert parameters(twin) == parameters(method)
    assert (twin.__name__, twin.__qualname__) == (f"{name}_async", f"{client.__name__}.{name}_async")
    assert f"{name}(...)`" in twin.__doc__

    future, called = completed(lambda: "result"), []

    def own(self: object, *args: object, **kwargs: object) -> object:
        called.append((self, args, kwargs))
        return future

    made = type("Own", (client,), {name: own, "__init__": lambda self: None})()
    found = asyncio.run(getattr(made, f"{name}_async")(1, key=2))
    assert called == [(made, (1,), {"key": 2})]
    theirs = getattr(tinker, client.__name__)
    their_twin = getattr(theirs, f"{name}_async", None)
    if their_twin is not None and returns(their_twin) == returns(getattr(theirs, name)):
        assert found is future and returns(twin) == returns(method)
    else:
        assert found == "result"
        assert returns(method) in (f"EngineFuture[{returns(twin)}]", f"ClientFuture[{returns(twin)}]")


def test_the_future_of_a_client_can_be_used_as_the_client(service: ServiceClient, tied_model: str) -> None:
    def use() -> float:
        client = service.create_lora_training_client(tied_model, rank=2, seed=1)
        loss = client.forward_backward(DATA, "cross_entropy").result(HANG_SECONDS).metrics["loss:sum"]  # pyright: ignore
        snapshot = client.save_weights_and_get_sampling_client()  # pyright: ignore
        assert snapshot.sample(prompt([1]), 1, params(seed=0)).result(HANG_SECONDS).sequences
        return loss

    async def inside() -> float:
        return use()

    assert_repeats(run(inside()), use())


def test_futures_are_the_sdks(sampler: SamplingClient, training: TrainingClient) -> None:
    futures = [
        request(sampler, 0),
        training.forward(DATA, "cross_entropy"),
        training.save_weights_and_get_sampling_client(),
    ]
    assert all(isinstance(future, tinker.APIFuture) for future in futures)
    with stopped(sampler._engine), pytest.raises(TimeoutError):
        sampler.sample(prompt([1]), 1, params(200, stop=[])).result(1e-6)


def test_an_error_reaches_its_awaiter_and_the_step_behind_it(training: TrainingClient) -> None:
    expected = training.forward(DATA, "cross_entropy").result().metrics["loss:sum"]

    async def main() -> float:
        bad = training.forward_backward([], "cross_entropy")
        good = training.forward_backward(DATA, "cross_entropy")
        step = training.optim_step(STEP)
        with pytest.raises(RequestError, match="data is empty"):
            await bad
        with pytest.raises(RequestError, match="data is empty"):
            bad.result(HANG_SECONDS)
        with pytest.raises(RequestError, match=r"no step was taken.*data is empty"):
            await step
        loss = (await good).metrics["loss:sum"]
        # The step has cleared the gradients: what follows starts anew.
        again, step = training.forward_backward(DATA, "cross_entropy"), training.optim_step(STEP)
        await again
        await step
        return loss

    assert_repeats(run(main()), expected)


def test_a_cancelled_task_frees_its_request_and_others_go_on(sampler: SamplingClient) -> None:
    expected = request(sampler, 2, 30).result(HANG_SECONDS).sequences[0].tokens

    async def main() -> list[int]:
        async def wait(index: int, max_tokens: int):
            return await request(sampler, index, max_tokens)

        doomed = [asyncio.create_task(wait(i, 200)) for i in range(2)]
        kept = asyncio.create_task(wait(2, 30))
        await request(sampler, 5, 1)
        for task in doomed:
            task.cancel()
        for task in doomed:
            with pytest.raises(asyncio.CancelledError):
                await task
        return (await kept).sequences[0].tokens

    assert_same_tokens([run(main())], [expected])
    generator = sampler._engine._generators[sampler.get_base_model()]
    assert isinstance(generator, Generator)
    running = generator._running
    assert not [row for row in running if row.ticket.request.adapter is sampler._weights]


def test_what_is_submitted_at_the_end_of_a_loop_still_runs(training: TrainingClient) -> None:
    async def main():
        return training.forward_backward(DATA, "cross_entropy")

    assert run(main()).result(HANG_SECONDS).metrics["loss:sum"]


def test_a_loop_may_block_on_a_future_from_elsewhere(sampler: SamplingClient) -> None:
    """Submitted before the loop began, or by another thread."""
    from_outside = request(sampler, 1, 200)

    async def main() -> int:
        await request(sampler, 0, 1)
        return len(from_outside.result(HANG_SECONDS).sequences[0].tokens)

    assert run(main()) == 200


def test_a_thread_does_not_overtake_what_its_loop_submitted_before(training: TrainingClient) -> None:
    """optim_step is still held for the loop to come to rest when a thread asks for a checkpoint: it must be in it."""

    async def main() -> int | None:
        training.forward_backward([cross_entropy_datum(5, 1)], "cross_entropy")
        training.optim_step(STEP)
        saved = await asyncio.to_thread(lambda: training.save_state("ordered").result())
        return read_info(training._run.home, CheckpointPath.parse(saved.path)).optimizer_steps

    assert asyncio.run(main()) == 1
