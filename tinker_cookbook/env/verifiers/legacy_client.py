"""The client of verifiers' form before 0.4; the policy writes its replies."""
# pyright: reportMissingImports=false

from typing import Any, NoReturn

from verifiers.legacy.clients import Client
from verifiers.legacy.errors import OverlongPromptError
from verifiers.legacy.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from tinker_cookbook.env.verifiers.legacy import read_max_tokens, read_messages, read_tool
from tinker_cookbook.env.verifiers.player import Player, PromptTooLongError, Turn
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, ToolSpec


class PolicyClient(Client[Player, list[Message], Turn, ToolSpec]):
    """Answers the model calls of one rollout with its player."""

    def setup_client(self, config: Any) -> NoReturn:
        raise TypeError("this client is made with a player")

    async def to_native_tool(self, tool: Any) -> ToolSpec:
        return read_tool(tool)

    async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
        try:
            return read_messages(messages), {}
        except ConfigurationError as error:
            self.client.error = error
            raise

    async def get_native_response(
        self,
        prompt: list[Message],
        model: str,
        sampling_args: dict[str, Any],
        tools: list[ToolSpec] | None = None,
        **kwargs: Any,
    ) -> Turn:
        try:
            return await self.client.call(prompt, read_max_tokens(sampling_args), tools or ())
        except ConfigurationError as error:
            self.client.error = error
            raise
        except PromptTooLongError as error:
            raise OverlongPromptError(str(error)) from error

    async def raise_from_native_response(self, response: Turn) -> None:
        """Empty replies are valid, too."""

    async def from_native_response(self, response: Turn) -> Response:
        prompt_ids, action, calls = response.prompt.to_ints(), response.action, response.message.get("tool_calls", [])
        cut = action.stop_reason == "length"
        tokens = ResponseTokens(
            prompt_ids=prompt_ids,
            prompt_mask=[0] * len(prompt_ids),
            completion_ids=list(action.tokens),
            completion_mask=[1] * len(action.tokens),
            completion_logprobs=list(action.logprobs),
        )
        message = ResponseMessage(
            content=response.message["content"],
            tool_calls=[
                ToolCall(id=str(call.id), name=call.function.name, arguments=call.function.arguments) for call in calls
            ]
            or None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            is_truncated=cut,
            tokens=tokens,
        )
        usage = Usage(
            prompt_tokens=len(prompt_ids),
            reasoning_tokens=0,
            completion_tokens=len(action.tokens),
            total_tokens=len(prompt_ids) + len(action.tokens),
        )
        return Response(id=response.id, created=0, model="policy", usage=usage, message=message)

    async def close(self) -> None:
        pass
