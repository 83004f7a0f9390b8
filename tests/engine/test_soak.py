"""Hundreds of random operations of six clients at once: every one is answered, and as if it had been the only one."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tests.engine.devices import here
from tests.engine.helpers import (
    STEP,
    assert_near,
    assert_repeats,
    assert_same_tokens,
    common_tokens,
    cross_entropy_datum,
    datum,
    make_training_client,
    params,
    policy_datum,
    prompt,
    random_tokens,
    weights,
)
from tests.waiting import HANG_SECONDS
from tinker_local_backend import LocalBackendError, RequestError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.sampling.generation import Generator

CLIENTS = 6
OPERATIONS = int(os.environ.get("TINKER_TEST_SOAK", "300"))
"""2000 in `make test-slow`"""
SEED = 21

HEADER = random_tokens(24, 0)
PROMPTS = [[*HEADER[: 6 * (i % 5)], *random_tokens(1 + 3 * (i % 4), i)] for i in range(24)]
"""Many begin alike."""

KINDS = {
    "train": 20,
    "step": 12,
    "score": 4,
    "sample": 30,
    "sample base": 10,
    "cancelled sample": 8,
    "prompt scores": 3,
    "snapshot": 5,
    "save": 3,
    "save for sampler": 2,
    "load": 3,
    "bad": 8,
}


@dataclass(frozen=True)
class Operation:
    kind: str
    seed: int
    waits: bool
    """for all earlier ones of its client, before the next"""


def plan() -> list[list[Operation]]:
    """What each client does, in order."""
    rng = random.Random(SEED)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=OPERATIONS)
    by_client: list[list[Operation]] = [[] for _ in range(CLIENTS)]
    for i, kind in enumerate(kinds):
        rng.choice(by_client).append(Operation(kind, i, rng.random() < 0.2))
    return by_client


Answer = tuple[Any, ...]
"""What can be compared of a result or an error."""


@dataclass(frozen=True, eq=False)
class Samples:
    """What came back of a request, as arrays per sequence."""

    stop_reasons: str
    tokens: list[list[int]]
    logprobs: list[np.ndarray]
    top_ids: list[np.ndarray]
    top_logprobs: list[np.ndarray]

    def agree_with(self, expected: Samples) -> None:
        """The same tokens, and everything else up to rounding as long as those are the same."""
        if all(assert_same_tokens(self.tokens, expected.tokens)):
            assert self.stop_reasons == expected.stop_reasons
        assert len(self.top_ids) == len(expected.top_ids)
        common = [common_tokens(*pair) for pair in zip(self.tokens, expected.tokens, strict=True)]
        pairs = [*zip(self.logprobs, expected.logprobs, common, strict=True)]
        pairs += zip(self.top_logprobs, expected.top_logprobs, common, strict=False)  # all sequences have them, or none
        for found, wanted, same in pairs:
            assert_near(found[:same], wanted[:same], atol=1e-5)
        if here().is_reference:  # elsewhere tokens of almost equal logprobs may change places
            for found, wanted in zip(self.top_ids, expected.top_ids, strict=True):
                np.testing.assert_array_equal(found, wanted)


@dataclass
class Answers:
    """What came back: for each client, for each operation, comparable values. None: cancelled."""

    by_client: list[list[Answer | None]]
    weights: list[dict[str, np.ndarray]]
    moments: list[dict[str, np.ndarray]]
    usage: list[dict[str, int]] = field(default_factory=list)
    """at half time and at the end"""


def sampled(response: tinker.types.SampleResponse) -> Answer:
    tops = [s.topk_logprobs_np for s in response.sequences if s.topk_logprobs_np is not None]
    samples = Samples(
        repr([s.stop_reason for s in response.sequences]),
        [s.tokens for s in response.sequences],
        [np.array(s.logprobs) for s in response.sequences],
        [t.token_ids for t in tops],
        [t.logprobs for t in tops],
    )
    return samples, response.prompt_logprobs_np


def trained(output: tinker.ForwardBackwardOutput) -> Answer:
    return (output.metrics, *(tensors["logprobs"].to_numpy() for tensors in output.loss_fn_outputs))


class Actor:
    """One client and its latest snapshot; `start` submits an operation and says how to read its answer."""

    def __init__(self, client: TrainingClient, base: SamplingClient, snapshot: SamplingClient):
        self.client, self.base, self.snapshot = client, base, snapshot

    async def start(self, operation: Operation) -> tuple[tinker.APIFuture[Any], Callable[[Any], Answer]] | None:
        """(future, reader of its result); None when it is over at once."""
        rng, client = random.Random(operation.seed), self.client
        match operation.kind:
            case "train" | "score":
                loss_fn = rng.choice(["cross_entropy", "cross_entropy", "importance_sampling", "ppo"])
                make = cross_entropy_datum if loss_fn == "cross_entropy" else policy_datum
                data = [make(rng.randint(1, 9), rng.randrange(1000)) for _ in range(rng.randint(1, 2))]
                call = client.forward_backward if operation.kind == "train" else client.forward
                return call(data, loss_fn), trained
            case "step":
                return client.optim_step(tinker.AdamParams(learning_rate=1e-3)), lambda answer: (answer.metrics,)
            case "sample" | "cancelled sample":
                return self.sample(self.snapshot, rng), sampled
            case "sample base":
                return self.sample(self.base, rng), sampled
            case "prompt scores":
                scores = self.snapshot.compute_logprobs(prompt(rng.choice(PROMPTS)))
                return scores, lambda answer: (None, np.array(answer, dtype=float))
            case "snapshot":
                self.snapshot = await client.save_weights_and_get_sampling_client()
                return None
            case "save":
                return client.save_state(rng.choice("ab"), overwrite=True), lambda answer: ()
            case "save for sampler":
                return client.save_weights_for_sampler(rng.choice("ab"), overwrite=True), lambda answer: ()
            case "load":
                load = rng.choice([client.load_state, client.load_state_with_optimizer])
                return load(f"tinker://{client.model_id}/weights/{rng.choice('ab')}"), lambda answer: ()
            case _:
                return self.bad(rng), lambda answer: pytest.fail(f"{operation} was carried out")

    def sample(self, sampler: SamplingClient, rng: random.Random) -> tinker.APIFuture[tinker.types.SampleResponse]:
        fields = {
            "temperature": rng.choice([1.0, 1.0, 0.0, 0.7]),
            "top_k": rng.choice([-1, -1, 10]),
            "top_p": rng.choice([1.0, 1.0, 0.8]),
            "stop": rng.choice([None, [], ["e"], list(range(0, 1500, 9))]),
        }
        return sampler.sample(
            prompt(rng.choice(PROMPTS)),
            rng.choice([1, 1, 2, 3]),
            params(rng.randint(1, 7), seed=rng.randrange(1000), **fields),
            include_prompt_logprobs=rng.random() < 0.1,
            topk_sample_logprobs=rng.choice([0, 0, 0, 3]),
        )

    def bad(self, rng: random.Random) -> tinker.APIFuture[Any]:
        """A request that must fail, at once or when its turn comes."""
        client, nan = self.client, np.full(3, math.nan, dtype=np.float32)
        good = policy_datum(3, 0)
        attempts = [
            lambda: client.forward_backward([good], "no such loss"),
            lambda: client.forward_backward([good, datum([], **good.loss_fn_inputs)], "ppo"),
            lambda: client.forward_backward([datum([1, 2, 3], **{**good.loss_fn_inputs, "advantages": nan})], "ppo"),
            lambda: client.forward_backward([datum([1, 2], **good.loss_fn_inputs)], "ppo"),
            lambda: client.load_state(f"tinker://{client.model_id}/weights/never-saved"),
            lambda: client.optim_step(tinker.AdamParams(learning_rate=-1.0)),
            lambda: self.snapshot.sample(prompt(range(250)), 1, params(7)),
            lambda: self.snapshot.sample(prompt([1536]), 1, params(1)),
            lambda: self.snapshot.sample(prompt([1]), 1, params(1, top_p=0.0)),
        ]
        return rng.choice(attempts)()

    async def settle(self) -> None:
        """To a state that has the same number of tensors and files whatever came before."""
        with suppress(RequestError):  # the step behind a request that was to fail
            await self.client.forward_backward([cross_entropy_datum(3, 0)], "cross_entropy")
            await self.client.optim_step(STEP)
        await self.client.forward_backward([cross_entropy_datum(3, 0)], "cross_entropy")
        await self.client.optim_step(STEP)
        for name in "ab":
            await self.client.save_state(name, overwrite=True)
            await self.client.save_weights_for_sampler(name, overwrite=True)
        self.snapshot = await self.client.save_weights_and_get_sampling_client()


async def answer(future: tinker.APIFuture[Any], read: Callable[[Any], Answer]) -> Answer | None:
    """The comparable value of an operation's result or error; None if it was cancelled."""
    try:
        return read(await future.result_async())
    except CancelledError:
        return None
    except asyncio.CancelledError:
        assert future.future().cancelled()  # else it is this task that shall end
        return None
    except LocalBackendError as error:
        return (type(error).__name__,)


async def perform(actor: Actor, operations: list[Operation], one_at_a_time: bool) -> list[Answer | None]:
    """One client's operations, in order; with many under way at once, unless `one_at_a_time`."""
    answers: list[Any] = [None] * len(operations)
    waiting: list[tuple[int, tinker.APIFuture[Any], Callable[[Any], Answer]]] = []
    for i, operation in enumerate(operations):
        try:
            started = await actor.start(operation)
        except LocalBackendError as error:
            answers[i] = (type(error).__name__,)
            continue
        if started is None:
            answers[i] = ()
            continue
        waiting.append((i, *started))
        if operation.waits or one_at_a_time or len(waiting) > 12:
            for future in [f for place, f, _ in waiting if operations[place].kind == "cancelled sample"]:
                if not one_at_a_time:
                    future.future().cancel()
            for place, future, read in waiting:
                answers[place] = await answer(future, read)
            waiting.clear()
        elif operation.seed % 3 == 0:
            await asyncio.sleep(0)
    for place, future, read in waiting:
        answers[place] = await answer(future, read)
    return answers


def usage(service: ServiceClient, home: Path) -> dict[str, int]:
    """What the process holds beside the KV caches, which are as large as the last requests have left them."""
    caches = 0
    for generator in service._engine._generators.values():
        assert isinstance(generator, Generator)
        caches += generator._cache.bytes
        if isinstance(generator, BurstGenerator):  # keeps a step for each size of batch, and the last eight adapters
            generator.decoder._captured.clear()
            generator.decoder.slots.table.clear()
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {
        "tensors": len(tensors),
        "bytes of tensors": sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
        )
        - caches,
        "threads": threading.active_count(),
        "files": sum(path.is_file() for path in home.rglob("*")),
        "objects": len(gc.get_objects()),
    }


def moments(client: TrainingClient) -> dict[str, np.ndarray]:
    state = client._run.state
    named = state.optimizer.state_tensors([name for name, _ in state.adapter.named_parameters()])
    return {name: tensor.cpu().numpy().copy() for name, tensor in named.items()}


async def run_all(service: ServiceClient, model: str, home: Path, one_at_a_time: bool) -> Answers:
    base = await service.create_sampling_client(base_model=model)
    clients = [make_training_client(service, model, rank=1 + i % 3, seed=i) for i in range(CLIENTS)]
    actors = [Actor(client, base, await client.save_weights_and_get_sampling_client()) for client in clients]
    found: list[list[Answer | None]] = [[] for _ in actors]
    used: list[dict[str, int]] = []

    async def half(i: int, part: slice) -> None:
        found[i].extend(await perform(actors[i], plans[i][part], one_at_a_time))
        await actors[i].settle()

    plans = plan()
    for first in (True, False):
        parts = [slice(len(p) // 2) if first else slice(len(p) // 2, None) for p in plans]
        if one_at_a_time:
            for i, part in enumerate(parts):
                await half(i, part)
        else:
            async with asyncio.TaskGroup() as group:
                for i, part in enumerate(parts):
                    group.create_task(half(i, part))
            used.append(usage(service, home))
    return Answers(found, [weights(client) for client in clients], [moments(client) for client in clients], used)


@pytest.fixture(scope="module")
def together(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceClient, Answers]]:
    home = tmp_path_factory.mktemp("soak")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", "600")
        service = ServiceClient(home=home)
    with service:
        yield service, asyncio.run(asyncio.wait_for(run_all(service, tied_model, home, False), HANG_SECONDS))


@pytest.fixture(scope="module")
def one_at_a_time(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    home = tmp_path_factory.mktemp("alone")
    with ServiceClient(home=home) as service:
        return asyncio.run(asyncio.wait_for(run_all(service, tied_model, home, True), HANG_SECONDS))


@pytest.mark.slow
def test_every_operation_is_answered(together: tuple[ServiceClient, Answers]) -> None:
    operations = [operation for mine in plan() for operation in mine]
    answers = [answer for mine in together[1].by_client for answer in mine]
    assert len(operations) == len(answers) == OPERATIONS
    cancelled = [o for o, a in zip(operations, answers, strict=True) if a is None]
    assert cancelled and all(operation.kind == "cancelled sample" for operation in cancelled)
    for operation, answer in zip(operations, answers, strict=True):
        if operation.kind == "bad":
            assert answer in [("RequestError",), ("CheckpointError",)]
    failed = [o for o, a in zip(operations, answers, strict=True) if a and "Error" in str(a[0]) and o.kind != "bad"]
    # A step without gradients, a load of what was never saved.
    assert {operation.kind for operation in failed} <= {"step", "load"}


def test_the_answers_are_those_of_one_operation_at_a_time(
    together: tuple[ServiceClient, Answers], one_at_a_time: Answers
) -> None:
    """Those of training to the last bit on the CPU; those of sampling the same tokens, and logprobs up to rounding."""
    compared = 0
    for mine, among, alone in zip(plan(), together[1].by_client, one_at_a_time.by_client, strict=True):
        for operation, found, expected in zip(mine, among, alone, strict=True):
            if found is None:
                continue
            assert expected is not None
            compared += 1
            try:
                agree(found, expected)
            except AssertionError as error:
                raise AssertionError(str(operation)) from error
    assert compared > 0.9 * OPERATIONS


def agree(found: Answer, expected: Answer) -> None:
    if not (expected and (expected[0] is None or isinstance(expected[0], Samples))):
        assert_repeats(found, expected)
        return
    if isinstance(expected[0], Samples):
        found[0].agree_with(expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        assert_near(found[1], expected[1], atol=1e-5)


def test_training_among_others_ends_where_it_ends_alone(
    together: tuple[ServiceClient, Answers], one_at_a_time: Answers
) -> None:
    for found, expected in zip(together[1].weights, one_at_a_time.weights, strict=True):
        assert_repeats(found, expected)
    for found, expected in zip(together[1].moments, one_at_a_time.moments, strict=True):
        assert found
        assert_repeats(found, expected)


def test_nothing_grows(together: tuple[ServiceClient, Answers]) -> None:
    half, end = together[1].usage
    for what in ("tensors", "bytes of tensors", "threads", "files"):
        assert end[what] <= half[what], (half, end)
    # The test itself keeps an answer per operation.
    assert end["objects"] - half["objects"] < 4 * OPERATIONS, (half, end)


def test_the_engine_still_works(together: tuple[ServiceClient, Answers], tied_model: str) -> None:
    client = make_training_client(together[0], tied_model)
    assert client.forward_backward([cross_entropy_datum(5, 0)], "cross_entropy").result().metrics["loss:sum"]
    assert client.optim_step(STEP).result().metrics
    snapshot = client.save_weights_and_get_sampling_client().result()
    assert len(snapshot.sample(prompt(PROMPTS[0]), 2, params(3, stop=[])).result().sequences) == 2
