"""An in-process LoRA engine behind the Tinker SDK's client classes: batched sampling with exact logprobs, and training.

`ServiceClient` has the method names and results of `tinker.ServiceClient`, and makes the other clients.
Every client method with an `_async` twin in the SDK has one here too (futures.py).
`RestClient` lists and manages checkpoints and also works alone. `use_local` runs programs written for the SDK on this engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_local_backend.binding import use_local
    from tinker_local_backend.constraint import Constraint
    from tinker_local_backend.errors import (
        CheckpointError,
        EngineClosedError,
        LocalBackendError,
        ModelLoadError,
        NonFiniteError,
        ReplicaError,
        RequestError,
    )
    from tinker_local_backend.replicas.group import serve_as_replica
    from tinker_local_backend.rest_client import RestClient
    from tinker_local_backend.sampling_client import SamplingClient
    from tinker_local_backend.sampling_params import SamplingParams
    from tinker_local_backend.sequence import LocalSequence
    from tinker_local_backend.service_client import ServiceClient
    from tinker_local_backend.training_client import TrainingClient

__all__ = [
    "CheckpointError",
    "Constraint",
    "EngineClosedError",
    "LocalBackendError",
    "LocalSequence",
    "ModelLoadError",
    "NonFiniteError",
    "ReplicaError",
    "RequestError",
    "RestClient",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "TrainingClient",
    "serve_as_replica",
    "use_local",
]

# The engine takes seconds to import. Errors, stored runs and checks of settings do not need it.
_HOMES = {
    "Constraint": "constraint",
    "LocalSequence": "sequence",
    "use_local": "binding",
    "serve_as_replica": "replicas.group",
    "RestClient": "rest_client",
    "SamplingClient": "sampling_client",
    "SamplingParams": "sampling_params",
    "ServiceClient": "service_client",
    "TrainingClient": "training_client",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
