"""The engine of a run, chosen in one place and never silently: the local engine or the hosted Tinker service.

The config's `backend` decides; if it is None, TINKER_BACKEND (local | api | tinker); else local. This is the only
module that imports `tinker_local_backend`, and it does so lazily.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, cast

from tinker_cookbook import server_watch, variables
from tinker_cookbook.clients import ServiceClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_names import did_you_mean
from tinker_cookbook.utils.lazy import LazyModule, transformers

Backend = Literal["local", "tinker"]
_REFUSED = (400, 401, 403, 404, 413, 422)
"""HTTP statuses for a wrong request or API key."""

_ALIASES: dict[str, Backend] = {"local": "local", "tinker": "tinker", "api": "tinker"}
_local_clients: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
_remote_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""Open clients of the SDK."""
_made: ContextVar[list[Any] | None] = ContextVar("made_service_clients", default=None)
"""Clients made inside the innermost `closing_clients`. Samplers keep the session but not the client, and only the client can
end the session."""

shipped = LazyModule("tinker_local_backend.shipped")
"""The shipped models and data, and the default model."""

EndStatus = Literal["success", "errored", "interrupted"]
"""How a session may end, in the SDK's words."""
CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


def resolve_backend(backend: str | None = None) -> Backend:
    """The backend for this name, or for the environment. Raises ConfigurationError for an unknown name."""
    source, name = "backend", backend
    if name is None:
        source, name = "TINKER_BACKEND", variables.read("TINKER_BACKEND")
    if name is None:
        name = "local"
    if name not in _ALIASES:
        raise ConfigurationError(f"{source}={name!r} is unknown; use local, or tinker (the hosted service; also api)")
    return _ALIASES[name]


def check_backend(
    backend: str | None, model_name: str | None, base_url: str | None = None, field: str = "model_name"
) -> Backend:
    """Check everything about engine and model that needs no loading.

    Args:
        model_name: None if the model is not known yet.
        field: the user's name for the model, for errors.

    Raises:
        ConfigurationError: unknown backend, hosted without a key, a base_url with the local engine, a TINKER_LOCAL_*
            variable with an invalid value, no such model, or a model folder that the engine does not support.
    """
    resolved = resolve_backend(backend)
    if resolved == "tinker":
        if variables.read("TINKER_API_KEY") is None and variables.read("TINKER_CREDENTIAL_CMD") is None:
            raise ConfigurationError(
                "backend=tinker needs an API key: export TINKER_API_KEY=tml-... (from the Tinker console), "
                "or use backend=local"
            )
        source, address = "base_url", base_url
        if address is None:
            source, address = "TINKER_BASE_URL", variables.read("TINKER_BASE_URL")
        if address is not None and not address.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"{source}={address!r} is not an address; give one such as http://gpu-machine:8000"
            )
        if address is None and model_name is not None and Path(model_name).is_dir():
            raise ConfigurationError(
                f"{field}={model_name!r} is a local directory; the hosted service takes the names it serves, "
                "such as Qwen/Qwen3-4B-Instruct-2507"
            )
        return resolved
    if base_url is not None:
        raise ConfigurationError(
            f"base_url={base_url!r} is for servers that speak the Tinker protocol; set backend=tinker with it, or drop it"
        )
    chosen = (backend, variables.read("TINKER_BACKEND"), os.environ.get("TINKER_LOCAL_BACKEND"))
    if variables.read("TINKER_BASE_URL") is not None and not any(chosen):
        raise ConfigurationError(
            "TINKER_BASE_URL is set, but no backend is chosen, and the local engine does not use it: set backend=tinker "
            "to run there, or backend=local to run here"
        )
    _check_local_environment()
    if model_name is None:
        return resolved
    from tinker_local_backend import ModelLoadError
    from tinker_local_backend.engine.model.refusals import check_model_name

    try:
        check_model_name(model_name)
    except ModelLoadError as error:
        raise ConfigurationError(f"{field}: {error}{did_you_mean(model_name, shipped.shipped_models())}") from error
    if (why := _why_not_folder(model_name)) is not None:
        raise ConfigurationError(f"{field}: {why}")
    return resolved


def _why_not_folder(model_name: str) -> str | None:
    """`why_not_local` for a model folder. None for hub ids, and for an unreadable config, which loading reports."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        return None
    try:
        config: Any = cast(Any, transformers.AutoConfig).from_pretrained(str(folder)).get_text_config()
    except (OSError, ValueError, KeyError):
        return None
    return why_not_local(model_name, config)


def why_not_local(model_name: str, config: Any) -> str | None:
    """The feature of a model's (transformers) config that the local engine does not support; None if there is none."""
    from tinker_local_backend import ModelLoadError
    from tinker_local_backend.engine.model.refusals import refuse_unsupported

    try:
        refuse_unsupported(model_name, config)
    except ModelLoadError as error:
        return str(error)
    return None


def samples_only(config: Any) -> bool:
    """Whether the local engine can sample from a model with this (transformers) config but not train it."""
    from tinker_local_backend.engine.model import refusals

    return refusals.samples_only(config)


def leaves_experts(config: Any) -> bool:
    """Whether the local engine trains a model with this (transformers) config without its routed experts."""
    from tinker_local_backend.engine.model import refusals

    return refusals.leaves_experts(config)


def state_bytes(model: Any, config: Any) -> int:
    """Bytes of recurrent state that the local engine keeps per sequence, given the (transformers) model, which may be on the
    meta device, and its text config. Raises TypeError if the model alone does not determine it.
    """
    from tinker_local_backend.engine.model.mixers import state_shapes

    return sum(shape.bytes for shape in state_shapes(model, config.hidden_size, model.dtype).values())


def create_service_client(
    backend: str | None = None, base_url: str | None = None, display_name: str | None = None
) -> ServiceClient:
    """A service client for the chosen engine.

    The local one is deterministic: a single loop drives it, and the same program gives bitwise equal results. It is
    shared within the process while it is referenced, so that a policy, a judge and a teacher on the same base model
    share its weights.

    Args:
        display_name: name of the session, for people. The local client is one session; its first user names it.

    Raises:
        ConfigurationError: the hosted service, or the server at `base_url`, is reachable and rejects the key.
    """
    if resolve_backend(backend) == "tinker":
        import tinker

        address, name = server_watch.server_address(base_url)
        if (key := variables.read("TINKER_API_KEY")) is not None:
            server_watch.check_key(address, name, key)
        client = tinker.ServiceClient(base_url=base_url, display_name=display_name)
        server_watch.ServerWatch(address, name, client)
        _remote_clients.add(client)
        if (made := _made.get()) is not None:
            made.append(client)
        return cast(ServiceClient, client)
    _check_local_environment()
    import tinker_local_backend

    home = os.environ.get("TINKER_LOCAL_HOME", "")  # a client saves to the path set when it was made
    client = _local_clients.get(home)
    if client is None:
        client = _local_clients[home] = tinker_local_backend.ServiceClient(
            deterministic=True, display_name=display_name
        )
    return cast(ServiceClient, client)


def _close(clients: Sequence[Any], status: EndStatus) -> None:
    """Close these clients' sessions, so that servers free models and samplers without waiting for the heartbeat timeout.

    Waits at most CLOSE_SECONDS; servers that do not answer, local clients and closed clients are skipped.
    """
    is_open = [client for client in clients if _is_remote(client)]
    _remote_clients.difference_update(is_open)
    closing = [client.close(status) for client in is_open if not server_watch.is_silent(client)]
    deadline = time.monotonic() + CLOSE_SECONDS
    for future in closing:
        try:
            future.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            logger.debug("closing this client's session failed: %s: %s", type(error).__name__, error)


def _is_remote(client: object) -> bool:
    return any(client is remote for remote in list(_remote_clients))


class _End:
    """How a block ended."""

    status: EndStatus = "errored"

    @contextmanager
    def noted(self) -> Generator[None]:
        try:
            yield
            self.status = "success"
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.status = "interrupted"
            raise


@contextmanager
def closing_clients() -> Generator[None]:
    """On exit, close every hosted client that `create_service_client` made inside the block."""
    made: list[Any] = []
    token = _made.set(made)
    end = _End()
    try:
        with end.noted():
            yield
    finally:
        _made.reset(token)
        _close(made, end.status)


@asynccontextmanager
async def closed_afterwards(client: ServiceClient) -> AsyncGenerator[None]:
    """Run the body, then close a hosted client; a local one may be shared and is freed with its last user."""
    end = _End()
    try:
        with end.noted():
            yield
    finally:
        if _is_remote(client):
            await asyncio.to_thread(_close, [client], end.status)


def serve_as_replica() -> None:
    """On a torchrun rank other than 0: follow rank 0 until it ends, then exit. Elsewhere: return immediately."""
    if int(os.environ.get("RANK", "0")) > 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        import tinker_local_backend

        tinker_local_backend.serve_as_replica()


def check_variables() -> None:
    """Raise ConfigurationError for an unknown TINKER_* variable, or one with an invalid value."""
    from tinker_local_backend import environment as table

    with _refusals_of_variables():
        table.check_variables()


def check_command() -> None:
    """First call of a command without `run_recipe`: for an unknown or invalid TINKER_* variable, print one line and
    exit with code 2; `--help` is handled first.
    """
    from tinker_local_backend import command

    command.check_command()


def _check_local_environment() -> None:
    """Raise ConfigurationError for a TINKER_LOCAL_* variable with an invalid or unsupported value."""
    from tinker_local_backend import environment as table

    with _refusals_of_variables():
        table.check_environment()


@contextmanager
def _refusals_of_variables() -> Generator[None]:
    from tinker_local_backend import RequestError

    try:
        yield
    except RequestError as error:
        raise ConfigurationError(str(error)) from error


def try_hub_once() -> None:
    """Call before using the Hugging Face hub: if it does not answer, only its cache is used from now on."""
    from tinker_local_backend import hub_access

    hub_access.try_hub_once()


def describe_engine(backend: str | None = None, base_url: str | None = None) -> dict[str, str | None]:
    """The engine: `backend`, plus device, dtype and versions of the local engine, or the address of the hosted one."""
    if resolve_backend(backend) == "tinker":
        return {"backend": "tinker", "base_url": base_url or variables.read("TINKER_BASE_URL")}
    from tinker_local_backend.environment import describe

    return {"backend": "local", **describe()}


def trace_engine(backend: str | None, opener: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    """Open `opener(name)` around each operation of the local engine, on its thread; None: stop. Not for the hosted one."""
    if resolve_backend(backend) == "local":
        from tinker_local_backend.engine.operation_queue import listen

        listen(opener)


def local_engine() -> Any:
    """The package of the local engine."""
    import tinker_local_backend

    return tinker_local_backend


def client_classes() -> list[tuple[type, type]]:
    """The classes of sampling and training clients: the SDK's, and the local engine's."""
    # Named by their modules: while a program runs on the local engine, `tinker` exports the local classes.
    from tinker.lib.public_interfaces import sampling_client, training_client  # pyright: ignore[reportMissingTypeStubs]

    import tinker_local_backend as local

    return [
        (sampling_client.SamplingClient, training_client.TrainingClient),
        (local.SamplingClient, local.TrainingClient),
    ]


def is_engine_error(error: BaseException) -> bool:
    """Whether an engine raised this deliberately: its message is complete, and a traceback adds nothing."""
    import tinker

    local = sys.modules.get("tinker_local_backend")
    return isinstance(error, tinker.TinkerError) or (local is not None and isinstance(error, local.LocalBackendError))


def would_repeat(error: BaseException) -> bool:
    """Whether an engine rejected the request, so that the same command fails again. False for a crash or a lost server."""
    import tinker

    local = sys.modules.get("tinker_local_backend")
    if local is not None and isinstance(error, local.RequestError | local.ModelLoadError):
        return True
    if isinstance(error, tinker.APIStatusError):
        return error.status_code in _REFUSED
    return isinstance(error, tinker.RequestFailedError) and error.category == tinker.types.RequestErrorCategory.User


def is_non_finite_error(error: BaseException) -> bool:
    """Whether an engine reports with this error that a loss or a gradient is NaN or infinite."""
    local = sys.modules.get("tinker_local_backend")
    return local is not None and isinstance(error, local.NonFiniteError)


def is_checkpoint_error(error: BaseException) -> bool:
    """Whether an engine reports with this error that a checkpoint is missing or unreadable."""
    import tinker

    local = sys.modules.get("tinker_local_backend")
    if local is not None and isinstance(error, local.CheckpointError):
        return True
    # Loading is queued on the service: an invalid path is reported later, as a failed request.
    failed = isinstance(error, tinker.RequestFailedError) and would_repeat(error)
    return failed or isinstance(error, tinker.NotFoundError)


def adapter_in_form(folder: Path, target: Path, base_model: str, for_vllm: bool) -> Path:
    """The folder of an adapter with tensor names that PEFT, or vLLM, reads: `folder`, or a converted copy in `target`.

    Raises LocalBackendError: the adapter cannot be read, or does not fit the base model.
    """
    from tinker_local_backend.storage import foreign_adapters

    return foreign_adapters.in_form(folder, target, base_model, for_vllm)


def merge_adapter(
    adapter: str | Path, output: str | Path, base_model: str, dtype: str | None, overwrite: bool
) -> float:
    """Write a base model with a PEFT adapter merged in. The computation is the same for every engine.

    Returns:
        The largest difference between the logits of the saved model and of base model plus adapter, both in float32.

    Raises:
        ConfigurationError: unknown dtype, or an output that must not be overwritten.
        LocalBackendError: adapter or base model cannot be loaded or do not match; nothing is written then.
    """
    from tinker_local_backend import merge

    if dtype is not None and dtype not in merge.DTYPES:
        raise ConfigurationError(f"dtype={dtype!r}: must be {', '.join(merge.DTYPES)}, or None for the base model's")
    torch_dtype = None if dtype is None else merge.DTYPES[dtype]
    return merge.merge_adapter(str(adapter), output, base_model, torch_dtype, overwrite).max_abs_diff
