"""Bodies of the OpenAI-compatible routes. Unknown and unsupported fields are errors: ignoring them would change the samples."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.schemas import Count, Name, Seed, Stops, TokenList, entries


def _not_negative(ids: list[int]) -> list[int]:
    if ids and min(ids) < 0:
        raise ValueError("an id is negative")
    return ids


Text = Annotated[str, Field(max_length=10_000_000)]
TokenIds = Annotated[TokenList, AfterValidator(_not_negative)]
StopIds = Annotated[list[Count], Field(max_length=4096, fail_fast=True)]
Short = Annotated[str, Field(max_length=512)]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None, "none"),
    "reasoning_effort": (None,),
    "ignore_eos": (None, False),
    "skip_special_tokens": (None, True),
    "priority": (None, 0),
    "spaces_between_special_tokens": (None, True),
    "logits_processors": (None, []),
}
"""Unsupported field -> values that have no effect and are accepted."""

_WITHOUT_EFFECT = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "request_id",
    ]
)
"""Fields that do not change the samples."""

_RENAMED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Fields of vLLM before 0.12 -> those of `structured_outputs`."""

_OF_TEXT_OR_CACHES = frozenset({"skip_special_tokens", "routed_experts_prompt_start"})
"""Fields that do not change the token ids, only their text."""


class _Strict(BaseModel):
    """Drops fields without effect. Raises Refused (400), naming the field, for unsupported ones."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    without_effect: ClassVar[frozenset[str]] = _OF_TEXT_OR_CACHES

    @model_validator(mode="after")
    def _check(self) -> Self:
        extra = self.model_extra or {}
        for name in self.without_effect & extra.keys():
            del extra[name]
        for name, value in extra.items():
            if name in _RENAMED and value is not None:
                raise Refused(
                    400, f'{name} is an older name of vLLM\'s; send structured_outputs={{"{_RENAMED[name]}": ...}}'
                )
            if name not in _NEUTRAL:
                raise Refused(400, f"{name[:200]} is unknown here; leave it out")
            if value not in _NEUTRAL[name]:
                raise Refused(400, f"{name} is not supported here; leave it out")
        return self


class OpenAIBody(_Strict):
    without_effect = _WITHOUT_EFFECT

    model: Name
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: Name | Stops | None = None
    stop_token_ids: StopIds | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    cache_salt: Short | None = None
    """only requests with the same salt share cached prompts"""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: json, regex, choice, grammar or json_object"""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling_params(self, max_tokens: int | None, eos_token_ids: list[int]) -> dict[str, Any]:
        """Parameters for the engine. The model's end of turn always ends a sample, with other stops or without."""
        stops = [*self.stops, *(self.stop_token_ids or [])]
        return {
            "max_tokens": max_tokens,
            "seed": self.seed,
            "stop": [*eos_token_ids, *stops] if stops else None,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": self.top_k or -1,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "min_p": self.min_p or 0.0,
        }


class FunctionCall(BaseModel):
    name: Text
    arguments: Text = "{}"


class ToolCall(BaseModel):
    id: Short | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


class UnparsedCall(BaseModel):
    """As a reply has it."""

    raw_text: Text
    error: Text = ""


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=4096, fail_fast=True)] | None = None
    name: Short | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024, fail_fast=True)] | None = None
    tool_call_id: Short | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """vLLM's newer name"""
    unparsed_tool_calls: Annotated[list[UnparsedCall], Field(max_length=1024, fail_fast=True)] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: dict[str, Any]


class ChatBody(OpenAIBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Short | dict[str, Any] | None = None
    chat_template_kwargs: Annotated[dict[str, bool | Short], entries(64)] | None = None
    reasoning_effort: Short | None = None


class CompletionBody(OpenAIBody):
    prompt: (
        Text
        | Annotated[list[Text], Field(max_length=4096, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=4096, fail_fast=True)]
    )
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False


class GenerateParams(_Strict):
    """Those of vLLM's sampling parameters that the engine supports."""

    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Count | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    seed: Seed | None = None
    stop: Name | Stops | None = None
    stop_token_ids: StopIds | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    structured_outputs: dict[str, Any] | None = None


class GenerateBody(_Strict):
    model: Name | None = None
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: GenerateParams = GenerateParams()
    request_id: Short | None = None
    cache_salt: Short | None = None
    stream: Literal[False] = False
