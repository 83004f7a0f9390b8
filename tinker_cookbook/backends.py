"""Which engine a run uses, decided in one place and never silently: the local engine or the hosted Tinker service.

`backend` of the config decides; where it is None, TINKER_BACKEND (local | api | tinker); else local.
This is the only module that imports `tinker_local_backend`, and it does so when it is needed.
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

from tinker_cookbook import environment, server_watch
from tinker_cookbook.clients import ServiceClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_names import did_you_mean
from tinker_cookbook.utils.lazy import transformers

Backend = Literal["local", "tinker"]
_REFUSED = (400, 401, 403, 404, 413, 422)
"""HTTP statuses of what is wrong with the request itself, or with the key."""

_ALIASES: dict[str, Backend] = {"local": "local", "tinker": "tinker", "api": "tinker"}
_local_clients: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
_remote_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""The SDK's, until they are closed."""
_made: ContextVar[list[Any] | None] = ContextVar("made_service_clients", default=None)
"""Those of the innermost `closing_clients`. Samplers keep a session and not its client, and only the client ends the session."""

_MIN_P_IS_LOCAL = (
    "the hosted service does not offer it; leave it out (top_k and top_p are offered), or use backend=local"
)

EndStatus = Literal["success", "errored", "interrupted"]
"""How a session may end, in the SDK's words."""
CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


def resolve_backend(backend: str | None = None) -> Backend:
    """The backend that this name, or the environment, asks for. Raises ConfigurationError for an unknown name."""
    source, name = "backend", backend
    if name is None:
        source, name = "TINKER_BACKEND", environment.read("TINKER_BACKEND")
    if name is None:
        name = "local"
    if name not in _ALIASES:
        raise ConfigurationError(f"{source}={name!r} is unknown; use local, or tinker (the hosted service; also api)")
    return _ALIASES[name]


def check_backend(
    backend: str | None, model_name: str | None, base_url: str | None = None, field: str = "model_name"
) -> Backend:
    """Everything about engine and model that can be wrong without loading anything.

    Args:
        model_name: None where the model is not known yet.
        field: what the user calls the model, for errors.

    Raises:
        ConfigurationError: unknown backend, hosted without a key, a base_url with the local engine, a TINKER_LOCAL_*
            variable that the engine does not understand, no such model, a folder of one that the engine refuses.
    """
    resolved = resolve_backend(backend)
    if resolved == "tinker":
        if environment.read("TINKER_API_KEY") is None and environment.read("TINKER_CREDENTIAL_CMD") is None:
            raise ConfigurationError(
                "backend=tinker needs an API key: export TINKER_API_KEY=tml-... (from the Tinker console), "
                "or use backend=local"
            )
        source, address = "base_url", base_url
        if address is None:
            source, address = "TINKER_BASE_URL", environment.read("TINKER_BASE_URL")
        if address is not None and not address.startswith(("http://", "https://")):
            raise ConfigurationError(f"{source}={address!r} is no address; give one such as http://gpu-machine:8000")
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
    chosen = (backend, environment.read("TINKER_BACKEND"), os.environ.get("TINKER_LOCAL_BACKEND"))
    if environment.read("TINKER_BASE_URL") is not None and not any(chosen):
        raise ConfigurationError(
            "TINKER_BASE_URL is set, but no backend is chosen, and the local engine has no use for it: set backend=tinker "
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
        raise ConfigurationError(f"{field}: {error}{did_you_mean(model_name, shipped_models())}") from error
    if (why := _why_not_folder(model_name)) is not None:
        raise ConfigurationError(f"{field}: {why}")
    return resolved


def _why_not_folder(model_name: str) -> str | None:
    """`why_not_local` of a model folder. None for hub ids, and for a config that cannot be read: loading says what is wrong."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        return None
    try:
        config: Any = cast(Any, transformers.AutoConfig).from_pretrained(str(folder)).get_text_config()
    except (OSError, ValueError, KeyError):
        return None
    return why_not_local(model_name, config)


def why_not_local(model_name: str, config: Any) -> str | None:
    """What in a model's (transformers) config the local engine does not support; None when it finds nothing."""
    from tinker_local_backend import ModelLoadError
    from tinker_local_backend.engine.model.refusals import refuse_unsupported

    try:
        refuse_unsupported(model_name, config)
    except ModelLoadError as error:
        return str(error)
    return None


def samples_only(config: Any) -> bool:
    """Whether the local engine samples from a model with this (transformers) config and does not train it."""
    from tinker_local_backend.engine.model import refusals

    return refusals.samples_only(config)


def leaves_experts(config: Any) -> bool:
    """Whether the local engine trains a model with this (transformers) config without its routed experts."""
    from tinker_local_backend.engine.model.refusals import has_experts

    return has_experts(config)


def create_service_client(
    backend: str | None = None, base_url: str | None = None, display_name: str | None = None
) -> ServiceClient:
    """A service client of the chosen engine.

    The local one is deterministic: one loop drives it, and the same program gets the same bits. It is shared within the
    process while anyone holds it, so that a policy, a judge and a teacher on the same base model share its weights.

    Args:
        display_name: of the session, for people. The local client is a session; whoever makes it names it.

    Raises:
        ConfigurationError: the hosted service, or the server at `base_url`, is there and does not take the key.
    """
    if resolve_backend(backend) == "tinker":
        import tinker

        address, name = server_watch.server_address(base_url)
        if (key := environment.read("TINKER_API_KEY")) is not None:
            server_watch.check_key(address, name, key)
        client = tinker.ServiceClient(base_url=base_url, display_name=display_name)
        server_watch.ServerWatch(address, name, client)
        _remote_clients.add(client)
        if (made := _made.get()) is not None:
            made.append(client)
        return cast(ServiceClient, client)
    _check_local_environment()
    import tinker_local_backend

    home = os.environ.get("TINKER_LOCAL_HOME", "")  # a client saves where this pointed when it was made
    client = _local_clients.get(home)
    if client is None:
        client = _local_clients[home] = tinker_local_backend.ServiceClient(
            deterministic=True, display_name=display_name
        )
    return cast(ServiceClient, client)


def _close(clients: Sequence[Any], status: EndStatus) -> None:
    """Tell servers that these clients are done, so that they free models and samplers now and not when heartbeats stay away.

    Waits at most CLOSE_SECONDS; a server that does not answer is not told. Local and closed clients are passed over.
    """
    is_open = [client for client in clients if _is_remote(client)]
    _remote_clients.difference_update(is_open)
    closing = [client.close(status) for client in is_open if not server_watch.is_silent(client)]
    deadline = time.monotonic() + CLOSE_SECONDS
    for future in closing:
        try:
            future.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            logger.debug("the server was not told that this client is done: %s: %s", type(error).__name__, error)


def _is_remote(client: object) -> bool:
    return any(client is remote for remote in list(_remote_clients))


class _End:
    """How a body ended."""

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
    """Close, after the body, what `create_service_client` made of servers within it, also for those who kept only a sampler."""
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
    """Run the body, then close the client if it is a server's; a local one may be shared and ends with its last user."""
    end = _End()
    try:
        with end.noted():
            yield
    finally:
        if _is_remote(client):
            await asyncio.to_thread(_close, [client], end.status)


def serve_as_replica() -> None:
    """On a rank other than 0 of torchrun's: follow rank 0 until it ends, then exit. Elsewhere: return at once."""
    if int(os.environ.get("RANK", "0")) > 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        import tinker_local_backend

        tinker_local_backend.serve_as_replica()


def check_variables() -> None:
    """Raise ConfigurationError for a TINKER_* variable that is set and not known, or has a value that is not understood."""
    from tinker_local_backend import environment as table

    with _refusals_of_variables():
        table.check_variables()


def check_command() -> None:
    """What a command without `run_recipe` begins with: one with a TINKER_* variable that is unknown or not understood ends here,
    with one line and exit code 2; `--help` is answered first."""
    from tinker_local_backend import command

    command.check_command()


def _check_local_environment() -> None:
    """Raise ConfigurationError for a TINKER_LOCAL_* variable that is set and not understood, or not supported."""
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


def default_model(shipped: str) -> str:
    """The name of the model where none is given: TINKER_DEBATE_BASE_MODEL, else this shipped one."""
    from tinker_local_backend import shipped as models

    return models.default_model(shipped)


def shipped_model(name: str) -> str:
    """The folder of a shipped model, by its short name; other names as they are."""
    from tinker_local_backend import shipped as models

    return models.shipped_model(name)


def shipped_path(name: str | Path) -> str:
    """Where a shipped file lies, by its name in the project; other names as they are."""
    from tinker_local_backend import shipped

    return shipped.shipped_path(name)


def example_data() -> Path:
    """The folder of the shipped models and data."""
    from tinker_local_backend import shipped

    return shipped.EXAMPLE_DATA


def shipped_models() -> list[str]:
    """The short names of the models that come with the project."""
    from tinker_local_backend import shipped as models

    return models.shipped_models()


def try_hub_once() -> None:
    """Before something is asked of the Hugging Face hub: where it does not answer, only what its cache holds is used from now on,
    and nothing is asked of it again and again."""
    from tinker_local_backend import hub_access

    hub_access.try_hub_once()


def describe_engine(backend: str | None = None, base_url: str | None = None) -> dict[str, str | None]:
    """Where models run: `backend`, and of the local engine device, dtype and versions, of the hosted one its address."""
    if resolve_backend(backend) == "tinker":
        return {"backend": "tinker", "base_url": base_url or environment.read("TINKER_BASE_URL")}
    from tinker_local_backend.environment import describe

    return {"backend": "local", **describe()}


def trace_engine(backend: str | None, opener: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    """Have `opener(name)` opened around each thing that the local engine does, on its own thread; None: no longer. What the
    hosted service does cannot be told."""
    if resolve_backend(backend) == "local":
        from tinker_local_backend.engine.operation_queue import listen

        listen(opener)


def sampling_params(client: object, min_p: float, **fields: Any) -> Any:
    """The SDK's sampling parameters, with `min_p` the local engine's. Raises ConfigurationError for min_p and a hosted client."""
    import tinker

    if min_p == 0:
        return tinker.SamplingParams(**fields)
    (hosted, _), _ = client_classes()
    if isinstance(client, hosted):
        raise ConfigurationError(f"min_p={min_p:g}: {_MIN_P_IS_LOCAL}")
    import tinker_local_backend

    return tinker_local_backend.SamplingParams(min_p=min_p, **fields)


def check_min_p(min_p: float, backend: Backend) -> None:
    """Raise ConfigurationError for a min_p that is none, or that the backend does not have."""
    if not 0 <= min_p <= 1:
        raise ConfigurationError(f"min_p={min_p}: must be between 0 (no limit) and 1")
    if min_p > 0 and backend != "local":
        raise ConfigurationError(f"min_p={min_p:g}: {_MIN_P_IS_LOCAL}")


def client_classes() -> list[tuple[type, type]]:
    """The classes of clients that sample and that train: the SDK's, and the local engine's."""
    # Named by their modules: while a program runs on the local engine, the names in `tinker` are those of its classes.
    from tinker.lib.public_interfaces import sampling_client, training_client  # pyright: ignore[reportMissingTypeStubs]

    import tinker_local_backend as local

    return [
        (sampling_client.SamplingClient, training_client.TrainingClient),
        (local.SamplingClient, local.TrainingClient),
    ]


def is_engine_error(error: BaseException) -> bool:
    """Whether an engine raised this on purpose: its message says what is wrong, and a traceback adds nothing."""
    import tinker

    local = sys.modules.get("tinker_local_backend")
    return isinstance(error, tinker.TinkerError) or (local is not None and isinstance(error, local.LocalBackendError))


def would_repeat(error: BaseException) -> bool:
    """Whether an engine refused what it was asked for: the same command would end in the same error. No crash, no lost server."""
    import tinker

    local = sys.modules.get("tinker_local_backend")
    if local is not None and isinstance(error, local.RequestError | local.ModelLoadError):
        return True
    if isinstance(error, tinker.APIStatusError):
        return error.status_code in _REFUSED
    return isinstance(error, tinker.RequestFailedError) and error.category == tinker.types.RequestErrorCategory.User


def is_non_finite_error(error: BaseException) -> bool:
    """Whether an engine says with this that a loss or a gradient is NaN or infinite."""
    local = sys.modules.get("tinker_local_backend")
    return local is not None and isinstance(error, local.NonFiniteError)


def is_checkpoint_error(error: BaseException) -> bool:
    """Whether an engine says with this that a checkpoint is gone or cannot be read."""
    import tinker

    local = sys.modules.get("tinker_local_backend")
    if local is not None and isinstance(error, local.CheckpointError):
        return True
    # Loading is queued on the service: what is wrong with the path comes back as a failed request of the user's making.
    failed = isinstance(error, tinker.RequestFailedError) and would_repeat(error)
    return failed or isinstance(error, tinker.NotFoundError)


def merge_adapter(
    adapter: str | Path, output: str | Path, base_model: str, dtype: str | None, overwrite: bool
) -> float:
    """Write a base model with a PEFT adapter merged in. The merging is plain arithmetic and the same for every engine.

    Returns:
        The largest difference of logits between the saved model and base model plus adapter, both in float32.

    Raises:
        ConfigurationError: unknown dtype, or an output that may not be written to.
        LocalBackendError: adapter or base model cannot be loaded or do not fit each other; nothing is written then.
    """
    from tinker_local_backend import merge

    if dtype is not None and dtype not in merge.DTYPES:
        raise ConfigurationError(f"dtype={dtype!r}: must be {', '.join(merge.DTYPES)}, or None for the base model's")
    torch_dtype = None if dtype is None else merge.DTYPES[dtype]
    return merge.merge_adapter(str(adapter), output, base_model, torch_dtype, overwrite).max_abs_diff
