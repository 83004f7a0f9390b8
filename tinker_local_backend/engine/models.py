"""Load base models, check them, and choose how their passes run on their device."""

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
    name: str, device: torch.device | None = None, dtype: torch.dtype | None = None, ranks: Ranks | None = None
) -> BaseModel:
    """Load a model from a directory or hub id. Arguments and errors as of BaseModel."""
    return _started(BaseModel(name, device, dtype, ranks))


def adopt_module(name: str, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> BaseModel:
    """Wrap a module that the caller made, see BaseModel.from_module."""
    return _started(BaseModel.from_module(name, module, tokenizer))


def _started(model: BaseModel) -> BaseModel:
    model.execution = start(model) or model.execution
    return model


def start(model: BaseModel) -> Execution | None:
    """The execution that passed its checks on this model; None: the reference."""
    if model.device.type != "cuda" or not model.shards.whole:  # the CUDA path copies weights
        return None
    return checked_execution(model)


def new_generator(model: BaseModel, kv_budget_tokens: int, random_seed: Callable[[], int]) -> Generator:
    """The generator of a model: with captured CUDA decode steps where its execution has them."""
    execution = model.execution
    if isinstance(execution, CudaExecution) and execution.runs(DECODING):
        return BurstGenerator(model, kv_budget_tokens, random_seed, execution.graphs)
    return Generator(model, kv_budget_tokens, random_seed)


def describe(model: BaseModel) -> dict[str, str]:
    """What this model runs on: `device`, `dtype`, and `path` ("reference": all in plain torch; or "cuda").

    With "cuda" also each of its features: "on", or "off: " and the reason.
    """
    features = model.execution.parts()
    return {
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "path": "cuda" if features else "reference",
        **features,
    }
