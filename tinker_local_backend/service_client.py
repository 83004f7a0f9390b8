"""ServiceClient: the entry point of the local engine, with the method names of the SDK's."""

from __future__ import annotations

import uuid
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import tinker
from tinker import types
from tinker.lib.public_interfaces.custom_loss import trace_loss

from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.loading import check_has_experts
from tinker_local_backend.engine.model.lora_spec import ExpertLayout, LoraSpec
from tinker_local_backend.engine.model.refusals import base_model_of, check_context, check_model_name
from tinker_local_backend.environment import check_environment
from tinker_local_backend.errors import EngineClosedError, RequestError
from tinker_local_backend.futures import ClientFuture, EngineFuture, as_coroutine, awaited, completed
from tinker_local_backend.hosted_only import log_without_effect, refuse_arguments
from tinker_local_backend.replicas.group import load_model, replicas
from tinker_local_backend.rest_client import RestClient, shipped_models, supported_model
from tinker_local_backend.samplers.choice import make_sampler
from tinker_local_backend.sampling_client import SamplingClient, open_checkpoint
from tinker_local_backend.storage.catalog import read_info
from tinker_local_backend.storage.info import check_user_metadata
from tinker_local_backend.storage.paths import CheckpointPath, check_writable, local_home, runs_folder
from tinker_local_backend.storage.registry import Registry, Run, Session
from tinker_local_backend.training_client import TrainingClient
from tinker_local_backend.training_run import TrainingRun, load_checkpoint


class ServiceClient:
    """One engine: its clients share base models, KV cache and the worker thread.

    Args:
        user_metadata: stored with the session, which is this client and its training runs (RestClient.get_session).
        project_id, base_url, api_key, default_headers_overrides: arguments of the SDK's client for the hosted service. They
            are accepted and logged, and have no effect.
        display_name: name of the session.
        deterministic: run in lockstep with the event loop that drives all requests, so that results are the same bit for bit
            in every run (engine/gate.py). Without it, tokens for a seed are the same up to rounding of the logits.
        home: where checkpoints live; None means TINKER_LOCAL_HOME, else the user's data folder.

    Raises:
        RequestError: an environment variable is unknown or invalid (see environment.py).

    Unknown arguments are ignored with a FutureWarning, as in the SDK.

    Close it (or use `with`) to free the models; it also closes when it is garbage-collected or the program ends.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        deterministic: bool = False,
        home: Path | str | None = None,
        **unknown: object,
    ):
        if unknown:
            names = ", ".join(sorted(unknown))
            warnings.warn(
                f"ServiceClient ignores unknown arguments: {names}; leave them out", FutureWarning, stacklevel=2
            )
        log_without_effect(
            project_id=project_id,
            base_url=base_url,
            api_key=api_key,
            default_headers_overrides=default_headers_overrides,
        )
        check_environment()
        self._home = Path(home) if home is not None else local_home()
        self._session = Session(user_metadata=check_user_metadata(user_metadata), display_name=display_name)
        self._registry = Registry(self._home)
        replicas()  # under torchrun: connects the processes, or refuses
        self._engine = Engine(deterministic, make_sampler, load_model)
        self._finalizer = weakref.finalize(self, self._engine.close)

    @property
    def session_id(self) -> str:
        return self._session.session_id

    def get_console_url(self) -> str:
        """The file:// URL of the folder with this home's runs."""
        return runs_folder(self._home).resolve().as_uri()

    def get_telemetry(self) -> None:
        """None: this engine sends no telemetry."""

    def create_custom_loss(
        self, fn: tinker.PerDatumLossFn, input_ranks: Mapping[str, types.CustomLossInputRank]
    ) -> EngineFuture[tinker.LossHandle]:
        """A loss for TrainingClient.forward_backward_custom, traced and checked by the SDK.

        Args:
            fn: called for each datum with the logprobs of its targets and the loss_fn_inputs that its parameters name; returns
                a scalar loss, and metrics named `custom/<name>:sum` or `:mean`. The losses of the data are summed.
            input_ranks: number of dimensions of each parameter's tensor: 0, 1 or 2.

        Raises:
            RequestError: torch.fx cannot trace the function, or it calls anything but torch and math.
        """
        try:
            handle = trace_loss(fn, input_ranks, self.session_id)
        except ValueError as error:
            raise RequestError(str(error)) from error
        return completed(lambda: handle)

    def create_rest_client(self) -> RestClient:
        """A client that lists and manages this home's runs and checkpoints. It still works after `close`."""
        self._registry.record_session(self._session)
        loaded = self._engine.context_lengths

        def supported_models() -> list[types.SupportedModel]:
            models = [supported_model(name, length) for name, length in dict(loaded).items()]
            return models + [model for model in shipped_models() if model.model_name not in loaded]

        return RestClient(self._home, session=self._session, supported_models=supported_models)

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The loaded base models and the shipped one. Any other that transformers can load is supported too."""
        return self.create_rest_client().get_server_capabilities().result()

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> EngineFuture[str]:
        """Copy a checkpoint's files into a new training run. The result is the copy's tinker:// path."""
        return self.create_rest_client().copy_weights(
            path, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: types.OptimizerConfig | None = None,
        expert_lora: ExpertLayout | None = None,
    ) -> ClientFuture[TrainingClient]:
        """A new adapter on a base model (a directory or a Hugging Face id), starting as the identity.

        A hosted name `<model>:peft:<tokens>` means that model, whose context must have at least that many tokens.

        `seed` makes the initial A matrices reproducible; None draws one (from TINKER_LOCAL_SEED if that is set).
        `user_metadata` is stored with the run and each of its checkpoints. The optimizer is AdamW. `expert_lora` (not in the
        SDK) is how the adapter covers routed experts (lora_spec.ExpertLayout); None means TINKER_LOCAL_EXPERT_LORA, or
        `shared_outer` if that is unset.
        """
        model_name = base_model_of(base_model)
        check_model_name(model_name)
        check_writable(self._home)
        refuse_arguments(optimizer=_other_than_adamw(optimizer))
        metadata = check_user_metadata(user_metadata)
        spec = LoraSpec.asked(rank, train_attn, train_mlp, train_unembed, expert_lora)

        def create() -> TrainingClient:
            if expert_lora in ("shared_outer", "per_expert"):
                check_has_experts(model_name)
            init_seed = self._engine.random_seed() if seed is None else seed
            run = self._new_run(model_name, spec, init_seed, metadata)
            check_context(base_model, run.model.context_length)
            run.record(has_saved=False)
            return TrainingClient(run, self)

        return self._engine.make_client(create, TrainingClient)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> ClientFuture[TrainingClient]:
        """A training client that starts from a saved adapter, with a fresh optimizer.

        `base_model`, when given, must be the checkpoint's. `user_metadata` is merged into the checkpoint's.
        """
        refuse_arguments(weights_access_token=weights_access_token, optimizer=_other_than_adamw(optimizer))
        return self._from_state(path, base_model, user_metadata, with_optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> ClientFuture[TrainingClient]:
        """A training client that continues a saved state as if it had never stopped."""
        refuse_arguments(weights_access_token=weights_access_token)
        return self._from_state(path, base_model, user_metadata, with_optimizer=True)

    def _from_state(
        self, path: str, base_model: str | None, user_metadata: Mapping[str, str] | None, with_optimizer: bool
    ) -> ClientFuture[TrainingClient]:
        check_writable(self._home)
        parsed = CheckpointPath.parse(path)
        info = read_info(self._home, parsed, base_model and base_model_of(base_model))
        metadata = {**info.user_metadata, **check_user_metadata(user_metadata)}

        def create() -> TrainingClient:
            run = self._new_run(info.base_model, info.spec, 0, metadata)
            load_checkpoint(run, parsed, with_optimizer)
            run.record(has_saved=False)
            return TrainingClient(run, self)

        return self._engine.make_client(create, TrainingClient)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: object = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[SamplingClient]:
        """Sample from saved weights (`model_path`, a tinker:// path) or from a base model.

        Args:
            base_model: with a `model_path`, must be the checkpoint's.
            retry_config: accepted for scripts that pass it; without effect, because there is no network.
            record_stability_info: the engine stores samples until they are trained on, to verify data whose provenance
                names them (loss_fn stable_reinforce).
        """
        engine = self._engine
        if model_path is not None:
            name = base_model and base_model_of(base_model)
            return open_checkpoint(engine, self, self._home, model_path, name, record_stability_info)
        if base_model is None:
            raise RequestError("give model_path (a tinker:// path) or base_model")
        model_name = base_model_of(base_model)
        check_model_name(model_name)

        def create() -> SamplingClient:
            model = engine.load(model_name)
            check_context(base_model, model.context_length)
            return SamplingClient(engine, self, model, None, record_stability_info)

        return engine.make_client(create, SamplingClient)

    def _new_run(self, base_model: str, spec: LoraSpec, seed: int, user_metadata: dict[str, str]) -> TrainingRun:
        entry = Run(uuid.uuid4().hex, self._session.session_id, base_model, spec, user_metadata)
        return TrainingRun.create(self._engine, self._registry, self._session, entry, seed)

    def close(
        self, status: Literal["success", "errored", "interrupted"] = "success", detail: str | None = None
    ) -> EngineFuture[None]:
        """Stop the engine and free the models before returning. Pending requests fail with EngineClosedError.

        `status` and `detail` are for the hosted service's console and have no effect.
        """
        self._finalizer()
        return completed(lambda: None)

    def __enter__(self) -> Self:
        if not self._finalizer.alive:
            raise EngineClosedError("this ServiceClient is closed; make another one")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Older names

    get_server_capabilities_async = as_coroutine(get_server_capabilities)
    create_lora_training_client_async = awaited(create_lora_training_client)
    create_training_client_from_state_async = awaited(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = awaited(create_training_client_from_state_with_optimizer)
    create_sampling_client_async = awaited(create_sampling_client)


def _other_than_adamw(optimizer: types.OptimizerConfig | None) -> types.OptimizerConfig | None:
    return None if optimizer is None or optimizer.type == "adamw" else optimizer
