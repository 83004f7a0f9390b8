"""A base model whose frozen weights are divided over processes: torch's FSDP2, with a schedule of our own.

`fully_shard` divides the weights, gathers them and frees them. When that happens is decided here and not by its hooks, which
expect every process to run the same passes: here each has its own datums and requests, as many as it has. So the ranks agree
on what comes next, a forward or a backward pass of all layers in order, and whoever has nothing to compute takes part in
the gathering alone. An error in the middle of a pass leaves no rank behind: the one that failed gathers the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tinker_local_backend.errors import ReplicaError


class Step(IntEnum):
    """What a rank would do next. The largest of all ranks' wishes is what they do."""

    REST = 0
    """it has nothing left"""
    AGAIN = 1
    """it has nothing left in this turn"""
    FORWARD = 2
    BACKWARD = 3
    FAILED = 4
    """it could not load the model"""


class Ranks:
    """The processes that share base weights, as one of them sees it. Used by the engine's worker alone.

    Args:
        device: where this rank computes.
        explain: what a failed collective means, for the user.
    """

    def __init__(self, device: torch.device, explain: Callable[[RuntimeError], ReplicaError]):
        assert dist.group.WORLD is not None
        self.device = device
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        self.lost: ReplicaError | None = None
        """why the ranks do nothing together any more"""
        self.loaded = 0
        """models whose weights all ranks have"""
        self._explain = explain

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around a collective. Raises ReplicaError when it fails, and ever after: nobody knows what the others did."""
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except RuntimeError as error:
            self.lost = self._explain(error)
            raise self.lost from error

    def agree(self, wish: Step) -> Step:
        """What comes next. Blocks until every rank has asked."""
        wishes = torch.tensor(int(wish))
        with self.together():
            dist.all_reduce(wishes, dist.ReduceOp.MAX)
        return Step(int(wishes))

    def have_loaded(self) -> None:
        """This rank has its part of a model. Raises ReplicaError when another one could not load its own."""
        self.loaded += 1
        if self.agree(Step.REST) is Step.FAILED:
            raise ReplicaError("another rank could not load its part of the base model: see what it printed")

    def take_part_in_loading(self, load: Callable[[], Any]) -> Any:
        """`load()`, which makes Shards. An error before it has them is made known to the other ranks, which wait for it."""
        before = self.loaded
        try:
            return load()
        except Exception:
            if self.loaded == before:
                self.agree(Step.FAILED)
            raise


@dataclass(eq=False)
class Turn:
    """What ranks do between two rests."""

    more: bool = False
    """set by a rank that goes on in the next turn"""
    again: bool = False
    """afterwards: whether any rank does"""


class Whole:
    """Weights that are not divided: whoever has them computes when he will."""

    whole = True

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        yield Turn()

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        yield


class _Unit(nn.Module):
    """What is gathered at a time. It is never called, so none of FSDP's hooks ever run."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


class Shards:
    """The weights of one model, in units: each layer, and all the rest (embeddings, last norm, head).

    Between turns a rank holds its part of every unit. During a pass it holds the rest as a whole, the layer that is being
    computed, and the next one, which is gathered meanwhile.

    Args:
        model: on any device, with everything of ours in it; its parameters become parts on the device of `ranks`.
        layers: of the model, in the order in which a forward pass runs them.
    """

    whole = False

    def __init__(self, ranks: Ranks, model: nn.Module, layers: Sequence[nn.Module]):
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)  # of this thread: FSDP takes the current one
        self._ranks = ranks
        self._layers = [_sharded(layer, ranks.mesh) for layer in layers]
        of_layers = {parameter for layer in layers for parameter in layer.parameters()}
        self._rest = _sharded(model, ranks.mesh, of_layers)
        for index, layer in enumerate(layers):
            layer.forward = partial(self._run_layer, index, layer.forward)
        self._turn: Turn | None = None
        self._order: list[int] = []
        self._place = -1
        """in `_order`, of the layer that is held"""
        ranks.have_loaded()

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Around what this rank computes. Every rank must be in a turn of this model; it ends when all have done their part."""
        turn = self._turn = Turn()
        try:
            yield turn
        finally:
            self._turn = None
            if self._ranks.lost is None:
                turn.again = self._rest_of_turn(Step.AGAIN if turn.more else Step.REST) is Step.AGAIN

    def _rest_of_turn(self, wish: Step) -> Step:
        """Take part in what others still compute."""
        self._rest.reshard()
        while (agreed := self._ranks.agree(wish)) >= Step.FORWARD:
            self._take_part(agreed)
        return agreed

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        """Around a forward or a backward pass. What is not in layers stays until the next forward pass or the turn's end."""
        if self._turn is None:
            raise RuntimeError("a model with sharded weights computes only in turns, which all ranks take together")
        if step is Step.FORWARD:
            self._rest.reshard()
        while (agreed := self._ranks.agree(step)) is not step:  # backward goes first: activations wait for it
            self._take_part(agreed)
        with self._gathering(step):
            yield

    def _take_part(self, step: Step) -> None:
        """In a pass of others."""
        with self._gathering(step):
            pass
        self._rest.reshard()

    @contextmanager
    def _gathering(self, step: Step) -> Iterator[None]:
        """Every layer is gathered once, in the order of the pass, also those that what runs within does not come to."""
        self._order, self._place = list(range(len(self._layers))), -1
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
                for index in self._order[self._place + 1 :]:
                    self._hold(index)
            self._layers[self._order[self._place]].reshard()
            self._order = []

    @contextmanager
    def _collective(self) -> Iterator[None]:
        # A tensor that is made in inference mode could never be trained through.
        with self._ranks.together(), torch.inference_mode(False), torch.no_grad():
            yield

    def _hold(self, index: int) -> None:
        """Have the weights of this layer, no longer those of the one before it, and soon those of the next."""
        if self._place >= 0 and self._order[self._place] == index:
            return  # a layer with several outputs
        place = self._place + 1
        if self._order[place : place + 1] != [index]:
            raise RuntimeError(f"layer {index} is computed out of turn, after {self._order[:place]}")
        with self._collective():
            self._layers[index].unshard()
            if place > 0:
                self._layers[self._order[place - 1]].reshard()
            if place + 1 < len(self._order):
                self._layers[self._order[place + 1]].unshard(async_op=True)
        self._place = place

    def _run_layer(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._hold(index)
        output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, index))
        return output

    def _before_backward(self, index: int, gradient: torch.Tensor) -> None:
        self._hold(index)


def _sharded(module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter] | None = None) -> FSDPModule:
    return fully_shard(_Unit(module), mesh=mesh, ignored_params=ignored)
