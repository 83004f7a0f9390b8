"""A base model whose frozen weights are sharded across processes: torch's FSDP2 with a custom schedule.

`fully_shard` shards, gathers and frees the weights. Its hooks, which expect every process to run the same passes, are not used:
here ranks have different numbers of datums and requests. So the ranks agree on the next pass, forward or backward through all
layers in order, and a rank with nothing to compute only takes part in the gathering. A rank that fails in the middle of a pass
still gathers its remaining layers, so that no other rank hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tinker_local_backend.errors import ReplicaError


class Step(IntEnum):
    """A rank's next step. All ranks execute the largest one."""

    REST = 0
    """the rank has finished its turn"""
    FORWARD = 1
    BACKWARD = 2
    FAILED = 3
    """the model could not be loaded"""


class Ranks:
    """The process group, from one rank's view. Used by one thread at a time.

    Args:
        device: of this rank.
        explain: turns a failed collective into an error for the user.
    """

    def __init__(self, device: torch.device, explain: Callable[[RuntimeError], ReplicaError]):
        self.device = device
        self.lost: ReplicaError | None = None
        """why the ranks can no longer run collectives"""
        self._explain = explain

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap a collective. Raises ReplicaError if it or an earlier one failed: the state of the other ranks is unknown."""
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except RuntimeError as error:
            self.lost = self._explain(error)
            raise self.lost from error

    def agree(self, wish: Step) -> Step:
        """The next step of all ranks. Blocks until every rank has called it."""
        wishes = torch.tensor(int(wish))
        with self.together():
            dist.all_reduce(wishes, dist.ReduceOp.MAX)
        return Step(int(wishes))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wrap the construction of Shards, on all ranks. Raises ReplicaError if it failed on another rank."""
        try:
            yield
        except Exception:
            self.agree(Step.FAILED)
            raise
        if self.agree(Step.REST) is Step.FAILED:
            raise ReplicaError("another rank could not load its shard of the base model: see its output")


class Unsharded:
    """Unsharded weights: no turn-taking."""

    whole = True

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        yield


class Shards:
    """The weights of one model in FSDP units: each layer, and the rest (embeddings, last norm, head).

    Between turns a rank has its shard of every unit. During a pass it also has the full rest, the layer that is being computed,
    and the next layer, which is gathered meanwhile.

    Args:
        model: on any device, with LoRA linears; its parameters become shards on the device of `ranks`.
        layers: the model's layers in the order of a forward pass.
    """

    whole = False

    def __init__(self, ranks: Ranks, model: nn.Module, layers: Sequence[nn.Module]):
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)  # FSDP uses this thread's current device
        self._ranks = ranks
        assert dist.group.WORLD is not None
        # Wrapped in modules that are never called, so that FSDP's hooks never run.
        shard = partial(fully_shard, mesh=DeviceMesh.from_group(dist.group.WORLD, ranks.device.type))
        self._layers = [shard(nn.Sequential(layer)) for layer in layers]
        of_layers = {parameter for layer in layers for parameter in layer.parameters()}
        self._rest = shard(nn.Sequential(model), ignored_params=of_layers)
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run_layer, index, layer.forward)
        self._in_turn = False
        self._order: list[int] = []
        self._current = -1
        """index in `_order` of the gathered layer"""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wrap this rank's computation. All ranks must take a turn of this model; it ends when all have finished."""
        self._in_turn = True
        try:
            yield
        finally:
            self._in_turn = False
            if self._ranks.lost is None:
                self._rest.reshard()
                while (agreed := self._ranks.agree(Step.REST)) is not Step.REST:
                    self._take_part(agreed)

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        """Wrap a forward or backward pass. The rest stays gathered until the next forward pass or the end of the turn."""
        if not self._in_turn:
            raise RuntimeError("a model with sharded weights computes only in turns, which all ranks take together")
        if step is Step.FORWARD:
            self._rest.reshard()
        while (agreed := self._ranks.agree(step)) is not step:  # backward goes first: activations wait for it
            self._take_part(agreed)
        with self._gathering(step):
            yield

    def _take_part(self, step: Step) -> None:
        """Gather the layers in a pass of other ranks."""
        with self._gathering(step):
            pass
        self._rest.reshard()

    @contextmanager
    def _gathering(self, step: Step) -> Iterator[None]:
        """Gather every layer once and in order, even those the body never reaches."""
        self._order, self._current = list(range(len(self._layers))), -1
        if step is Step.BACKWARD:
            self._order.reverse()
        with self._collective():
            if step is Step.FORWARD:
                self._rest.unshard()
            self._layers[self._order[0]].unshard(async_op=True)
        try:
            yield
        finally:
            if self._ranks.lost is None:
                for index in self._order[self._current + 1 :]:
                    self._gather_next(index)
            self._layers[self._order[self._current]].reshard()
            self._order = []

    @contextmanager
    def _collective(self) -> Iterator[None]:
        # Autograd rejects tensors that were created in inference mode.
        with self._ranks.together(), torch.inference_mode(False), torch.no_grad():
            yield

    def _gather_next(self, index: int) -> None:
        """Gather this layer, free the previous one, and start gathering the next."""
        if self._current >= 0 and self._order[self._current] == index:
            return  # called again for a layer with several outputs
        new = self._current + 1
        if self._order[new : new + 1] != [index]:
            raise RuntimeError(f"layer {index} is computed out of turn, after {self._order[:new]}")
        with self._collective():
            self._layers[index].unshard()
            if new > 0:
                self._layers[self._order[new - 1]].reshard()
            if new + 1 < len(self._order):
                self._layers[self._order[new + 1]].unshard(async_op=True)
        self._current = new

    def _run_layer(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._gather_next(index)
        output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._gather_next(index))
        return output
