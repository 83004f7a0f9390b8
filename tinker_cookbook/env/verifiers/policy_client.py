"""Answers the model calls of verifiers' rollouts with the policy, and records the sampled ids."""
# pyright: reportMissingImports=false

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import BaseClientConfig
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServer

from tinker_cookbook.env.verifiers.player import (
    UNUSED,
    Player,
    PromptTooLongError,
    Turn,
    check_sampling,
    read_call,
    text_of,
    tool_result,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ToolSpec

POLICY_ENDPOINT = "http://policy.invalid"
"""Placeholder for the policy where verifiers needs a model address; nothing connects to it."""


def policy_config() -> vf.TrainClientConfig:
    """The client config of a role that the policy plays."""
    return vf.TrainClientConfig(base_url=POLICY_ENDPOINT, api_key_var="POLICY_NEEDS_NO_KEY")


class PolicyClient(vf.Client):
    """Answers model calls with the player of their trace (`players`, by trace id)."""

    def __init__(self, players: Mapping[str, Player]):
        self._players = players

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        assert session_id is not None
        player = self._players[session_id]
        try:
            messages, tools = read_request(dialect, body, sampling)
            called = await player.call(messages, sampling.max_tokens, tools)
        except ConfigurationError as error:
            player.error = error
            raise
        except PromptTooLongError as error:
            raise vf.ProviderError(str(error), status_code=400) from error
        return _response(called, body["model"])


def _response(turn: Turn, model: str) -> vf.Response:
    prompt_ids, action, calls = turn.prompt.to_ints(), turn.action, turn.message.get("tool_calls", [])
    ended = "tool_calls" if calls else "stop"
    response = vf.Response(
        id=uuid.uuid4().hex,
        created=0,
        model=model,
        message=vf.AssistantMessage(
            content=text_of(turn.message["content"], "assistant"),
            tool_calls=[
                vf.ToolCall(id=str(call.id), name=call.function.name, arguments=call.function.arguments)
                for call in calls
            ]
            or None,
        ),
        finish_reason="length" if action.stop_reason == "length" else ended,
        usage=vf.Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(action.tokens)),
        tokens=vf.TurnTokens(
            prompt_ids=prompt_ids, completion_ids=list(action.tokens), completion_logprobs=list(action.logprobs)
        ),
    )
    response.raw = serialize_completion(response, model)
    return response


def read_request(
    dialect: Dialect, body: dict[str, Any], sampling: vf.SamplingConfig
) -> tuple[list[Message], list[ToolSpec]]:
    """Messages and tools of a chat request. Raises ConfigurationError for each field that the policy does not support."""
    if not isinstance(dialect, ChatDialect):
        raise ConfigurationError(
            f"{type(dialect).__name__}: the policy is asked by chat completions; use such a harness"
        )
    check_sampling({key: getattr(sampling, key, None) for key in UNUSED})
    if (choice := body.get("tool_choice")) not in (None, "auto"):
        raise ConfigurationError(f"tool_choice={choice!r}: a call cannot be forced; leave it out or say auto")
    request = dialect.parse_request(body)
    return [_message(message) for message in request.messages], [_spec(tool) for tool in request.tools or []]


def _message(given: vf.Message) -> Message:
    content = text_of(given.content, given.role)
    if given.role == "tool":
        return tool_result(content, given.tool_call_id, given.name)
    message: Message = {"role": given.role, "content": content}
    if given.role == "assistant" and given.tool_calls:
        message["tool_calls"] = [read_call(call.id, call.name, call.arguments) for call in given.tool_calls]
    return message


def _spec(tool: vf.Tool) -> ToolSpec:
    if tool.type != "function" or tool.namespace:
        raise ConfigurationError(
            f"tool {tool.name!r}: type={tool.type!r}, namespace={tool.namespace!r}; only plain functions can be called"
        )
    return ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters)


class PolicyServer(InterceptionServer):
    """The model server of a rollout's program: the policy, or the endpoint that a role names itself."""

    def __init__(self, players: Mapping[str, Player], state_service_secrets: tuple[str, ...]):
        super().__init__(state_service_secrets=state_service_secrets)
        self._policy = PolicyClient(players)

    def _client(self, config: BaseClientConfig) -> vf.Client:
        return self._policy if config.base_url == POLICY_ENDPOINT else super()._client(config)
