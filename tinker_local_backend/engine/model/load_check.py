"""The check of a model at load: compares its logits with transformers', and records how its layers mix tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.kv_cache import KVCache, KVSlots, LayerShape
from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.model.paged_attention import DecodePlan, Table, Tables
from tinker_local_backend.engine.model.refusals import context_length
from tinker_local_backend.engine.model.sharding import Shards, Step, Unsharded
from tinker_local_backend.engine.model.states import StateCache, StateKey, StateShape
from tinker_local_backend.errors import RequestError

LARGEST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest relative errors of logits that are rounding."""

_DEVICE_ERRORS = ("CUDA error", "cuDNN error")
"""First words of errors of a GPU and its libraries."""


def check_sequences(module: PreTrainedModel, device: torch.device) -> list[torch.Tensor]:
    """The token ids of the check sequences."""
    head: Any = module.get_output_embeddings()
    return [torch.arange(n, device=device) % head.weight.shape[0] for n in (5, 3)]


@torch.inference_mode()
def reference_logits(module: PreTrainedModel, device: torch.device, shards: Shards | Unsharded) -> list[torch.Tensor]:
    """Logits (T, vocabulary) in float32 of each check sequence, computed by transformers' eager functions."""
    model: Any = module
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    logits = []
    for tokens in check_sequences(module, device):
        with shards.computing(Step.FORWARD):
            logits.append(model(input_ids=tokens[None], use_cache=False).logits[0].float())
    return logits


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|result - expected| / |expected|"""
    return float((result - expected).norm() / expected.norm().clamp(min=1e-12))


class UnsupportedError(Exception):
    """The engine does not compute a model as transformers does; the message says why."""


@dataclass(frozen=True)
class ObservedLayers:
    """How the layers of a model mix tokens."""

    attention: dict[int, tuple[int, LayerShape]]
    """query heads and KV shape of each attention layer"""
    windows: dict[int, int | None]
    """the sliding window that each of them passed to the attention function"""
    sinks: bool
    """some layer has attention sinks"""
    attending: set[nn.Module]
    """the modules that called attention"""
    states: dict[StateKey, StateShape]
    continues: bool
    """recurrent layers continue from a state with any number of tokens; Mamba 1 restarts instead"""
    passes: tuple[CheckedPass, ...]


CheckedPass = tuple[torch.Tensor, torch.Tensor, PackedPlan | DecodePlan]
"""Tokens (T,), positions (T,) and plan."""


def check_passes(
    logits: Callable[[torch.Tensor, torch.Tensor, PackedPlan | DecodePlan], torch.Tensor],
    sequences: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> ObservedLayers:
    """Compare the logits of the check sequences, packed and one token at a time, with those of transformers.

    Unsupported models fail here: layers with unknown token mixing, attention that is not causal or uses more than queries, keys,
    values and sinks (position biases), logits changed after the head.

    Args:
        logits: (tokens, positions, plan) of a pass of the base model -> (T, vocabulary).
        expected: transformers' logits of each sequence.

    Raises UnsupportedError. Errors of the device and out-of-memory errors, which say nothing about the model, are re-raised.
    """
    whole, device = sequences[0], sequences[0].device
    together = PackedPlan.whole([len(tokens) for tokens in sequences])
    positions_T = torch.cat([torch.arange(len(tokens), device=device) for tokens in sequences])
    try:
        packed = logits(torch.cat([*sequences]), positions_T, together)
        cache = KVCache({layer: shape for layer, (_, shape) in together.shapes.items()}, dtype, device)
        cache.resize(1)
        states = StateCache({}, device)
        states.resize(1)
        first = torch.arange(len(whole) - 1, device=device)
        kv_slots = KVSlots(torch.zeros_like(first), first)
        prefill = PackedPlan([Segment(0, len(first), state_to=0)], cache, kv_slots, states)
        logits(whole[:-1], first, prefill)
        tables = Tables.of([Table([0])], device)
        decoding = DecodePlan(cache, tables, np.array([len(first)]), states, first[:1])
        decoded = logits(whole[-1:], decoding.lengths, decoding)
        continued = packed[: len(whole)]
        if states.shapes:
            in_two = PackedPlan([Segment(0, 2), Segment(2, len(whole), 2, (0, 2))])
            continued = logits(whole, torch.arange(len(whole), device=device), in_two)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, RequestError) as error:
        if out_of_memory(error) or str(error).startswith(_DEVICE_ERRORS):
            raise
        why = "has layers that the local engine cannot run: they mix tokens by more than queries, keys and values"
        raise UnsupportedError(why) from error
    error = relative_error(torch.cat([packed, decoded]), torch.cat([*expected, expected[0][-1:]]))
    if not error <= LARGEST_ERROR[dtype]:
        why = f"has other logits in the local engine than in transformers (relative error {error:.1e})"
        raise UnsupportedError(f"{why}: it has layers that the engine does not support")
    return ObservedLayers(
        together.shapes,
        together.windows,
        together.sinks,
        together.attending,
        states.shapes,
        continues=relative_error(continued, packed[: len(whole)]) <= LARGEST_ERROR[dtype],
        passes=((whole[-1:], decoding.lengths, decoding), (torch.cat([*sequences]), positions_T, together)),
    )


def usable_context_length(config: Any, windows: Mapping[int, int | None] | None) -> int:
    """The context length in this engine. It is less than the config's if a layer does not pass its sliding window to the
    attention function, or if longer sequences change the rotary frequencies of shorter ones.

    Args:
        config: of the text model.
        windows: the sliding window that each layer passed to the attention function; None if it is not the engine's.
    """
    limits = [context_length(config) or 0]
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and windows is not None:
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        honoured = all(windows.get(i) == window for i, kind in enumerate(kinds) if kind == "sliding_attention")
        if not honoured:
            limits.append(window)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this length it changes the frequencies of the whole pass
        limits.append(rope["original_max_position_embeddings"])
    return min(limits)
