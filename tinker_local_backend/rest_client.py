"""RestClient: list, describe, keep and delete training runs and checkpoints, with the SDK's method names and types.

Uses only files and the run registry, no engine and no model, so it works without a service client:

    for checkpoint in RestClient().list_user_checkpoints().result().checkpoints:
        print(checkpoint.tinker_path, checkpoint.size_bytes)

Every method returns a future, to be awaited or read with `.result()`; each also exists as a coroutine under its older name,
`<method>_async`. Short calls run at once, on the caller's thread: they take milliseconds, see every earlier save, and cannot
change which sampling requests share a batch. Archives and copies take longer, with the size of the weights, and run on a new
thread. A call raises RequestError for an invalid request.

A home belongs to one user: `access_scope` has no effect, and publishing only sets a mark.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from tinker import types

from tinker_local_backend import hosted_only
from tinker_local_backend.errors import NotFoundError, RequestError
from tinker_local_backend.futures import EngineFuture, at_once, awaited, on_a_thread
from tinker_local_backend.shipped import TINY_CHAT
from tinker_local_backend.storage import catalog
from tinker_local_backend.storage.catalog import CheckpointEntry, RunListing, read_info
from tinker_local_backend.storage.paths import SHAPES, CheckpointKind, CheckpointPath, check_run_id, local_home
from tinker_local_backend.storage.registry import Registry, Run, Session
from tinker_local_backend.storage.tar_stream import adapter_files

T = TypeVar("T")
AccessScope = Literal["owned", "accessible"]

OWNER = "local"


@dataclass(frozen=True)
class CheckpointArchiveUrlResponse:
    """The URL of an archive. Older SDKs had a type of this name; the current one does not."""

    url: str
    """a file:// URL of a .tar.gz, which `urllib.request.urlretrieve` understands"""
    expires: datetime | None
    """when the checkpoint and its archive expire; None: never"""


def shipped_models() -> list[types.SupportedModel]:
    """The tiny model of a source checkout; empty if the package was installed without it."""
    try:
        config = json.loads((TINY_CHAT / "config.json").read_text())
    except FileNotFoundError:
        return []
    return [supported_model(str(TINY_CHAT), config["max_position_embeddings"])]


def supported_model(name: str, context_length: int) -> types.SupportedModel:
    return types.SupportedModel(model_name=name, max_context_length=context_length, trainable=True, sampleable=True)


class RestClient:
    """The runs and checkpoints of one home.

    Args:
        home: folder of the checkpoints; None means TINKER_LOCAL_HOME, else the user's data folder.
        base_url, api_key: arguments of the SDK's client; logged, and have no effect.
        session: the session that copies are recorded in; None makes a new one. ServiceClient.create_rest_client passes its own.
        supported_models: the models for get_server_capabilities.
    """

    def __init__(
        self,
        home: Path | str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        session: Session | None = None,
        supported_models: Callable[[], list[types.SupportedModel]] = shipped_models,
    ):
        hosted_only.log_without_effect(base_url=base_url, api_key=api_key)
        self._home = Path(home) if home is not None else local_home()
        self._registry = Registry(self._home)
        self._session = session or Session()
        self._supported_models = supported_models

    @at_once
    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The loaded base models and the shipped one. Any other that transformers can load is supported too."""
        return types.GetServerCapabilitiesResponse(supported_models=self._supported_models())

    # Training runs

    @at_once
    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> types.TrainingRunsResponse:
        """One page of the home's training runs, newest first, and their total in `cursor`."""
        hosted_only.refuse_arguments(project_id=project_id)
        runs, cursor = _page(limit, offset, self._registry.runs())
        return types.TrainingRunsResponse(training_runs=self._training_runs(runs), cursor=cursor)

    @at_once
    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> types.TrainingRun:
        """One training run. Raises NotFoundError if the home has none with this id."""
        check_run_id(training_run_id)
        return self._training_runs([self._run(training_run_id)])[0]

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> EngineFuture[types.TrainingRun]:
        """The training run that a checkpoint belongs to."""
        return self.get_training_run(CheckpointPath.parse(tinker_path).run_id)

    @at_once
    def get_weights_info_by_tinker_path(self, tinker_path: str) -> types.WeightsInfoResponse:
        """Base model and LoRA settings of a checkpoint, as needed to load it."""
        info = read_info(self._home, CheckpointPath.parse(tinker_path))
        return types.WeightsInfoResponse(
            base_model=info.base_model,
            is_lora=True,
            lora_rank=info.spec.rank,
            train_unembed=info.spec.train_unembed,
            train_mlp=info.spec.train_mlp,
            train_attn=info.spec.train_attn,
        )

    # Checkpoints

    @at_once
    def list_checkpoints(self, training_run_id: str) -> types.CheckpointsListResponse:
        """All checkpoints of a run, oldest first. Damaged ones are left out, and the run is then `corrupted`."""
        check_run_id(training_run_id)
        self._run(training_run_id)
        entries = catalog.list_run(self._home, training_run_id).entries
        return types.CheckpointsListResponse(checkpoints=[_checkpoint(entry) for entry in entries])

    @at_once
    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> types.CheckpointsListResponse:
        """One page of the checkpoints of all runs, newest first, and their total in `cursor`."""
        listings = catalog.list_runs(self._home, [run.run_id for run in self._registry.runs()])
        entries = [entry for listing in listings.values() for entry in listing.entries]
        entries.sort(key=lambda entry: (-entry.info.created, str(entry.path)))
        page, cursor = _page(limit, offset, entries)
        return types.CheckpointsListResponse(checkpoints=[_checkpoint(entry) for entry in page], cursor=cursor)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> EngineFuture[None]:
        """Delete a checkpoint by run and id (`<kind>/<name>`, as in `weights/000010`)."""
        return self.delete_checkpoint_from_tinker_path(_path_of(training_run_id, checkpoint_id))

    @at_once
    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> None:
        """Delete a checkpoint and its archive. Clients that were made from it still work."""
        catalog.remove(self._home, CheckpointPath.parse(tinker_path))

    @at_once
    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> None:
        """Mark a checkpoint as public."""
        catalog.set_public(self._home, CheckpointPath.parse(tinker_path), True)

    @at_once
    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> None:
        """Remove the mark."""
        catalog.set_public(self._home, CheckpointPath.parse(tinker_path), False)

    @at_once
    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire this many seconds from now; None: never. An expired checkpoint cannot be restored."""
        catalog.set_ttl(self._home, CheckpointPath.parse(tinker_path), ttl_seconds)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> EngineFuture[str]:
        """Copy a checkpoint's files into a new training run. The result is the copy's tinker:// path."""
        hosted_only.refuse_arguments(
            destination_project_id=destination_project_id, weights_access_token=weights_access_token
        )
        source = CheckpointPath.parse(path)

        def work() -> str:
            info = read_info(self._home, source)
            copied = catalog.copy(self._home, source, uuid.uuid4().hex, ttl_seconds)
            session = self._session
            run = Run(copied.run_id, session.session_id, info.base_model, info.spec, info.user_metadata, has_saved=True)
            self._registry.record_run(run, session)
            return str(copied)

        return on_a_thread(work, "tinker-local-rest")

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> EngineFuture[CheckpointArchiveUrlResponse]:
        """As get_checkpoint_archive_url_from_tinker_path, by run and id (`<kind>/<name>`)."""
        return self.get_checkpoint_archive_url_from_tinker_path(_path_of(training_run_id, checkpoint_id))

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> EngineFuture[CheckpointArchiveUrlResponse]:
        """Pack a checkpoint's files into a .tar.gz under `<home>/archives/` and return its address."""
        path = CheckpointPath.parse(tinker_path)

        def run() -> CheckpointArchiveUrlResponse:
            file = catalog.archive(self._home, path)
            return CheckpointArchiveUrlResponse(
                url=file.resolve().as_uri(), expires=_time(catalog.read_entry(self._home, path).expires_at)
            )

        return on_a_thread(run, "tinker-local-rest")

    @at_once
    def get_external_weights_urls(self, tinker_path: str) -> types.ExternalWeightsUrlsResponse:
        """The file:// URLs of an export's files, by name. Raises RequestError for a checkpoint of another kind."""
        path = CheckpointPath.parse(tinker_path)
        if path.kind != "external_weights":
            raise RequestError(
                f"{tinker_path} is not an export; give the path that TrainingClient.save_weights_external returned, or ask "
                "get_checkpoint_archive_url_from_tinker_path"
            )
        # The SDK's type requires a time; ten years is the longest TTL of a checkpoint.
        expires = _time(catalog.read_entry(self._home, path).expires_at) or datetime.now(UTC) + timedelta(days=3650)
        files = {name: file.resolve().as_uri() for name, file in adapter_files(path.folder(self._home)).items()}
        return types.ExternalWeightsUrlsResponse(urls=files, expires=expires)

    # Sessions

    @at_once
    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> types.ListSessionsResponse:
        """One page of session ids, newest first. A session is one service client that trained or made a REST client."""
        sessions, _ = _page(limit, offset, self._registry.sessions())
        return types.ListSessionsResponse(sessions=[session.session_id for session in sessions])

    @at_once
    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> types.GetSessionResponse:
        """A session's training runs, oldest first. Its samplers are known only to their process and not listed."""
        for session in self._registry.sessions():
            if session.session_id == session_id:
                runs = [run.run_id for run in reversed(self._registry.runs()) if run.session_id == session_id]
                return types.GetSessionResponse(
                    training_run_ids=runs,
                    sampler_ids=[],
                    user_metadata=session.user_metadata or None,
                    display_name=session.display_name,
                )
        raise self._unknown(f"session {session_id!r}", "list_sessions")

    @at_once
    def search_sessions(self, request: types.SessionSearchRequest) -> types.SessionSearchResponse:
        """One page of the sessions that match all filters, newest first. Every session here is the caller's own.

        Raises RequestError for a filter by project or by status, which sessions here lack.
        """
        hosted_only.refuse_arguments(project_ids=request.project_ids, statuses=request.statuses)
        matching = [session for session in self._registry.sessions() if _matches(session, request)]
        if (after := request.cursor) is not None:
            ids = [session.session_id for session in matching]
            if after.last_session_id in ids:
                matching = matching[ids.index(after.last_session_id) + 1 :]
            else:  # it was deleted meanwhile
                matching = [session for session in matching if session.created < after.last_created_at.timestamp()]
        page = [self._summary(session) for session in matching[: request.limit]]
        cursor = None
        if len(matching) > request.limit:
            last = page[-1]
            cursor = types.SessionSearchCursor(last_created_at=last.created_at, last_session_id=last.session_id)
        return types.SessionSearchResponse(sessions=page, next_cursor=cursor)

    def _summary(self, session: Session) -> types.SessionSummary:
        runs = [run.run_id for run in self._registry.runs() if run.session_id == session.session_id]
        entries = [entry for listing in catalog.list_runs(self._home, runs).values() for entry in listing.entries]
        return types.SessionSummary(
            session_id=session.session_id,
            created_at=datetime.fromtimestamp(session.created, UTC),
            owner=OWNER,
            project_id="",
            checkpoints_count=len(entries),
            display_name=session.display_name,
            user_metadata=session.user_metadata or None,
            checkpoint_storage_bytes=sum(entry.size_bytes for entry in entries),
        )

    @at_once
    def whoami(self) -> types.WhoamiResponse:
        """The owner of the home: there are no accounts."""
        return types.WhoamiResponse(user_urn=f"urn:tinker-local:user:{OWNER}", org_urn=f"urn:tinker-local:org:{OWNER}")

    def get_telemetry(self) -> None:
        """None: this engine sends no telemetry."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        """Refuse the methods that only the hosted service has."""
        return hosted_only.refused_method("RestClient", name)

    def _run(self, run_id: str) -> Run:
        for run in self._registry.runs():
            if run.run_id == run_id:
                return run
        raise self._unknown(f"training run {run_id!r}", "list_training_runs")

    def _unknown(self, what: str, listing: str) -> NotFoundError:
        none, names = f"there is no {what}", f"{listing} names them"
        return NotFoundError(f"{none} under {self._home}; {names}", remote=f"{none}; {names}")

    def _training_runs(self, runs: Sequence[Run]) -> list[types.TrainingRun]:
        listings = catalog.list_runs(self._home, [run.run_id for run in runs])
        return [_training_run(run, listings[run.run_id]) for run in runs]

    # Older names

    get_server_capabilities_async = awaited(get_server_capabilities)
    list_training_runs_async = awaited(list_training_runs)
    get_training_run_async = awaited(get_training_run)
    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)
    get_weights_info_by_tinker_path_async = awaited(get_weights_info_by_tinker_path)
    list_checkpoints_async = awaited(list_checkpoints)
    list_user_checkpoints_async = awaited(list_user_checkpoints)
    delete_checkpoint_async = awaited(delete_checkpoint)
    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)
    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)
    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)
    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)
    copy_weights_async = awaited(copy_weights)
    get_checkpoint_archive_url_async = awaited(get_checkpoint_archive_url)
    get_checkpoint_archive_url_from_tinker_path_async = awaited(get_checkpoint_archive_url_from_tinker_path)
    get_external_weights_urls_async = awaited(get_external_weights_urls)
    list_sessions_async = awaited(list_sessions)
    get_session_async = awaited(get_session)
    search_sessions_async = awaited(search_sessions)
    whoami_async = awaited(whoami)


def _matches(session: Session, request: types.SessionSearchRequest) -> bool:
    """Whether a session has all of the request's metadata, and the id or every word of the display name if either is given."""
    metadata = session.user_metadata
    if any(metadata.get(key) != value for key, value in request.user_metadata.items()):
        return False
    if request.session_id is None and request.display_name is None:
        return True
    name = (session.display_name or "").casefold()
    words = (request.display_name or "").casefold().split()
    return session.session_id == request.session_id or (bool(words) and all(word in name for word in words))


def _training_run(run: Run, listing: RunListing) -> types.TrainingRun:
    last = {kind: _checkpoint(entry) for kind, entry in {e.path.kind: e for e in listing.entries}.items()}
    return types.TrainingRun(
        training_run_id=run.run_id,
        base_model=run.base_model,
        model_owner=OWNER,
        is_lora=True,
        corrupted=bool(listing.damaged),
        lora_rank=run.spec.rank,
        last_request_time=datetime.fromtimestamp(run.last_request_time, UTC),
        last_checkpoint=last.get("weights"),
        last_sampler_checkpoint=last.get("sampler_weights"),
        user_metadata=run.user_metadata or None,
    )


_TYPES: dict[CheckpointKind, types.CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def _checkpoint(entry: CheckpointEntry) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=entry.path.checkpoint_id,
        checkpoint_type=_TYPES[entry.path.kind],
        time=datetime.fromtimestamp(entry.info.created, UTC),
        tinker_path=str(entry.path),
        size_bytes=entry.size_bytes,
        public=entry.public,
        user_metadata=entry.info.user_metadata or None,
        expires_at=_time(entry.expires_at),
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _path_of(run_id: str, checkpoint_id: str) -> str:
    if "/" not in checkpoint_id:
        raise RequestError(
            f"checkpoint_id must be {' or '.join(SHAPES)}, got {checkpoint_id!r}: a run may have several checkpoints of one name"
        )
    return f"tinker://{run_id}/{checkpoint_id}"


def _page(limit: int, offset: int, items: list[T]) -> tuple[list[T], types.Cursor]:
    for name, value in (("limit", limit), ("offset", offset)):
        if not isinstance(value, int) or value < 0:
            raise RequestError(f"{name} must be an integer >= 0, got {value!r}")
    return items[offset : offset + limit], types.Cursor(limit=limit, offset=offset, total_count=len(items))
