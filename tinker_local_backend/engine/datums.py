"""From `tinker.Datum` to checked arrays, and from those to packed micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tinker

from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.losses import LOSSES, LossFn
from tinker_local_backend.engine.requests import check_vocabulary, prompt_tokens
from tinker_local_backend.environment import env_int
from tinker_local_backend.errors import RequestError

_DTYPES = {"target_tokens": "int64", "weights": "float32", "logprobs": "float32", "advantages": "float32"}


@dataclass(frozen=True, eq=False)
class Example:
    """A checked datum: N input tokens and, per loss input, an array of shape (N,) or (N, K) aligned with them."""

    tokens: tuple[int, ...]
    inputs: dict[str, npt.NDArray]


def loss_function(name: str, config: Mapping[str, float | str] | None) -> tuple[LossFn, dict[str, float], float]:
    """Look up a loss and complete its config. Returns (loss, config, temperature).

    `temperature` is understood for every loss: logits are divided by it, so that lp is on the distribution that was sampled.
    """
    if name not in LOSSES:
        raise RequestError(f"loss_fn {name!r} is unknown to the local engine; it has {', '.join(LOSSES)}")
    loss = LOSSES[name]
    given = dict(config or {})
    known = {*loss.config, "temperature"}
    for key, value in given.items():
        if key not in known:
            raise RequestError(f"loss_fn_config[{key!r}] is unknown to {name}; it takes {', '.join(sorted(known))}")
        if not isinstance(value, (int, float)) or not np.isfinite(value):
            raise RequestError(f"loss_fn_config[{key!r}] must be a finite number, got {value!r}")
    complete = {**loss.config, **{key: float(value) for key, value in given.items()}}
    temperature = complete.pop("temperature", 1.0)
    if temperature <= 0:
        raise RequestError(
            f"loss_fn_config['temperature'] must be positive, got {temperature}; "
            "greedy samples (temperature 0) report logprobs of temperature 1"
        )
    if complete.get("clip_low_threshold", 0.0) > complete.get("clip_high_threshold", np.inf):
        raise RequestError(
            f"loss_fn_config: clip_low_threshold {complete['clip_low_threshold']} is above "
            f"clip_high_threshold {complete['clip_high_threshold']}"
        )
    return loss, complete, temperature


def check_datum(datum: tinker.Datum, index: int, loss_name: str, loss: LossFn, model: BaseModel) -> Example:
    """Raise RequestError, naming data[index] and the field, unless the datum is exactly what the loss takes."""
    where = f"data[{index}]"
    try:
        tokens = prompt_tokens(datum.model_input, model)
    except RequestError as error:
        raise RequestError(f"{where}.model_input: {error}") from None
    given, needed = set(datum.loss_fn_inputs), set(loss.inputs)
    if unknown := sorted(given - needed):
        hint = "; fold a mask into the advantages (0 where masked)" if loss.is_policy_loss else ""
        raise RequestError(
            f"{where}.loss_fn_inputs has {unknown}, which {loss_name} does not take (it takes {', '.join(loss.inputs)}){hint}"
        )
    if missing := sorted(needed - given):
        raise RequestError(f"{where}.loss_fn_inputs lacks {missing}; {loss_name} takes {', '.join(loss.inputs)}")
    inputs: dict[str, npt.NDArray] = {}
    for key in loss.inputs:
        data = datum.loss_fn_inputs[key]
        if data.dtype != _DTYPES[key]:
            raise RequestError(f"{where}.loss_fn_inputs[{key!r}] is {data.dtype}; it must be {_DTYPES[key]}")
        try:
            inputs[key] = data.to_numpy()
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"{where}.loss_fn_inputs[{key!r}] is not a consistent tensor: {error}") from None
    shape = inputs["target_tokens"].shape
    if shape[:1] != (len(tokens),) or len(shape) > (1 if loss.is_policy_loss else 2):
        raise RequestError(
            f"{where}.loss_fn_inputs['target_tokens'] has shape {shape}; model_input has {len(tokens)} tokens, so it must be "
            f"({len(tokens)},)" + ("" if loss.is_policy_loss else f" or ({len(tokens)}, K)")
        )
    for key, array in inputs.items():
        if array.shape != shape:
            raise RequestError(f"{where}.loss_fn_inputs[{key!r}] has shape {array.shape}, target_tokens has {shape}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            raise RequestError(f"{where}.loss_fn_inputs[{key!r}][{bad[0]}] is {array[bad]}; all values must be finite")
    check_vocabulary(inputs["target_tokens"].reshape(-1).tolist(), model.vocab_size, f"{where}.target_tokens")
    return Example(tokens, inputs)


def micro_batches(examples: Sequence[Example], token_budget: int) -> list[list[int]]:
    """Indices of examples in packs of at most `token_budget` tokens (one longer example is a pack of its own), in order.

    TINKER_LOCAL_GRAD_ACCUM_STEPS=k aims at k packs or more: raise it when memory runs out. A datum is never split.
    """
    total = sum(len(example.tokens) for example in examples)
    steps = env_int("TINKER_LOCAL_GRAD_ACCUM_STEPS", minimum=1) or 1
    budget = min(token_budget, -(-total // steps))
    packs: list[list[int]] = []
    used = budget + 1
    for index, example in enumerate(examples):
        if used + len(example.tokens) > budget:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += len(example.tokens)
    return packs
