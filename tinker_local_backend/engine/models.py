"""Base models that are ready to run: loaded, checked, and with what computes their passes on their device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinker_local_backend.engine.cuda.execution import DECODING, CudaExecution
from tinker_local_backend.engine.cuda.generation import BurstGenerator
from tinker_local_backend.engine.cuda.selfcheck import checked_execution
from tinker_local_backend.engine.model.attention import Execution
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.sharding import Ranks
from tinker_local_backend.engine.sampling.generation import Generator


def load_model(
    name: str,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
) -> BaseModel:
    """A model of a directory or hub id. Arguments and errors are those of BaseModel."""
    return _started(BaseModel(name, device, dtype, ranks))


def adopt_module(name: str, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> BaseModel:
    """A model of a module that the caller made, see BaseModel.from_module."""
    return _started(BaseModel.from_module(name, module, tokenizer))


def _started(model: BaseModel) -> BaseModel:
    model.execution = start(model) or model.execution
    return model


def start(model: BaseModel) -> Execution | None:
    """The execution of a model that has passed its checks; None: the reference."""
    if model.device.type != "cuda" or not model.shards.whole:  # the CUDA path keeps weights of its own
        return None
    return checked_execution(model)


def new_generator(model: BaseModel, kv_budget_tokens: int, random_seed: Callable[[], int]) -> Generator:
    """What samples from a model: the decode step, and the adapters in it."""
    execution = model.execution
    if isinstance(execution, CudaExecution) and execution.runs(DECODING):
        return BurstGenerator(model, kv_budget_tokens, random_seed, execution.graphs)
    return Generator(model, kv_budget_tokens, random_seed)


def describe(model: BaseModel) -> dict[str, str]:
    """What this model runs on, for whoever asks: `device`, `dtype`, `path` ("reference": plain torch computes everything;
    "cuda"), and on the latter each part: "on", or "off: " and why.
    """
    parts = model.execution.parts()
    return {
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "path": "cuda" if parts else "reference",
        **parts,
    }
