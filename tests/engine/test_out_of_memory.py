"""Out of memory in the middle of a call: smaller passes, then recomputation, and the result of a call that always fitted."""

import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import (
    STEP,
    assert_close,
    assert_near,
    cross_entropy_datum,
    drop_gradients,
    gradients,
    near,
    pass_tokens,
    policy_datum,
    weights,
)
from tests.waiting import HANG_SECONDS
from tinker_local_backend import RequestError, TrainingClient
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.micro_batch import MicroBatch
from tinker_local_backend.engine.training.trainer import finish

LOG = "tinker_local_backend"
LENGTHS = (40, 21, 33, 8, 9, 50, 17, 26)


class Memory:
    """Room for `tokens` in one pass (`recomputed` when its layers are recomputed); more fails where `fails` says."""

    def __init__(self, tokens: int, recomputed: int | None = None, fails: str = "forward"):
        self.tokens, self.recomputed, self.fails = tokens, recomputed or tokens, fails
        self.passes: list[int] = []
        """tokens of every attempt"""
        self.gradients_wanted: list[bool] = []
        self.installed = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        original = BaseModel.training_pass
        memory = self
        self.installed = True

        def refuse(*_: object) -> None:
            raise torch.OutOfMemoryError("no memory left")

        def training_pass(
            self: BaseModel, tokens_T: torch.Tensor, *rest: Any, gradient: bool = True, **options: Any
        ) -> Any:
            memory.passes.append(len(tokens_T))
            memory.gradients_wanted.append(gradient)
            too_much = len(tokens_T) > (memory.recomputed if self._recomputation.on else memory.tokens)
            if too_much and (memory.fails == "forward" or not gradient):
                refuse()
            hidden, backward = original(self, tokens_T, *rest, gradient=gradient, **options)
            return hidden, refuse if too_much else backward

        patch.setattr(BaseModel, "training_pass", training_pass)


Call = Callable[[TrainingClient, list[tinker.Datum]], tinker.ForwardBackwardOutput]


def with_and_without(
    training: TrainingClient, data: list[tinker.Datum], call: Call, memory: Memory
) -> tuple[tinker.ForwardBackwardOutput, tinker.ForwardBackwardOutput]:
    """The outputs of a call with little memory and with enough; everything that counts in them is equal. No captured step is left
    of other tests, whose memory a pass would get first.
    """
    training._run.model.execution.release()
    expected = call(training, data)
    expected_gradients = gradients(training)
    drop_gradients(training)
    with pytest.MonkeyPatch.context() as patch:
        memory.install(patch)
        found = call(training, data)
    assert_close(gradients(training), expected_gradients, rtol=1e-5)
    for ours, theirs in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        assert_near(ours["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=1e-5)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert found.metrics[name] == near(value, rel=1e-4, abs=1e-5), name
    return found, expected


def ppo(training: TrainingClient, data: list[tinker.Datum]) -> tinker.ForwardBackwardOutput:
    return training.forward_backward(data, "ppo").result()


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_pass_that_is_too_large_is_halved_until_it_fits(
    training: TrainingClient, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    data = [policy_datum(n, n, training) for n in LENGTHS]
    memory = Memory(60, fails=fails)
    with caplog.at_level(logging.WARNING, LOG):
        with_and_without(training, data, ppo, memory)
    total = sum(LENGTHS)
    assert memory.passes[0] == total
    assert sum(tokens for tokens in memory.passes if tokens <= 60) == total
    notes = [record.getMessage() for record in caplog.records if record.name.startswith(LOG)]
    assert notes[0] == f"out of memory with {total} tokens in one pass; continuing with at most {-(-total // 2)}"
    assert len(notes) == sum(tokens > 60 for tokens in memory.passes)


def test_what_one_pass_has_shown_holds_for_the_others(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four passes of the same size: only the first of them has to fail."""
    pass_tokens(monkeypatch, 100)
    data = [policy_datum(25, n, training) for n in range(16)]
    memory = Memory(60)
    with_and_without(training, data, ppo, memory)
    assert memory.passes == [100] + [50] * 8


def test_one_datum_that_is_too_large_gets_its_layers_recomputed(
    training: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    data = [policy_datum(n, n, training) for n in (30, 90, 20)]
    memory = Memory(60, recomputed=100)
    with caplog.at_level(logging.WARNING, LOG):
        with_and_without(training, data, ppo, memory)
    assert sorted(memory.passes)[-3:] == [90, 90, 140]
    assert "out of memory with one datum of 90 tokens; recomputing layers from now on" in caplog.text


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_datum_that_never_fits_is_named_and_no_step_is_taken_without_it(training: TrainingClient, fails: str) -> None:
    fitting = [policy_datum(n, n, training) for n in (30, 20)]
    ppo(training, fitting)
    before = gradients(training)
    data = [policy_datum(n, n, training) for n in (30, 20, 90, 10)]
    with pytest.MonkeyPatch.context() as patch:
        memory = Memory(60, fails=fails)
        memory.install(patch)
        with pytest.raises(RequestError, match=r"data\[2\] of 90 tokens does not fit into memory.*shorten it"):
            ppo(training, data)
        assert memory.passes.count(90) == 2
        for name, matrix in gradients(training).items():
            np.testing.assert_array_equal(matrix, before[name])
        ppo(training, fitting)
    assert_close(gradients(training), {name: 2 * matrix for name, matrix in before.items()}, rtol=1e-6)
    old = weights(training)
    with pytest.raises(RequestError, match=r"no step was taken.*data\[2\] of 90 tokens does not fit"):
        training.optim_step(STEP).result()
    assert all(np.array_equal(matrix, old[name]) for name, matrix in weights(training).items())
    ppo(training, fitting)
    training.optim_step(STEP).result()
    assert any(not np.array_equal(matrix, old[name]) for name, matrix in weights(training).items())


def test_a_pass_that_fails_at_its_very_end_is_not_counted_twice(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [policy_datum(n, n, training) for n in LENGTHS]
    memory = Memory(10_000)
    original, calls = MicroBatch.of_positions, []

    def of_positions(self: MicroBatch, scores: torch.Tensor) -> torch.Tensor:
        calls.append(memory.installed)
        if calls.count(True) == 1:
            raise torch.OutOfMemoryError("no memory left")
        return original(self, scores)

    monkeypatch.setattr(MicroBatch, "of_positions", of_positions)
    with_and_without(training, data, ppo, memory)
    assert len(memory.passes) > 2 and memory.passes[0] == sum(memory.passes[1:])


def test_other_errors_are_not_retried(training: TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def training_pass(*_: object, **__: object) -> None:
        calls.append(1)
        raise RuntimeError("a bug")

    monkeypatch.setattr(BaseModel, "training_pass", training_pass)
    with pytest.raises(RuntimeError, match="a bug"):
        training.forward_backward([cross_entropy_datum(5, n) for n in range(4)], "cross_entropy").result()
    assert len(calls) == 1 and training._run.state.gradients is None


# Accumulation steps


@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (2, 2), (5, 5), (8, 8), (100, 8)])
def test_accumulation_steps_are_the_least_number_of_passes(
    training: TrainingClient, monkeypatch: pytest.MonkeyPatch, steps: int, passes: int
) -> None:
    data = [policy_datum(n, n, training) for n in LENGTHS]
    memory = Memory(10_000)

    def call(client: TrainingClient, data: list[tinker.Datum]) -> tinker.ForwardBackwardOutput:
        monkeypatch.setenv("TINKER_LOCAL_GRAD_ACCUM_STEPS", str(steps) if memory.installed else "1")
        return ppo(client, data)

    with_and_without(training, data, call, memory)
    assert len(memory.passes) == passes
    assert sum(memory.passes) == sum(LENGTHS)


# A custom loss


def squares(data: Sequence[tinker.Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Not linear, and its terms belong to several datums at once."""
    total = torch.cat([lp.reshape(-1) for lp in logprobs]).sum()
    spread = torch.stack([lp.mean() for lp in logprobs]).std()
    return total * spread * 0.01 + sum((lp**2).mean() for lp in logprobs), {"spread": float(spread.detach())}


def custom(training: TrainingClient, data: list[tinker.Datum]) -> tinker.ForwardBackwardOutput:
    return training.forward_backward_custom(data, squares).result()


def test_a_custom_loss_that_fits_runs_the_model_once(training: TrainingClient) -> None:
    data = [cross_entropy_datum(n, n) for n in LENGTHS]
    memory = Memory(10_000)
    with_and_without(training, data, custom, memory)
    assert memory.passes == [sum(LENGTHS)] and memory.gradients_wanted == [True]


def test_a_custom_loss_in_parts_runs_the_model_twice(training: TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [cross_entropy_datum(n, n) for n in LENGTHS]
    memory = Memory(10_000)

    def call(client: TrainingClient, data: list[tinker.Datum]) -> tinker.ForwardBackwardOutput:
        pass_tokens(monkeypatch, 60 if memory.installed else 10_000)
        return custom(client, data)

    with_and_without(training, data, call, memory)
    half = len(memory.passes) // 2
    assert half > 1 and memory.gradients_wanted == [False] * half + [True] * half
    assert sum(memory.passes) == 2 * sum(LENGTHS) and max(memory.passes) <= 60


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_custom_loss_that_does_not_fit_after_all_goes_on_in_parts(training: TrainingClient, fails: str) -> None:
    data = [cross_entropy_datum(n, n) for n in LENGTHS]
    memory = Memory(60, fails=fails)
    with_and_without(training, data, custom, memory)
    assert memory.passes[0] == sum(LENGTHS)
    assert memory.gradients_wanted[0] and not memory.gradients_wanted[1]
    assert sum(tokens for tokens in memory.passes if tokens <= 60) == 2 * sum(LENGTHS)


# The real thing


def train_under_a_limit(model_path: str) -> None:
    """Run in a process of its own: a call that needs far more than the address space left, then the same call without limit."""
    pass_tokens(pytest.MonkeyPatch(), 1 << 14)
    model = load_model(model_path, torch.device("cpu"), torch.float32)
    adapter = model.new_adapter(LoraSpec(4), seed=0)
    state = trainer.TrainState.new(adapter)
    data = [cross_entropy_datum(256, i) for i in range(64)]

    def run(data: list[tinker.Datum]) -> tuple[float, list[torch.Tensor]]:
        output = finish(trainer.forward_backward(model, state, data, "cross_entropy", None, backward=True))
        assert state.gradients is not None
        taken, state.gradients = state.gradients, None
        return output.metrics["loss:sum"], taken

    run(data[:1])
    size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, ((int(size.split()[1]) << 10) + (60 << 20), hard))
    loss, found = run(data)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    expected_loss, expected = run(data)
    assert abs(loss - expected_loss) < 1e-5 * abs(expected_loss)
    for left, right in zip(found, expected, strict=True):
        assert float((left - right).abs().max()) <= 1e-4 * float(right.abs().max())


@pytest.mark.slow
@pytest.mark.cpu_promise
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of the address space as Linux has them")
def test_when_memory_really_runs_out(tied_model: str) -> None:
    code = f"from tests.engine.test_out_of_memory import train_under_a_limit; train_under_a_limit({tied_model!r})"
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "TINKER_LOCAL_ACTIVATION_MB": "100000"}
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert process.returncode == 0, process.stderr
    assert "out of memory with 16384 tokens in one pass; continuing with at most 8192" in process.stderr
