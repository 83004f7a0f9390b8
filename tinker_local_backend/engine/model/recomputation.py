"""Gradient checkpointing: recompute decoder layers in the backward pass instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinker_local_backend.engine.model.passes import Pass, current_pass, running


class Recomputation:
    """Turns recomputation of a model's layers on and off. Owned by the engine's worker thread."""

    def __init__(self) -> None:
        self.on = False

    def wrap(self, layers: Sequence[nn.Module]) -> None:
        """Make each layer save only its inputs, and run again in the backward pass, while this is on."""
        for layer in layers:
            layer.forward = partial(self._run, layer.forward)

    @contextmanager
    def use(self, enabled: bool) -> Iterator[None]:
        previous, self.on = self.on, enabled
        try:
            yield
        finally:
            self.on = previous

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.on and torch.is_grad_enabled():
            again = partial(_in_pass, current_pass(), forward)
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return forward(*args, **kwargs)


def _in_pass(current: Pass | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer within a pass, also when the backward pass recomputes it on another thread."""
    with running(current):
        return forward(*args, **kwargs)
