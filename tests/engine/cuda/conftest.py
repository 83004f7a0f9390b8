"""Triton kernels run compiled where the tests run on a GPU, and in Triton's interpreter elsewhere (`make test-kernels`)."""

import os
from types import SimpleNamespace

import pytest
from torch._library.custom_ops import CustomOpDef

from tests.engine.devices import here


@pytest.fixture(scope="session")
def kernels() -> SimpleNamespace:
    """The functions that launch the kernels, by the names of their operations."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    assert interpreted != (here().device.type == "cuda"), (
        "set TRITON_INTERPRET=1 on a CPU, and not on a GPU; triton reads it when Python starts (see `make test-kernels`)"
    )
    from tinker_local_backend.engine.cuda import ops

    names = [name for name, operation in vars(ops).items() if isinstance(operation, CustomOpDef)]
    return SimpleNamespace(**{name: ops._kernel(name) for name in names})
