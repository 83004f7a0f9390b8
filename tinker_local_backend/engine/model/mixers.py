"""Recurrent layers: gated delta rule, KDA, Mamba, short convolution.

A mixer of transformers takes sequences of one length, (N, length), and reads and writes their states through four methods of a
cache; before transformers 5.21 it reads them from the cache's layers. So its forward runs unchanged on batches of the pass's
segments (mixing.py), with a cache that holds their states. This code does not depend on what a mixer computes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from tinker_local_backend.engine.model.delta_rule import with_faster_steps
from tinker_local_backend.engine.model.passes import current_pass, running
from tinker_local_backend.engine.model.states import StateKey, StateShape

_METHODS = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}
_CACHE_NAMES = ("cache_params", "past_key_values")


class LayerStates:
    """The part of a cache layer that mixers before transformers 5.21 read: its states, by number."""

    record_past = False

    def __init__(self, cache: MixerCache, layer: int):
        self.conv_states = _Numbered(lambda number: cache.get_conv_state(layer, number))
        self.recurrent_states = _Numbered(lambda number: cache.get_recurrent_state(layer, number))


class _Numbered:
    def __init__(self, get: Callable[[int], torch.Tensor | None]):
        self._get = get

    def __getitem__(self, number: int) -> torch.Tensor | None:
        return self._get(number)


class _Layers:
    def __init__(self, cache: MixerCache):
        self._cache = cache

    def __getitem__(self, layer: int) -> LayerStates:
        return LayerStates(self._cache, layer)


class MixerCache:
    """Stands in for transformers' cache in a mixer: the states of the N sequences of one batch.

    Args:
        initial: returns a copy of the state (N, ...) before the batch, which mixers modify in place. None: no initial states.
    """

    def __init__(self, initial: Callable[[StateKey], torch.Tensor | None] | None = None):
        self._initial = initial
        self.states: dict[StateKey, torch.Tensor] = {}
        self.layers: Any = _Layers(self)

    def _get(self, key: StateKey) -> torch.Tensor | None:
        if key not in self.states and self._initial is not None:
            state = self._initial(key)
            if state is not None:
                self.states[key] = state
        return self.states.get(key)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Keep the last `conv_kernel_size` inputs (N, channels, length). Returns the earlier ones followed by the new ones."""
        key = StateKey(layer_idx, "conv", state_idx)
        kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before = self._get(key)
        if before is not None:
            conv_states = torch.cat((before, conv_states), dim=-1)
        elif conv_states.shape[-1] < kernel:
            conv_states = nn.functional.pad(conv_states, (kernel - conv_states.shape[-1], 0))
        self.states[key] = conv_states[..., -kernel:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.states[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """MiniMax's name for `get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int, state_idx: int | None = None) -> bool:
        """Whether the layer has a state; mixers before transformers 5.21 check this before they read it."""
        return self.get_conv_state(layer_idx, state_idx or 0) is not None


class Mixer:
    """Replaces the forward of a module with states: within a pass, it runs as the pass's `mixing` says."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._forward = forward
        self._signature = inspect.signature(module.forward)
        self._cache_name = _cache_name(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = current_pass()
        if current is None or current.mixing is None:
            return self._forward(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs).arguments
        arguments = {**{name: value for name, value in bound.items() if name != "kwargs"}, **bound.get("kwargs", {})}
        with running(None):  # a mixer inside this one gets its batches
            return current.mixing.mix(self._forward, self._cache_name, arguments)


def install_mixers(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Replace the forward of all modules with states by a `Mixer`. Returns these modules."""
    mixers = [module for module in model.modules() if _has_states(type(module))]
    for module in mixers:
        module.forward = Mixer(module, with_faster_steps(module) if device.type == "cpu" else module.forward)
    return mixers


def state_shapes(model: nn.Module, width: int, dtype: torch.dtype) -> dict[StateKey, StateShape]:
    """The states of a sequence in a model of transformers whose forwards are not replaced.

    Runs only the modules with states, on two tokens, so the model may be on the meta device. Raises TypeError if one of them
    needs more than hidden states.

    Args:
        width: of the hidden states.
        dtype: of the weights.
    """
    cache = MixerCache()
    with torch.no_grad(), quiet_fallbacks():
        for module in model.modules():
            if _has_states(type(module)):
                hidden = torch.zeros(1, 2, width, dtype=dtype, device=next(module.parameters()).device)
                module.forward(hidden, **{_cache_name(module): cache})
    return {key: StateShape(tuple(state.shape[1:]), state.dtype) for key, state in cache.states.items()}


@contextmanager
def quiet_fallbacks() -> Iterator[None]:
    """Hide transformers' warnings about each kernel that is not installed: on a CPU there is none to install, and on a GPU
    models.py names all of them in one line.
    """
    source = logging.getLogger("transformers.integrations.hub_kernels")

    def is_other(record: logging.LogRecord) -> bool:
        return "is falling back to its reference PyTorch implementation" not in record.getMessage()

    source.addFilter(is_other)
    try:
        yield
    finally:
        source.removeFilter(is_other)


def _cache_name(module: nn.Module) -> str:
    parameters = inspect.signature(module.forward).parameters
    return next(name for name in _CACHE_NAMES if name in parameters)


@cache
def _has_states(kind: type[nn.Module]) -> bool:
    """Whether the code of a module class reads or writes states."""
    takes_a_cache = any(name in inspect.signature(kind.forward).parameters for name in _CACHE_NAMES)
    return takes_a_cache and any(_METHODS.intersection(code.co_names) for code in class_code(kind))


def class_code(kind: type[nn.Module]) -> Iterator[CodeType]:
    """The code of all methods of a module class that are not nn.Module's."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for function in vars(base).values():
            if inspect.isfunction(function):
                yield inspect.unwrap(function).__code__
