"""ServiceClient: the entry point of the local engine, with the method names of the SDK's."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tinker_local_backend.engine import trainer
from tinker_local_backend.engine.base_model import check_model_name
from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.lora import LoraSpec
from tinker_local_backend.errors import RequestError
from tinker_local_backend.futures import ClientFuture
from tinker_local_backend.sampling_client import SamplingClient
from tinker_local_backend.storage import checkpoints
from tinker_local_backend.storage.paths import CheckpointPath, local_home
from tinker_local_backend.training_client import TrainingClient, TrainingRun, load_checkpoint

C = TypeVar("C")


class ServiceClient:
    """One engine: its clients share base models, KV cache and the worker thread.

    Args:
        home: where checkpoints live; None means TINKER_LOCAL_HOME, else the user's data folder.

    Close it (or use `with`) to free the models; it also closes when it is garbage or the program ends.
    """

    def __init__(self, home: Path | str | None = None):
        self._home = Path(home) if home is not None else local_home()
        self._engine = Engine()
        self._finalizer = weakref.finalize(self, self._engine.close)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> ClientFuture[TrainingClient]:
        """A new adapter on a base model (a directory or a Hugging Face id), starting as the identity.

        `seed` makes the initial A matrices reproducible; None draws one (from TINKER_LOCAL_SEED if that is set).
        """
        check_model_name(base_model)
        spec = LoraSpec(rank, train_attn, train_mlp, train_unembed)

        def create() -> TrainingClient:
            init_seed = self._engine.random_seed() if seed is None else seed
            run = self._new_run(base_model, spec, init_seed, user_metadata or {})
            return TrainingClient(run, self)

        return self._create(create)

    def create_training_client_from_state(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> ClientFuture[TrainingClient]:
        """A training client that starts from a saved adapter, with a fresh optimizer.

        `base_model`, when given, must be the checkpoint's. `user_metadata` is added to the checkpoint's own.
        """
        return self._from_state(path, base_model, user_metadata, with_optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> ClientFuture[TrainingClient]:
        """A training client that goes on from a saved state as if it had never stopped."""
        return self._from_state(path, base_model, user_metadata, with_optimizer=True)

    def _from_state(
        self, path: str, base_model: str | None, user_metadata: Mapping[str, str] | None, with_optimizer: bool
    ) -> ClientFuture[TrainingClient]:
        parsed = CheckpointPath.parse(path)
        info = checkpoints.read_info(self._home, parsed)
        if base_model is not None and base_model != info.base_model:
            raise RequestError(f"checkpoint {path} is of base model {info.base_model!r}, not {base_model!r}")
        metadata = {**info.user_metadata, **(user_metadata or {})}

        def create() -> TrainingClient:
            run = self._new_run(info.base_model, info.spec, 0, metadata)
            load_checkpoint(run, parsed, with_optimizer)
            return TrainingClient(run, self)

        return self._create(create)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> ClientFuture[SamplingClient]:
        """Sample from saved weights (`model_path`, a tinker:// path) or from a base model."""
        if (model_path is None) == (base_model is None):
            raise RequestError("give either model_path (a tinker:// path) or base_model")
        if base_model is not None:
            check_model_name(base_model)
            return self._create(lambda: SamplingClient(self._engine, self, self._engine.load(base_model), None))
        assert model_path is not None
        parsed = CheckpointPath.parse(model_path)
        info = checkpoints.read_info(self._home, parsed)

        def create() -> SamplingClient:
            model = self._engine.load(info.base_model)
            adapter = model.new_adapter(info.spec, seed=0)
            checkpoints.load_adapter(self._home, parsed, adapter)
            return SamplingClient(self._engine, self, model, adapter.snapshot())

        return self._create(create)

    def _new_run(self, base_model: str, spec: LoraSpec, seed: int, user_metadata: Mapping[str, str]) -> TrainingRun:
        model = self._engine.load(base_model)
        adapter = model.new_adapter(spec, seed)
        state = trainer.TrainState(adapter, trainer.AdamW(adapter.parameters()))
        return TrainingRun(self._engine, self._home, uuid.uuid4().hex, model, state, user_metadata)

    def _create(self, create: Callable[[], C]) -> ClientFuture[C]:
        future = self._engine.submit("clients", create)
        return ClientFuture(future.future(), future._link)

    def close(self) -> None:
        """Stop the engine and free the models. Requests that have not run fail with EngineClosedError."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The spelling of older SDKs.

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        return await self.create_lora_training_client(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata
        )

    async def create_training_client_from_state_async(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        return await self.create_training_client_from_state(path, base_model, user_metadata)

    async def create_training_client_from_state_with_optimizer_async(
        self, path: str, base_model: str | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        return await self.create_training_client_from_state_with_optimizer(path, base_model, user_metadata)

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        return await self.create_sampling_client(model_path, base_model)
