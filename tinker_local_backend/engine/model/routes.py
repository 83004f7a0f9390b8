"""Which experts tokens went to when they were sampled, and the same choice again when they are trained on.

Rollout routing replay (arXiv 2510.11370): close to a tie, a router may choose one expert in sampling and another one in training,
which changes a token's logprob by more than rounding. Only the choice is replayed: its weights are those of the router that is
being trained, and so are its gradients.
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

_PLACE = "_tinker_local_place"

FREE = -1
"""Instead of an expert: the router chooses."""


class Recording:
    """The choices of a pass, layer by layer."""

    def __init__(self) -> None:
        self._chosen: dict[int, torch.Tensor] = {}

    def note(self, place: int, chosen_Tk: torch.Tensor) -> None:
        self._chosen[place] = chosen_Tk

    def routes_TLk(self) -> torch.Tensor:
        """int16: the chosen experts of each token, in each layer that has some."""
        return torch.stack([self._chosen[place] for place in sorted(self._chosen)], dim=1).to(torch.int16)


class Replay:
    """Choices to make again: int64 (T, L, k), FREE where the router chooses."""

    def __init__(self, routes_TLk: torch.Tensor):
        self._routes_TLk = routes_TLk

    def layer(self, place: int) -> torch.Tensor:
        """(T, k)"""
        return self._routes_TLk[:, place]

    def note(self, place: int, chosen_Tk: torch.Tensor) -> None:
        """Raise RequestError if another choice was made."""
        wanted_Tk = self.layer(place)
        if bool(((wanted_Tk != FREE) & (wanted_Tk != chosen_Tk)).any()):
            raise RequestError("route_replay: the routers of this model do not choose through torch.topk; leave it out")


def install_routes(model: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Number the layers with experts, and make the modules around them choose what the pass replays."""
    paths = {module: path for path, module in model.named_modules()}
    for place, one in enumerate(experts):
        setattr(one, _PLACE, place)
        block: Any = model.get_submodule(paths[one].rpartition(".")[0])
        block.forward = partial(_forward, block.forward, place, one)


def note_routes(experts: nn.Module, chosen_Tk: torch.Tensor) -> None:
    """Called by the products with experts: the pass may want the choice."""
    running = current_pass()
    if running is not None and running.routes is not None:
        running.routes.note(getattr(experts, _PLACE), chosen_Tk)


def _forward(forward: Callable[..., Any], place: int, experts: Any, *args: Any, **kwargs: Any) -> Any:
    running = current_pass()
    if running is None or not isinstance(running.routes, Replay):
        return forward(*args, **kwargs)
    with _Choosing(running.routes.layer(place), experts.num_experts):
        return forward(*args, **kwargs)


class _Choosing(TorchFunctionMode):
    """Within: `torch.topk` over the scores of all experts takes these (T, k), with their scores."""

    def __init__(self, wanted_Tk: torch.Tensor, experts: int):
        super().__init__()
        self._wanted_Tk, self._experts = wanted_Tk, experts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, chosen = args[0], result.indices
        if scores.shape[-1] != self._experts or chosen.shape[-1] != self._wanted_Tk.shape[1]:
            return result  # of groups of experts
        wanted = self._wanted_Tk.view(chosen.shape)
        wanted = torch.where(wanted == FREE, chosen, wanted)
        return torch.return_types.topk((scores.gather(-1, wanted), wanted))  # pyright: ignore[reportCallIssue]
