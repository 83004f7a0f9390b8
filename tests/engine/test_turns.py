"""A long training operation gives way between its micro-batches: to the samplers, and to other clients' operations."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import (
    STEP,
    assert_repeats,
    assert_samples_agree,
    cross_entropy_datum,
    drop_gradients,
    gradients,
    make_training_client,
    params,
    pass_tokens,
    prompt,
    random_tokens,
    stopped,
    weights,
)
from tests.waiting import HANG_SECONDS, until
from tinker_local_backend import EngineClosedError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.operation_queue import SAMPLER_STEPS_PER_PART
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.training import trainer

PASSES = 10
DATA = [cross_entropy_datum(12, i) for i in range(PASSES)]
"""With `small_passes`, each a micro-batch of its own."""


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_tokens(monkeypatch, 16)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, one_token_a_step: None) -> list[str]:
    """What the worker does, in order: a "pass" of training, a "step" of a sampler, an "optim" step."""
    happened: list[str] = []

    def note(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            happened.append(what)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(trainer, "batch_pass", "pass")
    note(trainer, "optim_step", "optim")
    note(Generator, "step", "step")
    return happened


def ask(sampler: SamplingClient, seed: int, length: int) -> tinker.APIFuture[tinker.types.SampleResponse]:
    return sampler.sample(prompt(random_tokens(9, seed)), 2, params(length, seed=seed, stop=[]))


def outputs(output: tinker.ForwardBackwardOutput) -> list[Any]:
    return [output.metrics, *(tensors["logprobs"].to_numpy() for tensors in output.loss_fn_outputs)]


@pytest.mark.parametrize("backward", [True, False], ids=["forward_backward", "forward"])
def test_samplers_go_on_between_micro_batches_and_nothing_else_changes(
    service: ServiceClient,
    training: TrainingClient,
    sampler: SamplingClient,
    small_passes: None,
    events: list[str],
    backward: bool,
) -> None:
    call = training.forward_backward if backward else training.forward
    expected = outputs(call(DATA, "cross_entropy").result())
    expected_gradients = gradients(training) if backward else {}
    drop_gradients(training)
    alone = [ask(sampler, seed, 40).result().sequences for seed in range(3)]
    events.clear()
    with stopped(service._engine):
        trained = call(DATA, "cross_entropy")
        sampling = [ask(sampler, seed, 40) for seed in range(3)]
    found = outputs(trained.result(HANG_SECONDS))
    samples = [future.result(HANG_SECONDS).sequences for future in sampling]
    during = "".join(event[0] for event in events)
    first, last = during.index("p"), during.rindex("p")
    assert during.count("p") == PASSES
    steps = [len(part) for part in during[first + 1 : last].split("p")]
    # Forty tokens, the first of them by the prefill: some at each border, until there is nothing left to sample.
    assert steps == [SAMPLER_STEPS_PER_PART] * 5 + [0] * (PASSES - 6)
    assert_repeats(found, expected)
    if backward:
        assert_repeats(gradients(training), expected_gradients)
        drop_gradients(training)
    for ours, theirs in zip(samples, alone, strict=True):
        assert_samples_agree(ours, theirs)


def test_a_snapshot_that_is_sampled_while_its_client_trains_stays_as_it_was(
    service: ServiceClient, training: TrainingClient, small_passes: None
) -> None:
    """The client's own later operations stay behind; what was submitted before them sees the weights of its time."""
    sampler = training.save_weights_and_get_sampling_client().result()
    before, alone = weights(training), ask(sampler, 1, 60).result().sequences
    with stopped(service._engine):
        passes = [training.forward_backward(DATA, "cross_entropy") for _ in range(2)]
        step = training.optim_step(STEP)
        sampling = ask(sampler, 1, 60)
    assert_samples_agree(sampling.result(HANG_SECONDS).sequences, alone)
    assert all(future.result(HANG_SECONDS) for future in passes) and step.result(HANG_SECONDS).metrics
    changed = [name for name, matrix in weights(training).items() if not np.array_equal(matrix, before[name])]
    assert changed


def test_another_clients_short_operations_pass_a_long_one(
    service: ServiceClient, tied_model: str, small_passes: None, events: list[str]
) -> None:
    """Each keeps its order and its gradients, as if it were alone."""

    def two() -> tuple[TrainingClient, TrainingClient]:
        return make_training_client(service, tied_model, seed=1), make_training_client(service, tied_model, 2, seed=2)

    def short(client: TrainingClient) -> list[tinker.APIFuture[Any]]:
        return [client.forward_backward(DATA[:1], "cross_entropy"), client.optim_step(STEP)]

    expected, expected_other = two()
    expected_loss = expected.forward_backward(DATA, "cross_entropy").result().metrics
    for future in short(expected_other):
        future.result()
    client, other = two()
    events.clear()
    with stopped(service._engine):
        long = client.forward_backward(DATA, "cross_entropy")
        passing = short(other)
    for future in passing:
        future.result(HANG_SECONDS)
    assert_repeats(long.result(HANG_SECONDS).metrics, expected_loss)
    assert events.index("optim") == 3, "a pass of each, another of the long one, and the step"
    assert_repeats(gradients(client), gradients(expected))
    assert_repeats(weights(other), weights(expected_other))
    drop_gradients(client)


def test_a_custom_loss_gives_way_too(
    service: ServiceClient, training: TrainingClient, sampler: SamplingClient, small_passes: None, events: list[str]
) -> None:
    with stopped(service._engine):
        trained = training.forward_backward_custom(DATA, lambda _, logprobs: (torch.cat(logprobs).sum(), {}))
        sampling = ask(sampler, 1, 100)
    sampling.result(HANG_SECONDS)
    trained.result(HANG_SECONDS)
    drop_gradients(training)
    during = "".join(event[0] for event in events)
    assert during.count("p") == 2 * PASSES
    assert during.count("ps") >= 12, during


def test_lockstep_repeats_to_the_bit_while_samplers_go_on(tied_model: str, tmp_path: Path, small_passes: None) -> None:
    """A loop that samples in the middle of a training operation, depending on what it gets, twice."""

    def once(home: Path) -> list[Any]:
        with ServiceClient(home=home, deterministic=True) as service:
            client = make_training_client(service, tied_model)
            sampler = client.save_weights_and_get_sampling_client().result()
            got: list[Any] = []

            async def converse(seed: int) -> None:
                tokens = random_tokens(5, seed)
                for turn in range(20):
                    reply = (await sampler.sample(prompt(tokens), 1, params(3 + seed, seed=turn, stop=[]))).sequences[0]
                    got.append((seed, turn, reply.tokens, np.array(reply.logprobs)))
                    tokens = [*tokens, *reply.tokens]

            async def main() -> None:
                async with asyncio.TaskGroup() as group:
                    for seed in range(5):
                        group.create_task(converse(seed))
                    got.append(outputs(await client.forward_backward(DATA, "cross_entropy")))

            asyncio.run(main())
            return [*got, gradients(client)]

    first = once(tmp_path / "first")
    kinds = [len(part) if isinstance(part, tuple) else "trained" for part in first[:-1]]
    assert 0 < kinds.index("trained") < len(kinds) - 1, "nothing was sampled meanwhile"
    assert_repeats(once(tmp_path / "second"), first)


def test_what_is_posted_has_waited_since_it_was_posted(
    service: ServiceClient, training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the worker has looked at it."""
    engine, futures = service._engine, []
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    for module in ("engine", "operation_queue"):
        monkeypatch.setattr(f"tinker_local_backend.engine.{module}.time", clock)

    def call() -> None:
        futures.append(training.forward([cross_entropy_datum(3, 0)], "cross_entropy"))

    before = engine.waits()
    with stopped(service._engine):
        engine.post(call, counts=True)
        now += 500.0
        during = engine.waits()["arrival"]
    until(lambda: futures)
    futures[0].result(HANG_SECONDS)
    after = engine.waits()
    assert during.waiting == 1 and during.longest_seconds == 500.0
    assert after["arrival"].waiting == 0 and after["arrival"].begun == 1 + (
        before["arrival"].begun if "arrival" in before else 0
    )
    assert after["forward"].longest_seconds == 500.0


def test_closing_between_two_parts_ends_the_operation(tied_model: str, tmp_path: Path, small_passes: None) -> None:
    closing = threading.Event()
    with ServiceClient(home=tmp_path) as service:
        client = service.create_lora_training_client(tied_model, rank=2, seed=0).result()
        state = client._run.state
        batch_pass, passes = trainer.batch_pass, []

        def first_waits(*args: Any, **options: Any) -> Any:
            passes.append(None)
            closing.set()
            until(lambda: service._engine._closing)
            return batch_pass(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "batch_pass", first_waits)
            future, behind = client.forward_backward(DATA, "cross_entropy"), client.optim_step(STEP)
            closing.wait(HANG_SECONDS)
            service.close()
        for late in (future, behind):
            with pytest.raises(EngineClosedError, match="closed before this request ran"):
                late.result(HANG_SECONDS)
        assert len(passes) == 1 and state.gradients is None


def test_the_longest_wait_is_known_by_kind(
    service: ServiceClient, training: TrainingClient, sampler: SamplingClient
) -> None:
    engine = service._engine
    before = engine.waits()
    with stopped(service._engine):
        futures = [training.forward_backward(DATA[:1], "cross_entropy"), training.optim_step(STEP)]
        waiting = engine.waits()
        assert waiting["forward_backward"].waiting == waiting["optim_step"].waiting == 1
        assert waiting["optim_step"].longest_seconds <= engine.waits()["optim_step"].longest_seconds
        asked = ask(sampler, 0, 3)
    for future in [*futures, asked]:
        future.result(HANG_SECONDS)
    after = engine.waits()
    stats = engine.sampler_stats()[training.get_info().model_name or ""]
    assert stats.waiting == 0 and 0 < stats.wait_p50 <= stats.wait_p99 <= stats.longest_wait
    for kind in ("forward_backward", "optim_step"):
        assert after[kind].waiting == 0
        assert after[kind].begun == (before[kind].begun if kind in before else 0) + 1
        assert after[kind].longest_seconds > 0
