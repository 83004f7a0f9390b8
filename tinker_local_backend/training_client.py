"""TrainingClient: one LoRA adapter being trained, with the SDK's method names.

Every call returns a future at once; the calls of one client run in order, so submit forward_backward and optim_step back to back
and wait for both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import tinker
from tinker.types import (
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinker.types.get_info_response import ModelData
from transformers import PreTrainedTokenizerBase

from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.models import describe
from tinker_local_backend.engine.training import trainer
from tinker_local_backend.engine.training.custom_loss import CustomLossFn, forward_backward_custom, two_passes
from tinker_local_backend.engine.training.datums import LossConfig, check_datum, freeze_data, loss_function
from tinker_local_backend.engine.training.optimizer import AdamW
from tinker_local_backend.engine.training.provenance import check_provenance
from tinker_local_backend.engine.training.trainer import Parts, in_one
from tinker_local_backend.errors import CheckpointError, RequestError
from tinker_local_backend.futures import ClientFuture, EngineFuture, as_coroutine, awaited
from tinker_local_backend.hosted_only import refuse_arguments
from tinker_local_backend.replicas.group import replicas
from tinker_local_backend.replicas.training import ReplicatedRun
from tinker_local_backend.sampling_client import SamplingClient, open_checkpoint
from tinker_local_backend.storage import checkpoints
from tinker_local_backend.storage.catalog import read_info
from tinker_local_backend.storage.info import check_user_metadata
from tinker_local_backend.storage.paths import CheckpointKind, CheckpointPath, check_name
from tinker_local_backend.storage.registry import Registry, Run, Session

T = TypeVar("T")

Pass = tuple[Sequence[tinker.Datum], str, LossConfig]
"""Data, the name of a loss, and its configuration."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """What a training client trains: the engine, the home, and the adapter's state, which only the worker touches."""

    engine: Engine
    registry: Registry
    session: Session
    entry: Run
    """the run as it was created; its metadata is stored with every checkpoint"""
    model: BaseModel
    state: trainer.TrainState
    replicated: ReplicatedRun | None = None
    """the run on all processes of torchrun"""
    tenant: str = ""
    """its owner, if several share the engine"""
    in_gradients: set[str] = field(default_factory=set)
    """sequence_ids of the samples that were trained on since the last optimizer step"""

    @classmethod
    def create(
        cls,
        engine: Engine,
        registry: Registry,
        session: Session,
        entry: Run,
        seed: int,
        tenant: str = "",
    ) -> TrainingRun:
        """Make a run with a new adapter, on the worker. `seed` draws the initial A matrices."""
        model = engine.load(entry.base_model)
        group = replicas()
        if group is None:
            state, replicated = trainer.TrainState.new(model.new_adapter(entry.spec, seed)), None
        else:
            replicated = group.make(ReplicatedRun, model, entry.spec, seed)
            state = replicated.state
        return cls(engine, registry, session, entry, model, state, replicated, tenant)

    def forward_backward(
        self, data: Sequence[tinker.Datum], loss_fn: str, config: LossConfig, backward: bool
    ) -> Parts[tinker.ForwardBackwardOutput]:
        """As trainer.forward_backward, on all processes."""
        self._check_provenance(data, loss_fn, config, backward)
        if self.replicated is None:
            return trainer.forward_backward(self.model, self.state, data, loss_fn, config, backward)
        return self.replicated.forward_backward(data, loss_fn, config, backward)

    def forward_backward_custom(
        self, data: Sequence[tinker.Datum], loss_fn: CustomLossFn
    ) -> Parts[tinker.ForwardBackwardOutput]:
        if self.replicated is None:
            return forward_backward_custom(self.model, self.state, data, loss_fn)
        return two_passes(data, loss_fn, self.forward_backward)

    def _check_provenance(
        self, data: Sequence[tinker.Datum], loss_name: str, loss_config: LossConfig, backward: bool
    ) -> None:
        """If the loss needs provenance, raise RequestError for a datum that differs from the sample that it names."""
        loss, config, _ = loss_function(loss_name, loss_config)
        if not loss.needs_provenance:
            return
        _warn_unpublished_formula(self.entry.run_id, loss_name)
        known_only = bool(config["verify_provenance"])
        for i, datum in enumerate(data):
            example = check_datum(datum, i, loss_name, loss, self.model)
            names = check_provenance(datum, example, self.engine.samples, known_only, f"data[{i}]")
            if backward:
                self.in_gradients.update(names)

    def optim_step(self, params: tinker.AdamParams) -> OptimStepResponse:
        """As trainer.optim_step, on all processes. Drops the stored samples that were trained on."""
        replicated = self.replicated
        response = trainer.optim_step(self.state, params) if replicated is None else replicated.optim_step(params)
        self.engine.samples.remove(self.in_gradients)
        self.in_gradients.clear()
        return response

    def snapshot(self) -> Adapter:
        """A frozen copy of the adapter, to sample from."""
        if self.replicated is None:
            return self.state.adapter.snapshot(self.model.dtype)
        return self.replicated.snapshot()

    @property
    def home(self) -> Path:
        return self.registry.home

    def record(self, has_saved: bool) -> None:
        """Record in the registry that the run exists, or that it has saved something."""
        now = replace(self.entry, last_request_time=time.time(), has_saved=has_saved)
        self.registry.record_run(now, self.session)

    def save(
        self,
        path: CheckpointPath,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write a checkpoint, on the worker. `weights` also hold the optimizer's state and pending gradients."""
        optimizer = self.state.optimizer if path.kind == "weights" else None
        metadata = {**self.entry.user_metadata, **check_user_metadata(user_metadata)}
        # After a failed pass the sum is incomplete: no step may use it.
        pending = self.state.gradients if optimizer is not None and self.state.failure is None else None
        adapter = self.state.adapter
        checkpoints.save(
            self.home, path, self.model.name, adapter, optimizer, ttl_seconds, overwrite, metadata, pending
        )
        self.record(has_saved=True)


@cache
def _warn_unpublished_formula(run_id: str, loss_name: str) -> None:
    """Warn once per run."""
    logger.warning(
        "%s: this is the local engine's own loss of that name; the hosted service's formula is not published", loss_name
    )


class EngineInfo(GetInfoResponse):
    """The SDK's answer, with the engine's execution."""

    execution: dict[str, str]
    """device and implementations, see engine.models.describe"""


class TrainingClient:
    """Made by ServiceClient.create_lora_training_client and create_training_client_from_state."""

    def __init__(self, run: TrainingRun, owner: object):
        self._run = run
        self._owner = owner  # keeps the service client, and with it the engine, alive

    @property
    def model_id(self) -> str:
        return self._run.entry.run_id

    def _train(self, kind: str, operation: Callable[[], Parts[T]], tokens: int = 0) -> EngineFuture[T]:
        """Submit an operation that first frees the memory of the samplers' prefix caches."""

        def run() -> Parts[T]:
            self._run.engine.evict_prefixes(self._run.tenant)
            return (yield from operation())

        return self._run.engine.submit_parts(self._run.entry.run_id, run, kind, self._run.tenant, tokens)

    def _submit(self, kind: str, operation: Callable[[], T]) -> EngineFuture[T]:
        return self._run.engine.submit(self._run.entry.run_id, operation, kind, self._run.tenant)

    def forward(
        self, data: list[tinker.Datum], loss_fn: str, loss_fn_config: LossConfig = None
    ) -> EngineFuture[tinker.ForwardBackwardOutput]:
        """Loss and logprobs without gradients."""
        datums, config = freeze_data(data), copy(loss_fn_config)
        return self.pass_over(lambda: (datums, loss_fn, config), backward=False)

    def forward_backward(
        self, data: list[tinker.Datum], loss_fn: str, loss_fn_config: LossConfig = None
    ) -> EngineFuture[tinker.ForwardBackwardOutput]:
        """Loss, logprobs, and gradients that accumulate until optim_step.

        Losses are sums over tokens and datums: cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce
        (engine/training/losses.py; the last needs provenance, engine/training/provenance.py).
        `loss_fn_config["temperature"]` scores on the tempered distribution that was sampled.
        """
        datums, config = freeze_data(data), copy(loss_fn_config)
        return self.pass_over(lambda: (datums, loss_fn, config), backward=True)

    def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: CustomLossFn, *, loss_type_input: Literal["logprobs"] | None = None
    ) -> EngineFuture[tinker.ForwardBackwardOutput]:
        """Gradients of a custom loss: `loss_fn(data, logprobs)` returns (scalar tensor, metrics).

        It runs on the engine's thread and receives every loss_fn_inputs field of the data. Compute anything else that it needs
        from the engine, such as reference logprobs, before the call. It is called again if memory runs out.
        """
        run, datums = self._run, freeze_data(data)
        if loss_type_input not in (None, "logprobs"):
            raise RequestError(f"loss_type_input={loss_type_input!r}: a custom loss always gets logprobs; leave it out")

        def custom() -> Parts[tinker.ForwardBackwardOutput]:
            with run.state.passing():
                return (yield from run.forward_backward_custom(datums, loss_fn))

        return self._train("forward_backward_custom", custom)

    def pass_over(
        self, read: Callable[[], Pass], backward: bool, tokens: int = 0
    ) -> EngineFuture[tinker.ForwardBackwardOutput]:
        """(not in the SDK) As forward_backward, or forward, on data of about `tokens` tokens, read when the pass begins."""
        run = self._run

        def one_pass() -> Parts[tinker.ForwardBackwardOutput]:
            with run.state.passing() if backward else nullcontext():
                data, loss_fn, config = read()
                return (yield from run.forward_backward(data, loss_fn, config, backward))

        return self._train("forward_backward" if backward else "forward", one_pass, tokens)

    def optim_step(
        self, optim_params: tinker.AdamParams | None = None, *, adam_params: tinker.AdamParams | None = None
    ) -> EngineFuture[OptimStepResponse]:
        """Take an AdamW step with the accumulated gradient sum, and clear it. Metrics: grad_norm (before clipping)."""
        params = optim_params if optim_params is not None else adam_params
        if not isinstance(params, tinker.AdamParams):
            raise RequestError(f"optim_step takes tinker.AdamParams, got {params!r}")
        return self._train("optim_step", lambda: in_one(lambda: self._run.optim_step(params)))

    def fail_step(self, why: str) -> EngineFuture[None]:
        """(not in the SDK) Make the next optim_step fail, as after a failed pass: some of its data is missing."""

        def fail() -> None:
            self._run.state.failure = why

        return self._submit("other", fail)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> EngineFuture[SaveWeightsResponse]:
        """Save adapter, optimizer state and pending gradients. `.path` is the tinker:// path to resume from."""
        path = self._path("weights", name)

        def save() -> SaveWeightsResponse:
            # A run that resumes from here has new samplers, with empty prefix caches.
            self._run.engine.evict_prefixes(self._run.tenant)
            self._run.save(path, ttl_seconds, overwrite, user_metadata)
            return SaveWeightsResponse(path=str(path))

        return self._submit("save_state", save)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> EngineFuture[SaveWeightsForSamplerResponse]:
        """Save the adapter alone, to sample from. `.path` is the tinker:// path."""
        path = self._path("sampler_weights", name)

        def save() -> SaveWeightsForSamplerResponse:
            self._run.save(path, ttl_seconds, overwrite, user_metadata)
            return SaveWeightsForSamplerResponse(path=str(path))

        return self._submit("save_weights_for_sampler", save)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: Sequence[str] | None = None
    ) -> EngineFuture[SaveWeightsExternalResponse]:
        """Save the adapter as PEFT files. RestClient.get_external_weights_urls(path) returns their addresses.

        Raises RequestError for `age_encryption_recipients`: local files are not encrypted.
        """
        refuse_arguments(age_encryption_recipients=age_encryption_recipients)
        path = self._path("external_weights", name)

        def save() -> SaveWeightsExternalResponse:
            self._run.save(path, ttl_seconds)
            return SaveWeightsExternalResponse(path=str(path), type="save_weights_external")

        return self._submit("save_weights_external", save)

    def create_sampling_client(
        self, model_path: str, retry_config: object = None, record_stability_info: bool = False
    ) -> ClientFuture[SamplingClient]:
        """Sample from saved weights, of this run or another, as ServiceClient.create_sampling_client(model_path)."""
        run = self._run
        return open_checkpoint(
            run.engine, self._owner, run.home, model_path, record_stability_info=record_stability_info
        )

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: object = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot"] = "snapshot",
    ) -> ClientFuture[SamplingClient]:
        """A sampling client of the weights after all earlier calls. With a name, it is also saved to disk.

        `retry_config` is accepted for scripts that pass it and has no effect: no network can fail.
        `record_stability_info` is as in ServiceClient.create_sampling_client.
        """
        refuse_arguments(kind=None if kind == "snapshot" else kind)
        path = None if name is None else self._path("sampler_weights", name)

        def run() -> SamplingClient:
            if path is not None:
                self._run.save(path)
            engine, snapshot = self._run.engine, self._run.snapshot()
            return SamplingClient(engine, self._owner, self._run.model, snapshot, record_stability_info)

        return ClientFuture(self._submit("snapshot", run))

    def load_state(self, path: str, weights_access_token: str | None = None) -> EngineFuture[LoadWeightsResponse]:
        """Replace the adapter by a checkpoint's, reset the optimizer, and drop accumulated gradients."""
        refuse_arguments(weights_access_token=weights_access_token)
        return self._load(path, with_optimizer=False)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> EngineFuture[LoadWeightsResponse]:
        """Replace adapter and optimizer state by a checkpoint's. Training continues as if it had never stopped."""
        refuse_arguments(weights_access_token=weights_access_token)
        return self._load(path, with_optimizer=True)

    def _load(self, path: str, with_optimizer: bool) -> EngineFuture[LoadWeightsResponse]:
        parsed = CheckpointPath.parse(path)

        def run() -> LoadWeightsResponse:
            load_checkpoint(self._run, parsed, with_optimizer)
            return LoadWeightsResponse(path=path)

        return self._submit("load_state", run)

    def _path(self, kind: CheckpointKind, name: str) -> CheckpointPath:
        return CheckpointPath(self._run.entry.run_id, kind, check_name(name, "checkpoint name"))

    def get_info(self) -> EngineInfo:
        """Base model, LoRA rank and tokenizer of this run, and the implementations that replace plain torch."""
        model = self._run.model
        return EngineInfo(
            type="get_info",
            model_id=self._run.entry.run_id,
            model_data=ModelData(arch=model.config.model_type, model_name=model.name, tokenizer_id=model.name),
            is_lora=True,
            lora_rank=self._run.state.adapter.spec.rank,
            model_name=model.name,
            execution=describe(model),
        )

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._run.model.tokenizer

    # Older names

    forward_async = as_coroutine(forward)
    forward_backward_async = as_coroutine(forward_backward)
    forward_backward_custom_async = as_coroutine(forward_backward_custom)
    optim_step_async = as_coroutine(optim_step)
    save_state_async = as_coroutine(save_state)
    save_weights_for_sampler_async = as_coroutine(save_weights_for_sampler)
    save_weights_external_async = as_coroutine(save_weights_external)
    create_sampling_client_async = awaited(create_sampling_client)
    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client)
    load_state_async = as_coroutine(load_state)
    load_state_with_optimizer_async = as_coroutine(load_state_with_optimizer)
    get_info_async = as_coroutine(get_info)


def load_checkpoint(run: TrainingRun, path: CheckpointPath, with_optimizer: bool) -> None:
    """Load a checkpoint into `run`, on the worker. Everything is read and checked before the first matrix changes."""
    info = read_info(run.home, path)
    for what, saved, present in (
        ("base_model", info.base_model, run.model.name),
        ("LoRA", info.spec, run.state.adapter.spec),
    ):
        if saved != present:
            raise CheckpointError(
                f"checkpoint {path} has {what} {saved}, this client has {present}; use create_training_client_from_state"
            )
    fresh, pending = AdamW(run.state.adapter.parameters()), None
    if with_optimizer:
        checkpoints.load_optimizer(run.home, path, run.state.adapter, fresh)
        pending = checkpoints.load_gradients(run.home, path, run.state.adapter)
    checkpoints.load_adapter(run.home, path, run.state.adapter)
    run.state.optimizer = fresh
    run.state.clear()
    run.state.gradients = pending
    if run.replicated is not None:
        run.replicated.publish()
