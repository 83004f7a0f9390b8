"""Bind the SDK's client classes to the local engine, for programs that were written for the hosted service."""

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
"""Name of a client class in the SDK -> the class that replaces it."""


@contextmanager
def use_local() -> Iterator[None]:
    """Replace the client classes of the `tinker` package by the local engine's within the block.

    This holds for the whole process: for `tinker.ServiceClient`, and for modules that have already imported it
    (`from tinker import ServiceClient`). Blocks may be nested. Clients that were made inside still work afterwards.
    """
    hosted = {id(getattr(public_interfaces, name)): local for name, local in CLIENTS.items()}
    # Compare by identity: other accesses make some packages warn of deprecated names.
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
    """Whether classes in this module are replaced. The SDK's internal modules keep theirs."""
    return not module.__name__.startswith("tinker.") or module is public_interfaces


def _globals(module: Any) -> dict[str, Any]:
    # Lazy modules resolve names on access; only names that they have loaded count.
    return dict(getattr(module, "__dict__", None) or {})
