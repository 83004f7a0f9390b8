"""Rollout routing replay (arXiv 2510.11370): record the experts chosen in sampling, and choose the same ones in training.

Near a tie, a router may choose one expert in sampling and another in training, which changes a token's logprob by more than
rounding. Only the choice is replayed: weights and gradients are those of the router in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tinker_local_backend.engine.model.passes import current_pass
from tinker_local_backend.errors import RequestError

_INDEX = "_tinker_local_index"

FREE = -1
"""In place of an expert's index: the router chooses."""


class Recording:
    """Records the chosen experts of a pass, layer by layer."""

    def __init__(self) -> None:
        self._chosen: dict[int, torch.Tensor] = {}

    def note(self, index: int, chosen_Tk: torch.Tensor) -> None:
        self._chosen[index] = chosen_Tk

    def routes_TLk(self) -> torch.Tensor:
        """int16: the chosen experts of each token, in each layer with experts."""
        return torch.stack([self._chosen[index] for index in sorted(self._chosen)], dim=1).to(torch.int16)


class Replay:
    """Replays chosen experts: int64 (T, L, k), FREE where the router chooses."""

    def __init__(self, routes_TLk: torch.Tensor):
        self._routes_TLk = routes_TLk

    def layer(self, index: int) -> torch.Tensor:
        """(T, k)"""
        return self._routes_TLk[:, index]

    def note(self, index: int, chosen_Tk: torch.Tensor) -> None:
        """Raise RequestError if the router chose other experts."""
        replayed_Tk = self.layer(index)
        if bool(((replayed_Tk != FREE) & (replayed_Tk != chosen_Tk)).any()):
            raise RequestError("route_replay: the routers of this model do not choose through torch.topk; leave it out")


def install_routes(model: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Number the layers with experts, and make the modules around them replay the choice of the pass, if it has one."""
    paths = {module: path for path, module in model.named_modules()}
    for index, one in enumerate(experts):
        setattr(one, _INDEX, index)
        block: Any = model.get_submodule(paths[one].rpartition(".")[0])
        block.forward = partial(_forward, block.forward, index, one)


def note_routes(experts: nn.Module, chosen_Tk: torch.Tensor) -> None:
    """Pass the chosen experts on to the current pass, if it records or replays. Called by the expert functions."""
    running = current_pass()
    if running is not None and running.routes is not None:
        running.routes.note(getattr(experts, _INDEX), chosen_Tk)


def _forward(forward: Callable[..., Any], index: int, experts: Any, *args: Any, **kwargs: Any) -> Any:
    running = current_pass()
    if running is None or not isinstance(running.routes, Replay):
        return forward(*args, **kwargs)
    with _Choosing(running.routes.layer(index), experts.num_experts):
        return forward(*args, **kwargs)


class _Choosing(TorchFunctionMode):
    """Within: `torch.topk` over the scores of all experts returns these experts (T, k), with their scores."""

    def __init__(self, replayed_Tk: torch.Tensor, experts: int):
        super().__init__()
        self._wanted_Tk, self._experts = replayed_Tk, experts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, chosen = args[0], result.indices
        if scores.shape[-1] != self._experts or chosen.shape[-1] != self._wanted_Tk.shape[1]:
            return result  # a choice among groups of experts
        replayed = self._wanted_Tk.view(chosen.shape)
        replayed = torch.where(replayed == FREE, chosen, replayed)
        return torch.return_types.topk((scores.gather(-1, replayed), replayed))  # pyright: ignore[reportCallIssue]
