"""Bind the SDK's client classes to the local engine, for programs that were written for the hosted service."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tinker.lib import public_interfaces

from tinker_local_backend.hosted_only import AdminClient
from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.sampling_client import SamplingClient
from tinker_local_backend.service_client import ServiceClient
from tinker_local_backend.training_client import TrainingClient

CLIENTS = (ServiceClient, TrainingClient, SamplingClient, RestClient, AdminClient)
"""Each replaces the SDK's class of its name."""


@contextmanager
def use_local() -> Iterator[None]:
    """Replace the client classes of the `tinker` package by the local engine's within the block.

    This holds for the whole process: for `tinker.ServiceClient`, and for modules that have already imported it
    (`from tinker import ServiceClient`). Blocks may be nested. Clients that were made inside still work afterwards.
    """
    hosted = {id(getattr(public_interfaces, client.__name__)): client for client in CLIENTS}
    # Compare by identity: other accesses make some packages warn of deprecated names.
    replaced = [
        (module, attribute, value)
        for module in list(sys.modules.values())
        # Lazy modules resolve names on access; only names that they have loaded count.
        for attribute, value in dict(getattr(module, "__dict__", None) or {}).items()
        # The SDK's internal modules keep their classes.
        if id(value) in hosted and (not module.__name__.startswith("tinker.") or module is public_interfaces)
    ]
    for module, attribute, value in replaced:
        setattr(module, attribute, hosted[id(value)])
    try:
        yield
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)
