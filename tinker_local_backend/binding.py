"""The SDK's client classes bound to the local engine, for programs that were written for the hosted service."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tinker.lib import public_interfaces

from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.sampling_client import SamplingClient
from tinker_local_backend.service_client import ServiceClient
from tinker_local_backend.training_client import TrainingClient

CLIENTS: dict[str, type] = {
    client.__name__: client for client in (ServiceClient, TrainingClient, SamplingClient, RestClient)
}
"""The SDK's client classes by name, and what stands in their place."""


@contextmanager
def use_local() -> Iterator[None]:
    """Within the block the client classes of the `tinker` package are the local engine's.

    This holds for the whole process: for `tinker.ServiceClient`, and for modules that took it from there before
    (`from tinker import ServiceClient`). Blocks may be nested. Clients that were made inside go on working afterwards.
    """
    hosted = {id(getattr(public_interfaces, name)): local for name, local in CLIENTS.items()}
    # By identity: looking closer makes some packages warn of names that nobody asked for.
    replaced = [
        (module, attribute, value)
        for module in list(sys.modules.values())
        for attribute, value in _globals(module).items()
        if id(value) in hosted and _is_bound(module)
    ]
    for module, attribute, value in replaced:
        setattr(module, attribute, hosted[id(value)])
    try:
        yield
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


def _is_bound(module: Any) -> bool:
    """The SDK's own modules go on with their own classes; only what it shows to programs is replaced."""
    return not module.__name__.startswith("tinker.") or module is public_interfaces


def _globals(module: Any) -> dict[str, Any]:
    # Lazy modules answer for names that they have not loaded yet; only what stands in the module counts.
    return dict(getattr(module, "__dict__", None) or {})
