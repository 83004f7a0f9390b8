"""In-memory clients for tests of the loops: no model, every call noted in order, replies from a function.

`FakeServiceClient` makes the other two and keeps what they save. Weights are a number, the count of optimizer steps, so a
snapshot shows when it was taken. `calls` holds `submit X` when a method is called and `await X` when its result is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import tinker
from tinker.types import (
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs

from tinker_cookbook.clients import CustomLossFn, SamplingClient, ServiceClient, TrainingClient
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.renderers.datum_text import to_ints
from tinker_cookbook.utils.seeds import derive_seed
from tinker_local_backend import CheckpointError

T = TypeVar("T")

FAKE_VOCABULARY = 8


@dataclass(frozen=True)
class SampleCall:
    """What a reply may depend on: the prompt, the parameters, and how many steps the weights have seen."""

    prompt: list[int]
    params: tinker.SamplingParams
    weights: int


Reply = Callable[[SampleCall], list[int]]


def seeded_reply(call: SampleCall) -> list[int]:
    """One token that depends on the seed, the prompt and the weights alone."""
    return [derive_seed(call.params.seed or 0, str(call.prompt), call.weights) % FAKE_VOCABULARY]


def fake_logprob(token: int) -> float:
    """A logprob that tells the token."""
    return -0.125 * (token % 64 + 1)


def fake_prompt_logprobs(prompt: Sequence[int]) -> np.ndarray:
    """float32 (N,): NaN, then what each token's `fake_logprob` is."""
    return np.array([np.nan, *(fake_logprob(token) for token in prompt[1:])], dtype=np.float32)


def fake_topk(prompt: Sequence[int], k: int) -> TopkLogprobs:
    """The likeliest tokens at position i are prompt[i], prompt[i] + 1, ...; each half as likely as the one before."""
    tokens = np.array(prompt)[:, None] + np.arange(k)
    logprobs = np.tile(-np.log(2.0) * (np.arange(k) + 1), (len(prompt), 1))
    tokens[0], logprobs[0] = 0, MASK_LOGPROB
    return TopkLogprobs(tokens.astype(np.int32), logprobs.astype(np.float32))


class Pending(Generic[T]):
    """An awaitable that notes when it is awaited, and takes a turn of the event loop to answer."""

    def __init__(self, name: str, value: T, calls: list[str]):
        self._name, self._value, self._calls = name, value, calls
        calls.append(f"submit {name}")

    def __await__(self) -> Generator[Any, None, T]:
        self._calls.append(f"await {self._name}")
        yield from asyncio.sleep(0).__await__()
        return self._value


class FakeTokenizer:
    """Decodes printable ASCII as characters, and any other id as <id>."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __len__(self) -> int:
        return 128

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.decode([token]) for token in ids]

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text if ord(character) < 127]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(token) if 32 <= token < 127 else f"<{token}>" for token in token_ids)


@dataclass
class FakeSamplingClient:
    weights: int
    reply: Reply
    calls: list[str]
    sampled: list[SampleCall]

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[SampleResponse]:
        call = SampleCall(to_ints(prompt), sampling_params, self.weights)
        self.sampled.append(call)
        replies = [self.reply(call) for _ in range(num_samples)]
        sequences = [
            SampledSequence(
                stop_reason="stop",
                sequence_id=str(i),
                tokens_np=np.array(tokens, dtype=np.int32),
                logprobs_np=np.array([fake_logprob(token) for token in tokens], dtype=np.float32),
            )
            for i, tokens in enumerate(replies)
        ]
        response = SampleResponse(
            sequences=sequences,
            prompt_logprobs_np=fake_prompt_logprobs(call.prompt) if include_prompt_logprobs else None,
            topk_prompt_logprobs_np=fake_topk(call.prompt, topk_prompt_logprobs) if topk_prompt_logprobs else None,
        )
        return Pending("sample", response, self.calls)

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Awaitable[list[float | None]]:
        logprobs: list[float | None] = [None, *(fake_logprob(token) for token in to_ints(prompt)[1:])]
        return Pending("compute_logprobs", logprobs, self.calls)

    def get_tokenizer(self) -> Any:
        return FakeTokenizer()


@dataclass(frozen=True)
class Pass:
    """One forward_backward as it arrived."""

    data: list[tinker.Datum]
    loss_fn: str
    config: dict[str, float | str] | None


@dataclass
class FakeTrainingClient:
    service: FakeServiceClient
    name: str
    weights: int = 0
    passes: list[Pass] = field(default_factory=list)
    adam: list[tinker.AdamParams] = field(default_factory=list)

    def forward(
        self, data: list[tinker.Datum], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        return Pending("forward", self._output(data), self.service.calls)

    def forward_backward(
        self, data: list[tinker.Datum], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        self.passes.append(Pass(list(data), loss_fn, None if loss_fn_config is None else dict(loss_fn_config)))
        return Pending("forward_backward", self._output(data), self.service.calls)

    def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: CustomLossFn
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        self.passes.append(Pass(list(data), "custom", None))
        output = self._output(data)
        logprobs = [outputs["logprobs"].to_torch().clone().requires_grad_() for outputs in output.loss_fn_outputs]
        loss, metrics = loss_fn(data, logprobs)
        loss.backward()
        output.metrics.update({**metrics, "loss:sum": float(loss.detach())})
        return Pending("forward_backward_custom", output, self.service.calls)

    def _output(self, data: list[tinker.Datum]) -> tinker.ForwardBackwardOutput:
        outputs = []
        for datum in data:
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
            logprobs = np.array([fake_logprob(int(token)) for token in targets.flat], dtype=np.float32)
            logprobs = logprobs.reshape(targets.shape)  # (N,), or (N, K) for cross_entropy
            outputs.append({"logprobs": tinker.TensorData.from_numpy(logprobs)})
        metrics = {"loss:sum": float(len(data)), "ratio:mean": 1.0}
        return tinker.ForwardBackwardOutput(loss_fn_output_type="logprobs", loss_fn_outputs=outputs, metrics=metrics)

    def optim_step(self, optim_params: tinker.AdamParams) -> Awaitable[OptimStepResponse]:
        self.adam.append(optim_params)
        self.weights += 1
        return Pending("optim_step", OptimStepResponse(metrics={"grad_norm": 1.0}), self.service.calls)

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Awaitable[SaveWeightsResponse]:
        path = self._save("weights", name, ttl_seconds)
        return Pending("save_state", SaveWeightsResponse(path=path), self.service.calls)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> Awaitable[SaveWeightsForSamplerResponse]:
        path = self._save("sampler_weights", name, ttl_seconds)
        response = SaveWeightsForSamplerResponse(path=path)
        return Pending("save_weights_for_sampler", response, self.service.calls)

    def _save(self, kind: str, name: str, ttl_seconds: int | None) -> str:
        path = f"tinker://{self.name}/{kind}/{name}"
        assert path not in self.service.saved, f"{path} is saved twice"
        self.service.saved[path] = self.weights
        self.service.ttl[path] = ttl_seconds
        return path

    def save_weights_and_get_sampling_client(
        self, *, record_stability_info: bool = False, kind: Literal["snapshot", "inflight"] = "snapshot"
    ) -> Awaitable[FakeSamplingClient]:
        self.service.recorded.append(record_stability_info)
        self.service.kinds.append(kind)
        client = self.service.new_sampler(self.weights)
        return Pending("snapshot", client, self.service.calls)

    def get_tokenizer(self) -> Any:
        return FakeTokenizer()


@dataclass(frozen=True)
class FakeRestClient:
    service: FakeServiceClient

    def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> Awaitable[None]:
        del self.service.saved[tinker_path]
        return Pending("delete", None, self.service.calls)

    def get_training_run_by_tinker_path_async(self, tinker_path: str) -> Awaitable[tinker.types.TrainingRun]:
        return Pending("get_training_run", self._training_run(), self.service.calls)

    def get_training_run_by_tinker_path(self, tinker_path: str) -> Any:
        return SimpleNamespace(result=self._training_run)

    def _training_run(self) -> Any:
        return SimpleNamespace(base_model=self.service.base_model, user_metadata=None)


@dataclass
class FakeServiceClient:
    reply: Reply = seeded_reply
    base_model: str = str(EXAMPLE_DATA / "tiny_chat")
    """of all that is saved"""
    calls: list[str] = field(default_factory=list)
    sampled: list[SampleCall] = field(default_factory=list)
    trainers: list[FakeTrainingClient] = field(default_factory=list)
    recorded: list[bool] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """of the samplers that were asked for"""
    """of each snapshot, whether its samples are to be recorded"""
    saved: dict[str, int] = field(default_factory=dict)
    ttl: dict[str, int | None] = field(default_factory=dict)
    created: list[tuple[Any, ...]] = field(default_factory=list)
    user_metadata: list[dict[str, str] | None] = field(default_factory=list)
    """of each training client"""

    def new_sampler(self, weights: int) -> FakeSamplingClient:
        return FakeSamplingClient(weights, self.reply, self.calls, self.sampled)

    def _new_trainer(self, weights: int, *how: Any) -> Awaitable[FakeTrainingClient]:
        trainer = FakeTrainingClient(self, f"run{len(self.trainers)}", weights)
        self.trainers.append(trainer)
        self.created.append(how)
        return Pending("create", trainer, self.calls)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        *,
        user_metadata: dict[str, str] | None = None,
    ) -> Awaitable[FakeTrainingClient]:
        how = () if train_mlp else ("without mlp",)
        self.user_metadata.append(user_metadata)
        return self._new_trainer(0, "lora", base_model, rank, seed, *how)

    def create_training_client_from_state(
        self, path: str, *, user_metadata: dict[str, str] | None = None
    ) -> Awaitable[FakeTrainingClient]:
        self.user_metadata.append(user_metadata)
        return self._new_trainer(self.saved[path], "state", path)

    def create_training_client_from_state_with_optimizer(
        self, path: str, *, user_metadata: dict[str, str] | None = None
    ) -> Awaitable[FakeTrainingClient]:
        if path not in self.saved:
            raise CheckpointError(f"{path} does not exist")
        self.user_metadata.append(user_metadata)
        return self._new_trainer(self.saved[path], "state with optimizer", path)

    def create_rest_client(self) -> FakeRestClient:
        return FakeRestClient(self)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> Awaitable[FakeSamplingClient]:
        weights = self.saved[model_path] if model_path is not None else 0
        return Pending("create", self.new_sampler(weights), self.calls)


def satisfies_protocols(service: FakeServiceClient, trainer: FakeTrainingClient) -> Sequence[object]:
    """For the type checker: the fakes are what the loops ask for."""
    checked_service: ServiceClient = service
    checked_trainer: TrainingClient = trainer
    checked_sampler: SamplingClient = service.new_sampler(0)
    return checked_service, checked_trainer, checked_sampler


class ScriptedCompleter(TokenCompleter):
    """Says `turns[key]` in order, where `key` is that of the last fork (a member's index); notes prompts and stops."""

    def __init__(self, turns: Mapping[int, Sequence[TokensWithLogprobs]], key: int = 0):
        self._turns, self._key, self._next = turns, key, 0
        self.heard: dict[int, list[list[int]]] = {}

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.heard.setdefault(self._key, []).append(to_ints(model_input))
        await asyncio.sleep(0)
        turn = self._turns[self._key][self._next]
        self._next += 1
        return turn

    def fork(self, *key: int | str) -> ScriptedCompleter:
        number = key[-1]
        forked = ScriptedCompleter(self._turns, number if isinstance(number, int) else 0)
        forked.heard = self.heard
        return forked


def said(tokens: Sequence[int], stop_reason: tinker.StopReason = "stop") -> TokensWithLogprobs:
    """A completion with its fake logprobs."""
    return TokensWithLogprobs(list(tokens), [fake_logprob(token) for token in tokens], stop_reason)
