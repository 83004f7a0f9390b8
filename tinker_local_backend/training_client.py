"""TrainingClient: one LoRA adapter being trained, with the SDK's method names.

Every call returns a future at once; the calls of one client run in order, so submit forward_backward and optim_step back to back
and wait for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args

import tinker
from tinker import types
from tinker.lib.public_interfaces.custom_loss import check_loss_inputs, run_loss_handle
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

from tinker_local_backend.engine.models import describe
from tinker_local_backend.engine.training.custom_loss import CustomLossFn
from tinker_local_backend.engine.training.datums import LossConfig, freeze_data
from tinker_local_backend.engine.training.trainer import Parts, in_one
from tinker_local_backend.errors import RequestError
from tinker_local_backend.futures import ClientFuture, EngineFuture, as_coroutine, awaited
from tinker_local_backend.hosted_only import refuse_arguments
from tinker_local_backend.sampling_client import SamplingClient, open_checkpoint
from tinker_local_backend.storage.encryption import Recipients
from tinker_local_backend.storage.paths import CheckpointKind, CheckpointPath, check_name, runs_folder
from tinker_local_backend.training_run import TrainingRun, load_checkpoint

T = TypeVar("T")

Pass = tuple[Sequence[tinker.Datum], str, LossConfig]
"""Data, the name of a loss, and its configuration."""


class EngineInfo(GetInfoResponse):
    """The SDK's response, with the engine's execution."""

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
        With `loss_fn_config["temperature"]`, logprobs are those of softmax(logits / temperature), as in sampling.
        """
        datums, config = freeze_data(data), copy(loss_fn_config)
        return self.pass_over(lambda: (datums, loss_fn, config), backward=True)

    def forward_backward_custom(
        self,
        data: list[tinker.Datum],
        loss_fn: CustomLossFn | tinker.LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> EngineFuture[tinker.ForwardBackwardOutput]:
        """Gradients of a custom loss: `loss_fn(data, logprobs)`, which returns (scalar tensor, metrics), or the handle of a
        per-datum loss (ServiceClient.create_custom_loss).

        It runs on the engine's thread and receives every loss_fn_inputs field of the data. Compute anything else that it needs
        from the engine, such as reference logprobs, before the call. It is called again after an out-of-memory error.
        """
        run, datums = self._run, freeze_data(data)
        if loss_type_input not in (None, "logprobs"):
            raise RequestError(f"loss_type_input={loss_type_input!r}: a custom loss always gets logprobs; leave it out")
        if isinstance(loss_fn, tinker.LossHandle):
            loss_fn = _loss_of_handle(loss_fn, datums, run.session.session_id)

        def custom() -> Parts[tinker.ForwardBackwardOutput]:
            with run.state.passing():
                return (yield from run.forward_backward_custom(datums, loss_fn))

        return self._train("forward_backward_custom", custom)

    def pass_over(
        self, read: Callable[[], Pass], backward: bool, tokens: int = 0
    ) -> EngineFuture[tinker.ForwardBackwardOutput]:
        """(not in the SDK) As forward_backward or forward, on about `tokens` tokens of data that `read` returns when the pass
        begins."""
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
        if optim_params is not None and adam_params is not None:
            raise RequestError("optim_params and adam_params are both given; adam_params is the older name: give one")
        params = optim_params if optim_params is not None else adam_params
        if not isinstance(params, tinker.AdamParams):
            raise RequestError(f"optim_step takes tinker.AdamParams, got {params!r}")
        return self._train("optim_step", lambda: in_one(lambda: self._run.optim_step(params)))

    def fail_step(self, why: str) -> EngineFuture[None]:
        """(not in the SDK) Make the next optim_step fail, as after a failed pass, because some of its data is missing."""

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
        """Save only the adapter, to sample from. `.path` is the tinker:// path."""
        path = self._path("sampler_weights", name)

        def save() -> SaveWeightsForSamplerResponse:
            self._run.save(path, ttl_seconds, overwrite, user_metadata)
            return SaveWeightsForSamplerResponse(path=str(path))

        return self._submit("save_weights_for_sampler", save)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: Sequence[str] | None = None
    ) -> EngineFuture[SaveWeightsExternalResponse]:
        """Save the adapter as PEFT files. RestClient.get_external_weights_urls(path) returns their URLs.

        With `age_encryption_recipients`, public keys of age or SSH, the files are encrypted to them and their names end in
        .age (package pyrage).
        """
        path = self._path("external_weights", name)
        recipients = None if age_encryption_recipients is None else Recipients(age_encryption_recipients)

        def save() -> SaveWeightsExternalResponse:
            self._run.save(path, ttl_seconds, recipients=recipients)
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
        kind: types.SamplingClientKind = "snapshot",
    ) -> ClientFuture[SamplingClient]:
        """A sampling client of the weights after all earlier calls. With a name, it is also saved to disk.

        `retry_config` is accepted for scripts that pass it and has no effect, because there is no network.
        `record_stability_info` is as in ServiceClient.create_sampling_client.

        kind="inflight" publishes the weights to all in-flight clients of this training client: running sequences continue with
        them, on their existing KV cache. Every sequence records the weights that sampled each token (`weight_versions_np`, 0
        for the first published ones). Tokens then depend on the time of publishing, so a seed does not reproduce them.
        """
        if kind not in get_args(types.SamplingClientKind):
            raise RequestError(f"kind={kind!r} is neither snapshot nor inflight")
        path = None if name is None else self._path("sampler_weights", name)

        def run() -> SamplingClient:
            if path is not None:
                self._run.save(path)
            weights = self._run.publish() if kind == "inflight" else self._run.snapshot()
            return SamplingClient(self._run.engine, self._owner, self._run.model, weights, record_stability_info)

        return ClientFuture(self._submit("snapshot", run), SamplingClient)

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

    def get_console_url(self) -> str:
        """The file:// URL of the run's report, or of its checkpoints if the program writes no report.

        The report's folder is `log_path` in the run's user_metadata, if the program has set it.
        """
        entry = self._run.entry
        log_path = entry.user_metadata.get("log_path")
        path = runs_folder(self._run.home) / entry.run_id if log_path is None else Path(log_path) / "report.html"
        return path.resolve().as_uri()

    def get_telemetry(self) -> None:
        """None: this engine sends no telemetry."""

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


def _loss_of_handle(handle: tinker.LossHandle, data: list[tinker.Datum], session_id: str) -> CustomLossFn:
    """The handle's loss, summed over the data. Raises RequestError for a handle of another session, or other inputs."""
    if handle.session_id != session_id:
        raise RequestError(
            f"the loss {handle.name!r} was made by another ServiceClient; call create_custom_loss on this client's"
        )
    try:
        check_loss_inputs(handle, data)
    except ValueError as error:
        raise RequestError(str(error)) from error
    return partial(run_loss_handle, handle)
