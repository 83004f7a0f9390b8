"""Ten thousand requests queued at once, beside two clients that train, cancellations, and a device that runs out of memory.

It prints what it found: `python -m pytest -n 0 -s -m slow tests/engine/test_long_soak.py`.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import (
    assert_same_tokens,
    cross_entropy_datum,
    make_training_client,
    params,
    pass_tokens,
    prompt,
    random_tokens,
)
from tests.engine.test_soak import usage
from tests.waiting import HANG_SECONDS
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.model.base_model import BaseModel

REQUESTS = 10_000
ROUNDS = 2
CANCELLED_OF = 20
"""One request of so many is cancelled, some time after it was submitted."""

COMPARED_OF = 50
SAFE_TOKENS = 20
"""A pass of so many always fits."""

PASSES_PER_FAILURE = 400
SECONDS = 3 * HANG_SECONDS

HEADERS = [random_tokens(n, n) for n in (0, 20, 40)]


@dataclass(frozen=True)
class Wish:
    """A request that can be made again."""

    tokens: list[int]
    samples: int
    max_tokens: int
    seed: int

    @classmethod
    def random(cls, rng: random.Random) -> Wish:
        tokens = [*rng.choice(HEADERS), *random_tokens(rng.choice([1, 4, 15, 60]), rng.randrange(200))]
        return cls(tokens, rng.choice([1, 1, 1, 2, 4]), rng.choice([1, 2, 8, 8, 30]), rng.randrange(1 << 30))

    def submit(self, sampler: SamplingClient) -> tinker.APIFuture[tinker.types.SampleResponse]:
        return sampler.sample(prompt(self.tokens), self.samples, params(self.max_tokens, seed=self.seed, stop=[]))


@dataclass
class Answered:
    """What became of the requests of a round."""

    wishes: list[Wish]
    futures: list[Future[Any]]
    seconds: list[float] = field(default_factory=list)


def submit_all(samplers: list[SamplingClient], rng: random.Random, count: int) -> Answered:
    """All at once; one in `CANCELLED_OF` is cancelled when another one that was submitted before it is answered."""
    wishes = [Wish.random(rng) for _ in range(count)]
    answered = Answered(wishes, [])
    begun = time.monotonic()
    for i, wish in enumerate(wishes):
        future = wish.submit(samplers[i % len(samplers)]).future()
        answered.futures.append(future)
        if i % CANCELLED_OF == 0:
            before = answered.futures[rng.randrange(len(answered.futures))]
            before.add_done_callback(lambda _, future=future: future.cancel())
        else:
            future.add_done_callback(lambda _: answered.seconds.append(time.monotonic() - begun))
    return answered


class Trainer(threading.Thread):
    """Steps one after the other, each of many micro-batches, until told to stop."""

    def __init__(self, client: TrainingClient, seed: int):
        super().__init__()
        self.client, self.data = client, [cross_entropy_datum(40, seed + i) for i in range(20)]
        self.stop = threading.Event()
        self.losses: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                trained = self.client.forward_backward(self.data, "cross_entropy")
                self.client.optim_step(tinker.AdamParams(learning_rate=1e-4)).result(SECONDS)
                self.losses.append(trained.result(SECONDS).metrics["loss:sum"])
        except BaseException as error:
            self.error = error


@contextmanager
def failing_device() -> Iterator[list[int]]:
    """Every so many large passes of the model, be they of a sampler or of training, memory runs out.

    Counts large passes and failures.
    """
    counts = [0, 0]

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def fails_now_and_then(self: BaseModel, tokens_T: torch.Tensor, *rest: Any, **options: Any) -> Any:
            counts[0] += len(tokens_T) > SAFE_TOKENS
            if len(tokens_T) > SAFE_TOKENS and counts[0] % PASSES_PER_FAILURE == 0:
                counts[1] += 1
                raise torch.OutOfMemoryError("injected")
            return original(self, tokens_T, *rest, **options)

        return fails_now_and_then

    with pytest.MonkeyPatch.context() as patch:
        for name in ("hidden_states", "training_pass"):
            patch.setattr(BaseModel, name, failing(getattr(BaseModel, name)))
        yield counts


def one_round(number: int, clients: list[TrainingClient], samplers: list[SamplingClient], rng: random.Random) -> str:
    """Some of the requests beside the trainers, all of them looked at. Returns a line about it."""
    trainers = [Trainer(client, 100 * i) for i, client in enumerate(clients)]
    for trainer in trainers:
        trainer.start()
    answered = submit_all(samplers, rng, REQUESTS // ROUNDS)
    cancelled, tokens = 0, 0
    for i, (wish, future) in enumerate(zip(answered.wishes, answered.futures, strict=True)):
        try:
            response = future.result(SECONDS)
        except CancelledError:
            assert i % CANCELLED_OF == 0, "nobody has cancelled it"
            cancelled += 1
            continue
        assert [len(s.tokens) for s in response.sequences] == [wish.max_tokens] * wish.samples
        assert all(len(s.logprobs) == len(s.tokens) for s in response.sequences)
        tokens += wish.samples * wish.max_tokens
    for trainer in trainers:
        trainer.stop.set()
    for trainer in trainers:
        trainer.join(SECONDS)
        assert trainer.error is None, trainer.error
        assert trainer.losses[-1] < trainer.losses[0], "it trained"
    to_cancel = REQUESTS // ROUNDS // CANCELLED_OF
    assert 0 < cancelled <= to_cancel
    assert len(answered.seconds) == REQUESTS // ROUNDS - to_cancel
    for i in range(1, len(answered.wishes), COMPARED_OF):
        alone = answered.wishes[i].submit(samplers[i % len(samplers)]).result(SECONDS)
        together = answered.futures[i].result()
        assert_same_tokens([s.tokens for s in together.sequences], [s.tokens for s in alone.sequences])
    steps, waits = [len(trainer.losses) for trainer in trainers], np.array(answered.seconds)
    return (
        f"round {number}: {len(waits)} answered, {cancelled} cancelled, {tokens} tokens in {waits.max():.1f} s; "
        f"p50 {np.quantile(waits, 0.5):.1f} s, p99 {np.quantile(waits, 0.99):.1f} s; training steps {steps}"
    )


@pytest.mark.slow
def test_ten_thousand_queued_requests(
    tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    monkeypatch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", "8192")
    pass_tokens(monkeypatch, 128)
    rng, lines, used = random.Random(3), [], []
    with ServiceClient(home=tmp_path) as service, failing_device() as counts:
        clients = [make_training_client(service, tied_model, seed=i) for i in range(2)]
        base = service.create_sampling_client(base_model=tied_model).result()
        samplers = [base, *(client.save_weights_and_get_sampling_client().result() for client in clients)]
        for number in range(ROUNDS):
            lines.append(one_round(number, clients, samplers, rng))
            used.append(usage(service, tmp_path))
        waits = service._engine.waits()
        (stats,) = service._engine.sampler_stats().values()
    assert stats.waiting == stats.running == 0 and not any(wait.waiting for wait in waits.values())
    assert counts[1] > 10, counts
    assert used[1]["tensors"] <= used[0]["tensors"] + 8 and used[1]["threads"] == used[0]["threads"]
    assert used[1]["bytes of tensors"] <= 1.2 * used[0]["bytes of tensors"]
    assert used[1]["objects"] <= 1.02 * used[0]["objects"] + 1000
    longest = {kind: f"{wait.longest_seconds:.2f} s" for kind, wait in sorted(waits.items())}
    with capsys.disabled():
        print("", *lines, f"{counts[1]} failures in {counts[0]} large passes", sep="\n")
        print(f"longest waits {longest}", stats, *used, sep="\n")
