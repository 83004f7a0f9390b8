"""The policy behind the model calls of verifiers' rollouts. The ids that were sampled are kept as they were."""
# pyright: reportMissingImports=false

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import BaseClientConfig
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServer

from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.message_env import continue_prompt
from tinker_cookbook.rl.rollout_runner import call_policy
from tinker_cookbook.rl.types import Transition
from tinker_cookbook.utils.lazy import tinker

POLICY_ENDPOINT = "http://policy.invalid"
"""Names the policy where verifiers wants the address of a model; nothing ever connects to it."""
UNUSED = ("temperature", "top_p", "top_k", "min_p", "reasoning_effort")
"""Settings of sampling that are the run's alone."""


def policy_config() -> vf.TrainClientConfig:
    """What a role's client is that the policy plays."""
    return vf.TrainClientConfig(base_url=POLICY_ENDPOINT, api_key_var="POLICY_NEEDS_NO_KEY")


@dataclass
class Turn:
    """One model call: what it was asked, and what the policy sampled."""

    prompt: tinker.ModelInput
    action: TokensWithLogprobs
    reply: Message
    conversation: list[Message]
    """up to and including the reply, as a program sees it"""
    parent: Turn | None
    """the call whose tokens this one's prompt begins with"""


@dataclass
class Player:
    """The model calls of one trace, in order.

    Attributes:
        policy: plays it, with a seed of its own.
        max_prompt_tokens: longest prompt; None: no limit.
        error: a setting that cannot be honoured; verifiers would only write it into the trace.
    """

    policy: TokenCompleter
    renderer: Renderer
    max_prompt_tokens: int | None = None
    turns: list[Turn] = field(default_factory=list)
    error: ConfigurationError | None = None

    async def call(self, messages: list[Message], max_tokens: int | None) -> Turn:
        """Sample the reply to a conversation. Raises ProviderError (status 400) for a prompt that is too long."""
        prompt, parent = self._prompt(messages)
        if self.max_prompt_tokens is not None and prompt.length > self.max_prompt_tokens:
            raise vf.ProviderError(
                f"a prompt of {prompt.length} tokens is longer than max_prompt_tokens={self.max_prompt_tokens}",
                status_code=400,
            )
        action = await call_policy(self.policy, prompt, self.renderer.get_stop_sequences(), max_tokens)
        reply, _ = self.renderer.parse_response(action.tokens)
        said: Message = {"role": "assistant", "content": get_text_content(reply)}
        turn = Turn(prompt, action, reply, [*messages, said], parent)
        self.turns.append(turn)
        return turn

    def _prompt(self, messages: list[Message]) -> tuple[tinker.ModelInput, Turn | None]:
        """That of the longest earlier conversation that goes on here, continued; else rendered anew, which begins a branch."""
        known = [turn for turn in self.turns if messages[: len(turn.conversation)] == turn.conversation]
        if known:
            last = max(known, key=lambda turn: len(turn.conversation))
            following = messages[len(last.conversation) :]
            prompt = continue_prompt(self.renderer, last.prompt, list(last.action.tokens), last.reply, following)
            if prompt is not None:
                return prompt, last
        return self.renderer.build_generation_prompt(messages), None

    def transitions(self) -> list[Transition]:
        """The calls as transitions, branch after branch, so that each branch becomes one datum.

        Where a call is continued by several, its tokens belong to the first branch, and are context in the others: every
        sampled token is trained once.
        """
        ordered: list[Turn] = []

        def add(turn: Turn) -> None:
            branch: Turn | None = turn
            forks: list[list[Turn]] = []
            while branch is not None:
                ordered.append(branch)
                here = branch
                after = [other for other in self.turns if other.parent is here]
                forks.append(after[1:])
                branch = after[0] if after else None
            for turns in forks:
                for other in turns:
                    add(other)

        for turn in self.turns:
            if turn.parent is None:
                add(turn)
        return [
            Transition(turn.prompt, turn.action, 0.0, episode_done=i == len(ordered) - 1)
            for i, turn in enumerate(ordered)
        ]


class PolicyClient(vf.Client):
    """Answers model calls by the player of their trace (`players`, by trace id)."""

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
            messages = read_request(dialect, body, sampling)
        except ConfigurationError as error:
            player.error = error
            raise
        called = await player.call(messages, sampling.max_tokens)
        prompt_ids, action = called.prompt.to_ints(), called.action
        response = vf.Response(
            id=uuid.uuid4().hex,
            created=0,
            model=body["model"],
            message=vf.AssistantMessage(content=called.conversation[-1]["content"]),
            finish_reason="length" if action.stop_reason == "length" else "stop",
            usage=vf.Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(action.tokens)),
            tokens=vf.TurnTokens(
                prompt_ids=prompt_ids, completion_ids=list(action.tokens), completion_logprobs=list(action.logprobs)
            ),
        )
        response.raw = serialize_completion(response, body["model"])
        return response


def read_request(dialect: Dialect, body: dict[str, Any], sampling: vf.SamplingConfig) -> list[Message]:
    """The messages of a chat request. Raises ConfigurationError for what the policy cannot be asked, by name."""
    if not isinstance(dialect, ChatDialect):
        raise ConfigurationError(
            f"{type(dialect).__name__}: the policy is asked by chat completions; use such a harness"
        )
    asked = {key: value for key in UNUSED if (value := getattr(sampling, key, None)) is not None}
    if asked:
        key, value = next(iter(asked.items()))
        raise ConfigurationError(
            f"sampling.{key}={value}: the policy samples as the run says; leave it out of the role"
        )
    request = dialect.parse_request(body)
    if request.tools:
        raise ConfigurationError(f"tool {request.tools[0].name!r}: calls of tools are not passed to the policy here")
    messages: list[Message] = []
    for message in request.messages:
        content = message.content or ""
        if not isinstance(content, str):
            if kinds := [part.type for part in content if part.type != "text"]:
                raise ConfigurationError(
                    f"a message of role {message.role} holds {kinds[0]}; only text can be trained on"
                )
            content = "\n".join(part.text for part in content)
        if message.role == "tool":
            raise ConfigurationError("a message of role tool: calls of tools are not passed to the policy here")
        messages.append({"role": message.role, "content": content})
    return messages


class PolicyServer(InterceptionServer):
    """Where a rollout's program calls its model: the policy, or the endpoint that a role names itself."""

    def __init__(self, players: Mapping[str, Player], state_service_secrets: tuple[str, ...]):
        super().__init__(state_service_secrets=state_service_secrets)
        self._policy = PolicyClient(players)

    def _client(self, config: BaseClientConfig) -> vf.Client:
        return self._policy if config.base_url == POLICY_ENDPOINT else super()._client(config)
