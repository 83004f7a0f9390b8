"""Methods and arguments of the SDK that a local engine does not have: refused by name, never ignored."""

# pyright: strict

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from tinker_local_backend.errors import RequestError

logger = logging.getLogger(__name__)

REST_CALLS = {
    "get_audit_log": "there are no accounts; every call is this user's",
    "get_billing_usage": "nothing is billed",
    "get_current_checkpoint_storage_usage": "nothing is billed; list_user_checkpoints states sizes in bytes",
    "assign_session_project": "there are no projects",
    "export_session_trace": "no trace of requests is kept",
    "get_sampler": "samplers live in the process that made them; ask the SamplingClient itself (get_base_model)",
}
"""Method of RestClient or AdminClient -> why it does not exist, or what to use."""


def refused_method(owner: str, name: str) -> Callable[..., NoReturn]:
    """A stand-in for a method that only the hosted service has: calling it raises RequestError. Raises AttributeError for
    other names.
    """
    base = name.removesuffix("_async")
    if base not in REST_CALLS:
        raise AttributeError(f"{owner} has no {name}")

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RequestError(f"{owner}.{base} has no meaning with the local engine: {REST_CALLS[base]}")

    return refuse


class AdminClient:
    """The SDK's client for an organisation's administrators: each of its calls is refused by name."""

    def __init__(self, *, base_url: str | None = None, api_key: str | None = None):
        log_without_effect(base_url=base_url, api_key=api_key)

    def get_telemetry(self) -> None:
        """None: this engine sends no telemetry."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return refused_method("AdminClient", name)


def refuse_arguments(**arguments: object) -> None:
    """Raise RequestError for the first argument that is set (not None and not False)."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise RequestError(
                f"{name}={value!r} is only offered by the hosted service; leave it out, or use backend=tinker"
            )


def log_without_effect(**arguments: object) -> None:
    """Log the names, and never the values, of arguments that are set and have no effect on a local engine."""
    names = [name for name, value in arguments.items() if value is not None]
    if names:
        logger.info("%s: no effect, this client is the local engine's", ", ".join(names))
