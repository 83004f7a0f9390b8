"""A loss or gradient that is NaN or infinite stops the run and names the datums, or its step is skipped and counted."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from recipes import rl_basic, sl_basic
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.runs.finite import SKIPPED, UpdateGuard
from tinker_cookbook.utils.files import read_jsonl
from tinker_local_backend.engine.training import trainer

RL = ("groups_per_batch=3", "group_size=4", "num_test=2", "max_tokens=16", "on_zero_advantages=skip", "save_every=1")
SL = ("batch_size=4", "test_size=0", "save_every=1")
RECIPES = [(rl_basic, RL), (sl_basic, SL)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


@pytest.fixture
def second_pass_overflows(home: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """In the second pass that trains, one datum's numbers are beyond all bounds. How many passes there were."""
    original, passes = trainer.forward_backward, [0]

    def broken(model: Any, state: Any, data: Any, loss_fn: str, config: Any, backward: bool, **more: Any) -> Any:
        passes[0] += backward
        if backward and passes[0] == 2:
            key, value = ("logprobs", -500.0) if "logprobs" in data[1].loss_fn_inputs else ("weights", 3e38)
            tensor = data[1].loss_fn_inputs[key]
            data[1].loss_fn_inputs[key] = tinker.TensorData.from_numpy(np.full_like(tensor.to_numpy(), value))
            if key == "logprobs":  # somewhere it must count
                advantages = np.ones_like(tensor.to_numpy())
                data[1].loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(advantages)
        return original(model, state, data, loss_fn, config, backward, **more)

    monkeypatch.setattr(trainer, "forward_backward", broken)
    yield passes


def run(recipe: Any, arguments: tuple[str, ...], log_path: Path, *more: str) -> list[dict[str, Any]]:
    argv = [*arguments, "max_steps=3", "eval_every=0", "lora_rank=4", f"log_path={log_path}", *more]
    run_recipe(recipe.CLIConfig, recipe.main, argv=argv)
    return [row for row in read_jsonl(log_path / "metrics.jsonl") if "optim/lr" in row]


@pytest.mark.parametrize(("recipe", "arguments"), RECIPES, ids=["rl", "sl"])
def test_the_run_stops_names_the_datum_and_keeps_the_steps_before(
    second_pass_overflows: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: Any,
    arguments: tuple[str, ...],
) -> None:
    with pytest.raises(SystemExit):
        run(recipe, arguments, tmp_path / "log")
    said = capsys.readouterr().err
    assert "data[1] is not finite" in said and "on_nonfinite=skip continues without such a step" in said
    assert [record["batch"] for record in read_jsonl(tmp_path / "log" / "checkpoints.jsonl")] == [1]


@pytest.mark.parametrize(("recipe", "arguments"), RECIPES, ids=["rl", "sl"])
def test_the_step_is_skipped_and_counted(
    second_pass_overflows: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: Any,
    arguments: tuple[str, ...],
) -> None:
    rows = run(recipe, arguments, tmp_path / "log", "on_nonfinite=skip")
    assert second_pass_overflows == [3]
    assert [row.get(SKIPPED) for row in rows] == [None, 1, None]
    assert ["optim/grad_norm" in row for row in rows] == [True, False, True]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "data[1] is not finite" in line]
    assert line.endswith("the step is skipped")


class TestGuard:
    """On a service that reports NaN instead of raising."""

    def output(self, loss: float, *logprobs: float) -> tinker.ForwardBackwardOutput:
        outputs = [{"logprobs": tinker.TensorData.from_torch(torch.tensor([value]))} for value in logprobs]
        return tinker.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={"loss:sum": loss}
        )

    async def _there(self, value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    def there(self, value: Any) -> Awaitable[Any]:
        return self._there(value)

    def test_the_datums_without_a_finite_logprob_are_named(self) -> None:
        broken = self.output(float("nan"), -1.0, float("nan"), -2.0)
        with pytest.raises(TrainingError, match=r"a loss of nan; logprobs that are not finite: data\[1\]"):
            asyncio.run(UpdateGuard("stop").forward_backward(self.there(broken)))

    def test_or_the_step_counts_as_skipped(self, caplog: pytest.LogCaptureFixture) -> None:
        async def update(guard: UpdateGuard) -> list[Any]:
            step = tinker.types.OptimStepResponse(metrics={"grad_norm": 1.0})
            found = []
            for loss in (float("inf"), 2.0):
                output = await guard.forward_backward(self.there(self.output(loss, -1.0)))
                found.append((output, await guard.optim_step(self.there(step))))
            return found

        guard = UpdateGuard("skip")
        with caplog.at_level(logging.WARNING):
            (skipped, its_step), (kept, taken) = asyncio.run(update(guard))
        assert skipped is None and its_step is None and kept is not None and taken is not None
        assert guard.metrics() == {SKIPPED: 1} and len(caplog.messages) == 1

    def test_other_errors_are_not_tolerated(self) -> None:
        guard = UpdateGuard("skip")
        with pytest.raises(KeyError):
            asyncio.run(guard.forward_backward(self.there(KeyError("x"))))
        with pytest.raises(KeyError):
            asyncio.run(guard.optim_step(self.there(KeyError("x"))))
        assert guard.metrics() == {}
