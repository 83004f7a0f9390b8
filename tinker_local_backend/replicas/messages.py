"""What goes from rank 0 to the others, and what each rank does with it in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tinker
import torch
import torch.distributed as dist

from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.model.sharding import Turn
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.datums import LossConfig
from tinker_local_backend.engine.training.optimizer import AdamW
from tinker_local_backend.engine.training.parts import Parts


@dataclass(frozen=True)
class Command:
    """`kind` and `arguments` of one of Follower's methods. The answer carries the number."""

    number: int
    kind: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a pass. `indices` are its datums' places in the whole call."""

    indices: list[int]
    data: list[tinker.Datum]
    loss_fn: str
    loss_fn_config: LossConfig
    backward: bool

    def run(self, model: BaseModel, state: trainer.TrainState) -> Parts[tinker.ForwardBackwardOutput | None]:
        """As trainer.forward_backward; None for a share without datums."""
        if not self.data:
            return None
        return (
            yield from trainer.forward_backward(
                model, state, self.data, self.loss_fn, self.loss_fn_config, self.backward, self.indices
            )
        )


class Progress:
    """One rank's share of a pass, a part of it in each turn of all ranks."""

    def __init__(self, parts: Parts[tinker.ForwardBackwardOutput | None]):
        self._parts = parts
        self._ended = False
        self._output: tinker.ForwardBackwardOutput | None = None
        self._failure: Exception | None = None

    def step(self, turn: Turn) -> None:
        """The next part, if there is one. An error is kept for `result`: the other ranks go on with theirs."""
        if self._ended:
            return
        try:
            next(self._parts)
            turn.more = True
        except StopIteration as end:
            self._ended, self._output = True, end.value
        except Exception as error:
            self._ended, self._failure = True, error

    def result(self) -> tinker.ForwardBackwardOutput | None:
        """After the last part."""
        if self._failure is not None:
            raise self._failure
        return self._output


@dataclass(frozen=True, eq=False)
class RunState:
    """An adapter, its optimizer's moments and what waits for a step, on the CPU."""

    spec: LoraSpec
    a: dict[str, torch.Tensor]
    b: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    gradients: list[torch.Tensor] | None = None
    """that wait for a step"""


def on_cpu(table: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: matrix.detach().cpu() for name, matrix in table.items()}


def packed(state: trainer.TrainState) -> RunState:
    adapter = state.adapter
    moments = state.optimizer.state_tensors([name for name, _ in adapter.named_parameters()])
    pending = None if state.gradients is None else [part.cpu() for part in state.gradients]
    return RunState(adapter.spec, on_cpu(adapter.a), on_cpu(adapter.b), on_cpu(moments), pending)


def unpacked(run: RunState, model: BaseModel) -> trainer.TrainState:
    """The same state on the device of this rank's model."""
    a, b = (
        {name: matrix.to(model.device, copy=True).requires_grad_() for name, matrix in table.items()}
        for table in (run.a, run.b)
    )
    adapter = Adapter(run.spec, a, b)
    optimizer = AdamW(adapter.parameters())
    optimizer.load_state_tensors([name for name, _ in adapter.named_parameters()], run.optimizer)
    pending = None if run.gradients is None else [part.to(model.device, copy=True) for part in run.gradients]
    return trainer.TrainState(adapter, optimizer, pending)


def reduce_gradients(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sums over all ranks, the same bits on each. Every rank must call it, in the same order of calls."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def divide(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of datums for each rank, with about as many tokens each: the longest first, each to whoever has least.

    Ties go to the lower index and the lower rank, so that the same lengths are always divided in the same way.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += lengths[index]
    return [sorted(share) for share in shares]
