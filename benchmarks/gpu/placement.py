"""Check that all tensors of a decode step and a training pass are on the device, and list where the host reads from it.

Without a GPU the actions run on a pretended one (pretended_gpu.py), which refuses operations on mixed devices.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tinker
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.models import fill_adapter, frozen_adapters, random_module, shape_of
from benchmarks.gpu.pretended_gpu import GPU, pretend
from benchmarks.gpu.training_checks import LOSSES, policy_or_weights
from benchmarks.gpu.visit import Visit
from benchmarks.models import word_tokenizer
from benchmarks.workload import random_tokens
from tinker_local_backend.engine import models
from tinker_local_backend.engine.cuda.selfcheck import checked_execution
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.models import adopt_module
from tinker_local_backend.engine.sampling.generation import Generator
from tinker_local_backend.engine.sampling.requests import SamplingRequest
from tinker_local_backend.engine.sampling.sampler import Ticket
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.trainer import finish

ROOT = Path(__file__).resolve().parents[2]
ENGINE = str(ROOT / "tinker_local_backend")
READS = ("__bool__", "__int__", "__index__", "__float__", "item", "tolist", "numpy", "nonzero", "cpu")


def run(visit: Visit) -> None:
    """Check for mixed devices, and list read-backs."""
    add = visit.findings.table(
        "Where the host reads from the device (each is a wait), per action", ["action", "what", "where", "times"]
    )
    for examined in examine(visit.device if visit.on_gpu else None):
        detail = f"{examined.place}: {examined.error}" if examined.error else ""
        visit.findings.require(f"placement: {examined.action}", examined.error is None, detail[:400])
        for (what, place), count in examined.reads.items():
            add([examined.action, what, place, str(count)])


@dataclass
class Examined:
    """Result of one action: the error with its place in the engine, and the read-backs by (function, place)."""

    action: str
    reads: Counter[tuple[str, str]] = field(default_factory=Counter)
    error: str | None = None
    place: str | None = None


def examine(device: torch.device | None) -> Iterator[Examined]:
    """Run a decode step, and a training pass of each loss, on this GPU; None: on a pretended one."""
    # On a pretended GPU the check at start replaces kernels by the reference.
    checked = mock.patch.object(models, "start", checked_execution)
    with pretend() if device is None else nullcontext(), checked if device is None else nullcontext():
        device = device or GPU
        shape = shape_of("tiny")
        module: Any = random_module(shape, torch.device("cpu"), torch.bfloat16)
        model = adopt_module("random/tiny", module.to(device), word_tokenizer(shape.vocab))
        adapters = list(frozen_adapters(model, rank=4, count=2))
        trained = model.new_adapter(LoraSpec(4), seed=0)
        fill_adapter(trained, seed=0)
        state = trainer.TrainState.new(trained)
        yield _examined("one decode step", lambda: _decode(model, adapters))
        for loss_fn in LOSSES:
            yield _examined(f"training pass, {loss_fn}", lambda loss_fn=loss_fn: _train(model, state, loss_fn))


def _examined(action: str, prepare: Callable[[], Callable[[], None]]) -> Examined:
    examined = Examined(action)
    reads = ReadBacks(examined.reads)
    try:
        with mock.patch.object(Generator, "_recover", _raise):
            act = prepare()
            with reads:
                act()
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(ENGINE)]
        examined.error = f"{type(error).__name__}: {error}"
        examined.place = _place(frames[-1].filename, frames[-1].lineno) if frames else "outside the engine"
    return examined


def _raise(generator: Generator, affected: Any, rows: int, error: Exception) -> None:
    """Replaces the generator's recovery, which would hide the origin of an error."""
    raise error


class ReadBacks(TorchFunctionMode):
    """Records where the host reads tensors of a GPU."""

    def __init__(self, places: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        on_gpu = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == GPU.type
        if on_gpu and (name in READS or _to_the_host(name, args, kwargs)):
            self._places[name, _place_of(sys._getframe(1))] += 1
        return func(*args, **kwargs)


def _to_the_host(name: str, args: Any, kwargs: Any) -> bool:
    devices = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
    return name == "to" and any(torch.device(value).type == "cpu" for value in devices)


def _place_of(frame: Any) -> str:
    """file:line of the innermost frame of the engine."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(ENGINE):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "outside the engine"


def _place(filename: str, line: int | None) -> str:
    return f"{Path(filename).relative_to(ROOT)}:{line}"


def _decode(model: BaseModel, adapters: list[Adapter]) -> Callable[[], None]:
    """Prefill, then a decode step, of rows with and without adapters, limits and greedy choice."""
    generator = Generator(model, 4096, iter(range(1, 100)).__next__)
    for i, adapter in enumerate([*adapters, None]):
        prompt = tuple(random_tokens(model.vocab_size, 12, seed=i))
        request = SamplingRequest(
            prompt, adapter, 2, max_tokens=8, temperature=(1.0, 0.7, 0.0)[i % 3], top_k=20 * (i % 2), top_p=0.9, seed=i
        )
        generator.add(Ticket(request, lambda _: None, lambda: False))
    while generator.stats.running < 2 * (len(adapters) + 1):
        generator.step()

    def step() -> None:
        generator.step()

    return step


def _train(model: BaseModel, state: trainer.TrainState, loss_fn: str) -> Callable[[], None]:
    """Forward, backward and an optimizer step over datums that share a prompt, with and without recomputed layers."""
    data = policy_or_weights(loss_fn, model.vocab_size)

    def act() -> None:
        original = model.recompute
        for recompute in (False, True):
            with mock.patch.object(model, "recompute", lambda _, recompute=recompute: original(recompute)):
                finish(trainer.forward_backward(model, state, data, loss_fn, None, True))
        trainer.optim_step(state, tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))

    return act
