"""Where there is no GPU: models run the CUDA path with what stands in for it on a CPU.

Steps are recorded and replayed without Python in place of a CUDA graph, and kernels are plain torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tinker_local_backend.engine.base_model import BaseModel
from tinker_local_backend.engine.cuda.execution import CudaExecution
from tinker_local_backend.engine.execution import Execution


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within: a model that is loaded on a CPU gets the CUDA path, unchecked; the section `checks` asks it."""
    original = BaseModel.start

    def start(model: BaseModel) -> Execution | None:
        return CudaExecution(model) if model.device.type == "cpu" else original(model)

    with mock.patch.object(BaseModel, "start", start):
        yield
