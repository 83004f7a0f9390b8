"""Checks of saving, loading, PEFT's use of saved adapters, and out-of-memory recovery."""

from __future__ import annotations

import logging
import warnings as python_warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import tinker
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu.case import Case, teacher_forced
from benchmarks.gpu.models import random_module, shape_of
from benchmarks.gpu.sampling_checks import train_a_step
from benchmarks.gpu.training_checks import group, take_gradients
from benchmarks.workload import random_tokens
from tinker_local_backend.engine.model.base_model import BaseModel

T = TypeVar("T")

SHARE_OF_NEED = 0.6
"""share of a call's peak memory that it gets in the out-of-memory checks on a GPU"""

STAND_IN_TOKENS = 150
"""tokens of a pass that are refused instead on a CPU, whose allocator has no limit"""


def save_and_load(case: Case) -> None:
    """A saved state continues like the client that saved it: the same logprobs, also after one more step."""
    train_a_step(case.training, case.prompts, 1e-3)
    path = case.training.save_state("visit", overwrite=True).result().path
    loaded = case.engine.service.create_training_client_from_state_with_optimizer(path).result()
    tokens = [*case.prompts[2], *case.prompts[1]]
    case.compare("loaded state", teacher_forced(loaded, [tokens])[0], teacher_forced(case.training, [tokens])[0])
    for client in (case.training, loaded):
        train_a_step(client, case.prompts, 1e-3)
    name = "loaded state after one more step"
    case.compare(name, teacher_forced(loaded, [tokens])[0], teacher_forced(case.training, [tokens])[0])


def peft_agrees(case: Case) -> None:
    """The saved adapter, loaded by PEFT onto transformers' model on the device, gives the trainer's logprobs."""
    import peft

    folder = case.engine.save_adapter()
    disable_progress_bar()
    plain: Any
    if case.path is not None:
        plain = AutoModelForCausalLM.from_pretrained(case.path, dtype=case.model.dtype)
        plain = plain.to(case.model.device)
    else:
        shape = shape_of(case.scale.correctness_shape, case.scale.correctness_layers)
        plain = random_module(shape, case.model.device, case.model.dtype)
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("ignore")  # about tied heads, which the engine's adapters change on purpose
        model = peft.PeftModel.from_pretrained(plain, str(folder)).eval()
    tokens = torch.tensor([case.prompts[2]], device=case.model.device)
    with torch.no_grad():
        logprobs = model(tokens).logits[0].float().log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    case.compare("PEFT on the saved adapter", logprobs.cpu().numpy(), teacher_forced(case.training, case.prompts)[2])


def out_of_memory_in_training(case: Case) -> None:
    """A call that does not fit into memory is split, logs a warning, and gives the same gradient."""
    length = 300 if case.model.device.type == "cuda" else 40
    data = group(case, members=6, prompt=length, completion=length // 2)

    def call() -> dict[str, torch.Tensor]:
        case.training.forward_backward(data, "cispo").result()
        return take_gradients(case)

    expected, need = _with_peak_memory(case, call)
    with short_of_memory(case, need) as warnings:
        gradients = call()
    _require_warning(case, "training", warnings)
    reference = {key: value.double().cpu().numpy() for key, value in expected.items()}
    case.compare_gradients("gradient after running out of memory", gradients, reference)


def out_of_memory_in_sampling(case: Case) -> None:
    """A prefill that does not fit into memory is retried with fewer sequences; every request is answered, with right logprobs."""
    length = 400 if case.model.device.type == "cuda" else 60
    vocabulary = min(case.model.vocab_size, 1500)
    prompts = [random_tokens(vocabulary, length + i, seed=i) for i in range(6)]
    sampler = case.sampler()
    params = tinker.SamplingParams(max_tokens=4, seed=1, stop=[])

    def call() -> list[tinker.SampledSequence]:
        teacher_forced(case.training, case.prompts)  # a training call, which empties the cache
        futures = [sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
        return [future.result().sequences[0] for future in futures]

    _, need = _with_peak_memory(case, call)
    with short_of_memory(case, need) as warnings:
        sequences = call()
    _require_warning(case, "sampling", warnings)
    forced = teacher_forced(case.training, [[*p, *s.tokens] for p, s in zip(prompts, sequences, strict=True)])
    expected = np.concatenate([scores[-4:] for scores in forced])
    case.compare("sampled after running out of memory", [lp for s in sequences for lp in s.logprobs or []], expected)


def _with_peak_memory(case: Case, call: Callable[[], T]) -> tuple[T, int]:
    """The call's result with enough memory, and its peak memory in bytes (0 on a CPU)."""
    if case.model.device.type != "cuda":
        return call(), 0
    torch.cuda.reset_peak_memory_stats(case.model.device)
    before = torch.cuda.memory_allocated(case.model.device)
    result = call()
    return result, torch.cuda.max_memory_allocated(case.model.device) - before


def _require_warning(case: Case, what: str, warnings: list[str]) -> None:
    case.findings.require(
        f"{case.name}: out of memory in {what} is provoked and survived",
        any("out of memory" in text for text in warnings),
        warnings[-1] if warnings else "memory never ran out: the check has no result",
    )


@contextmanager
def short_of_memory(case: Case, need: int) -> Iterator[list[str]]:
    """Inside the context only a part of `need` bytes can still be allocated; yields the engine's warnings.

    On a GPU the allocator is limited. On a CPU, where it has no limit, passes above STAND_IN_TOKENS are refused.
    """
    warnings: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("tinker_local_backend")
    logger.addHandler(handler)
    try:
        with _limited(case.model.device, need):
            yield warnings
    finally:
        logger.removeHandler(handler)


@contextmanager
def _limited(device: torch.device, need: int) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        reserved, total = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, reserved / total), device)
        try:
            ballast = _fill_reserved(device)  # otherwise gaps between tensors could satisfy the call
            limit = torch.cuda.memory_reserved(device) + SHARE_OF_NEED * need
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
            yield
            del ballast
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(self: BaseModel, tokens_T: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if len(tokens_T) > STAND_IN_TOKENS:
                raise torch.OutOfMemoryError(f"{len(tokens_T)} tokens refused in place of a GPU's allocator")
            return original(self, tokens_T, *rest, **options)

        return refuse

    with ExitStack() as stack:
        for name in ("hidden_states", "training_pass"):
            stack.enter_context(mock.patch.object(BaseModel, name, refusing(getattr(BaseModel, name))))
        yield


def _fill_reserved(device: torch.device) -> list[torch.Tensor]:
    """Tensors that fill the reserved but unallocated memory, down to blocks of a megabyte."""
    taken, size = [], 2**30
    while size >= 2**20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


CHECKS = (save_and_load, peft_agrees, out_of_memory_in_training, out_of_memory_in_sampling)
