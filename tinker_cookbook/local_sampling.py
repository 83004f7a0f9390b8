"""Sampling options of the local engine that the SDK lacks, min_p and constraints, and their errors for hosted clients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.extras import install_command
from tinker_cookbook.utils.lazy import tinker

_MIN_P_IS_LOCAL = "the hosted service does not offer it; leave it out (it has top_k and top_p), or use backend=local"


def sampling_params(client: object, min_p: float, **fields: Any) -> Any:
    """Sampling parameters: the SDK's, or the local engine's for `min_p` > 0. Raises ConfigurationError for a hosted client."""
    if min_p == 0:
        return tinker.SamplingParams(**fields)
    if _is_hosted(client):
        raise ConfigurationError(f"min_p={min_p:g}: {_MIN_P_IS_LOCAL}")
    return backends.local_engine().SamplingParams(min_p=min_p, **fields)


def check_min_p(min_p: float, backend: backends.Backend) -> None:
    """Raise ConfigurationError for an invalid min_p, or one that the backend does not support."""
    if not 0 <= min_p <= 1:
        raise ConfigurationError(f"min_p={min_p}: must be between 0 (no limit) and 1")
    if min_p > 0 and backend != "local":
        raise ConfigurationError(f"min_p={min_p:g}: {_MIN_P_IS_LOCAL}")


def constraint(client: object, **fields: Any) -> Any:
    """The local engine's Constraint of these fields. Raises ConfigurationError for a hosted client."""
    check_constraint(client)
    return backends.local_engine().Constraint(**fields)


def check_constraint(client: object) -> None:
    """Raise ConfigurationError if the client takes no constraint."""
    if _is_hosted(client):
        raise ConfigurationError("constraint: the hosted service does not offer it; leave it out, or use backend=local")


def check_constraints_are_installed(key: str) -> None:
    """Raise ConfigurationError, naming `key`, if the package that constraints need is missing."""
    if find_spec("llguidance") is None:
        raise ConfigurationError(f"{key} needs the package llguidance: {install_command('constrain')}, or leave it out")


def _is_hosted(client: object) -> bool:
    (hosted, _), _ = backends.client_classes()
    return isinstance(client, hosted)
