"""The engine on a device that is not there: tensors with a shape, a dtype and a device, and no memory.

torch's FakeTensorMode refuses operations on tensors of different devices, as a GPU would. Here the engine's own decode step
and training pass run under it with device `cuda`, and every place that reads from the device is written down. Started by
placement.py as a process of its own, because torch without CUDA needs a library loaded before it (no_cuda.cpp).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tinker
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.models import fill_adapter, frozen_adapters, random_model
from benchmarks.gpu.placement import DECODING
from benchmarks.gpu.training_checks import LOSSES, policy_or_weights
from benchmarks.workload import random_tokens
from tinker_local_backend.engine import trainer
from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.generation import Generator
from tinker_local_backend.engine.lora import Adapter, LoraSpec
from tinker_local_backend.engine.optimizer import AdamW
from tinker_local_backend.engine.requests import SamplingRequest
from tinker_local_backend.engine.tickets import Ticket

ROOT = Path(__file__).resolve().parents[2]
ENGINE = str(ROOT / "tinker_local_backend")
DEVICE = torch.device("cuda", 0)
OPEN_SHAPE = 7
"""items that a result has whose number only the device would know"""


class ReadBacks(TorchFunctionMode):
    """Writes down where device tensors are read, and answers in their place: True, one, or zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()
        self._answers: dict[Any, Callable[[torch.Tensor], Any]] = {
            torch.Tensor.__bool__: lambda tensor: True,
            torch.Tensor.__int__: lambda tensor: 1,
            torch.Tensor.__index__: lambda tensor: 1,
            torch.Tensor.__float__: lambda tensor: 1.0,
            torch.Tensor.item: lambda tensor: (_zeros(tensor) + 1).item(),
            torch.Tensor.tolist: lambda tensor: _zeros(tensor).tolist(),
            torch.Tensor.numpy: _zeros,
            torch.Tensor.nonzero: lambda tensor: torch.zeros(
                OPEN_SHAPE, tensor.dim(), dtype=torch.int64, device=tensor.device
            ),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], FakeTensor) else None
        if tensor is None:
            return func(*args, **kwargs)
        if tensor.device.type == "cuda" and (func in self._answers or _to_the_host(func, args, kwargs)):
            self.places[func.__name__, _place(sys._getframe(1))] += 1
        if func in self._answers:
            return self._answers[func](tensor)
        return func(*args, **kwargs)


def _zeros(tensor: torch.Tensor) -> np.ndarray:
    kind = {torch.bool: bool}.get(tensor.dtype, np.float64 if tensor.is_floating_point() else np.int64)
    return np.zeros(tuple(tensor.shape), dtype=kind)


def _to_the_host(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.Tensor.cpu:
        return True
    if func is not torch.Tensor.to:
        return False
    wanted = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
    return any(torch.device(value).type == "cpu" for value in wanted)


def _place(frame: Any) -> str:
    """file:line of the innermost frame of the engine."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(ENGINE):
            return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the engine"


def _place_of(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(ENGINE)]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "outside the engine"


def move(model: BaseModel, mode: FakeTensorMode) -> None:
    """Put a model on the device that is not there. Weights that were one tensor stay one."""
    moved: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            with mode:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
            moved[id(tensor)] = torch.nn.Parameter(empty, False) if isinstance(tensor, torch.nn.Parameter) else empty
        return moved[id(tensor)]

    for module in model._model.modules():
        tables: Any = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    table[name] = fake(value)
    model.device = DEVICE


def move_adapter(adapter: Adapter, mode: FakeTensorMode) -> None:
    """The same for an adapter's matrices."""
    for table in (adapter.a, adapter.b):
        for name, matrix in table.items():
            with mode:
                table[name] = torch.empty(matrix.shape, dtype=matrix.dtype, device=DEVICE)
            table[name].requires_grad_(matrix.requires_grad)


def decode(model: BaseModel, adapters: list[Adapter]) -> Callable[[], None]:
    """Prefill, then a decode step, of rows with and without adapters, limits and greedy choice."""
    generator = Generator(model, 4096, iter(range(1, 100)).__next__)
    for i, adapter in enumerate([*adapters, None]):
        prompt = tuple(random_tokens(model.vocab_size, 12, seed=i))
        request = SamplingRequest(
            prompt, adapter, 2, max_tokens=8, temperature=(1.0, 0.7, 0.0)[i % 3], top_k=20 * (i % 2), top_p=0.9, seed=i
        )
        generator.add(Ticket(request, lambda _: None, lambda: False))
    while generator.running < 2 * (len(adapters) + 1):
        generator.step()
    return generator.step


def _raise(generator: Generator, affected: Any, rows: int, error: Exception) -> None:
    """In place of the generator's recovery, which would hide where an error came from."""
    raise error


def train(model: BaseModel, state: trainer.TrainState, loss_fn: str) -> Callable[[], None]:
    """Forward, backward and an optimizer step over datums that share a prompt, with and without recomputed layers."""
    data = policy_or_weights(loss_fn, model.vocab_size)

    def run() -> None:
        for recompute in (False, True):
            original = model.recompute

            def forced(_: bool, original: Any = original, recompute: bool = recompute) -> Any:
                return original(recompute)

            with mock.patch.object(model, "recompute", forced):
                trainer.forward_backward(model, state, data, loss_fn, None, True)
        trainer.optim_step(state, tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))

    return run


def examine(name: str, prepare: Callable[[], Callable[[], None]]) -> dict[str, Any]:
    """Read-backs of one action, or the error with its place."""
    seen = ReadBacks()
    found: dict[str, Any] = {"action": name, "error": None, "place": None, "read_backs": []}
    try:
        with seen, mock.patch.object(Generator, "_recover", _raise):
            action = prepare()
            seen.places.clear()
            action()
    except Exception as error:
        found["error"], found["place"] = f"{type(error).__name__}: {error}", _place_of(error)
    found["read_backs"] = [[what, place, count] for (what, place), count in seen.places.items()]
    return found


def main() -> None:
    """Print what was found as JSON."""
    os.environ["TINKER_LOCAL_ACTIVATION_MB"] = "256"  # there is no driver to ask for free memory
    FakeTensor.tolist = lambda self: torch.Tensor.tolist(self)  # one reading, not one for each item
    cpu = torch.device("cpu")
    model = random_model("tiny", cpu, torch.bfloat16)
    adapters = list(frozen_adapters(model, rank=4, count=2))
    trained = model.new_adapter(LoraSpec(4), seed=0)
    fill_adapter(trained, seed=0)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    move(model, mode)
    for adapter in (*adapters, trained):
        move_adapter(adapter, mode)
    with mode:
        state = trainer.TrainState(trained, AdamW(trained.parameters()))
        found = [examine(DECODING, lambda: decode(model, adapters))]
        for loss_fn in LOSSES:
            found.append(examine(f"training pass, {loss_fn}", lambda loss_fn=loss_fn: train(model, state, loss_fn)))
    print(json.dumps(found), flush=True)
    os._exit(0)  # the stand-in's autograd thread would not end


if __name__ == "__main__":
    main()
