"""The interface of an engine for the loops: the small part of the SDK's clients that both backends, and a fake,
implement.

Every method returns an awaitable immediately, so that forward_backward and optim_step can be submitted back to back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from tinker_cookbook.utils.lazy import tinker

if TYPE_CHECKING:
    from tinker.types import OptimStepResponse, SampleResponse, SaveWeightsForSamplerResponse, SaveWeightsResponse


CustomLossFn: TypeAlias = Callable[[list["tinker.Datum"], list[Any]], tuple[Any, dict[str, float]]]
"""(data, logprobs of each datum's targets as float32 tensors) -> (scalar tensor, metrics)"""


class SamplingClient(Protocol):
    """A frozen snapshot for sampling and logprobs."""

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[SampleResponse]: ...

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Awaitable[list[float | None]]: ...

    def get_tokenizer(self) -> Any: ...


class TrainingClient(Protocol):
    """A LoRA adapter in training. Calls run in order of submission."""

    def forward(
        self, data: list[tinker.Datum], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]: ...

    def forward_backward(
        self, data: list[tinker.Datum], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]: ...

    def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: CustomLossFn
    ) -> Awaitable[tinker.ForwardBackwardOutput]: ...

    def optim_step(self, optim_params: tinker.AdamParams) -> Awaitable[OptimStepResponse]: ...

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Awaitable[SaveWeightsResponse]: ...

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> Awaitable[SaveWeightsForSamplerResponse]: ...

    def save_weights_and_get_sampling_client(
        self, *, record_stability_info: bool = False, kind: Literal["snapshot", "inflight"] = "snapshot"
    ) -> Awaitable[SamplingClient]: ...

    def get_tokenizer(self) -> Any: ...


class RestClient(Protocol):
    """Looks up and deletes saved weights."""

    def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> Awaitable[None]: ...

    def get_training_run_by_tinker_path(self, tinker_path: str) -> Any: ...

    def get_training_run_by_tinker_path_async(self, tinker_path: str) -> Awaitable[tinker.types.TrainingRun]: ...


class ServiceClient(Protocol):
    """Makes the other clients."""

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        *,
        user_metadata: dict[str, str] | None = None,
    ) -> Awaitable[TrainingClient]: ...

    def create_training_client_from_state(
        self, path: str, *, user_metadata: dict[str, str] | None = None
    ) -> Awaitable[TrainingClient]: ...

    def create_training_client_from_state_with_optimizer(
        self, path: str, *, user_metadata: dict[str, str] | None = None
    ) -> Awaitable[TrainingClient]: ...

    def create_rest_client(self) -> RestClient: ...

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> Awaitable[SamplingClient]: ...
