"""Where there is no GPU: models run the CUDA path with what stands in for it on a CPU.

Steps are recorded and replayed without Python in place of a CUDA graph, and kernels are plain torch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from tinker_local_backend.engine import models
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.model.attention import Execution
from tinker_local_backend.engine.model.base_model import BaseModel

CACHE_TOKENS = 1 << 10
"""The stand-in for the attention kernel gathers as many tokens for each row as its table could hold."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within: a model that is loaded on a CPU gets the CUDA path, unchecked (the section `checks` asks it), and a small cache:
    that path allocates all of it at once.
    """
    original = models.start
    small: dict[str, str] = {}

    def start(model: BaseModel) -> Execution | None:
        return CudaExecution(model) if model.device.type == "cpu" else original(model)

    if not torch.cuda.is_available() and "TINKER_LOCAL_KV_CACHE_TOKENS" not in os.environ:
        small = {"TINKER_LOCAL_KV_CACHE_TOKENS": str(CACHE_TOKENS)}
    with mock.patch.object(models, "start", start), mock.patch.dict(os.environ, small):
        yield
