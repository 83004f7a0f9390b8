"""A conversation with a policy on a terminal, or with lines from a pipe: messages and slash commands.

The policy comes from `weights_config.py`; the recipe `recipes.chat` reads the lines.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from tinker_cookbook.completers import TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import ConfigurationError, RendererError
from tinker_cookbook.renderers import Message, format_content_as_string
from tinker_cookbook.tokenizer_utils import typed
from tinker_cookbook.utils.seeds import derive_seed
from tinker_cookbook.weights_config import Policy

Number = TypeVar("Number", int, float)

HELP = """\
/reset              begin a new conversation (the system prompt stays)
/system [TEXT]      set the system prompt and begin anew; without TEXT: none
/temperature NUMBER sampling temperature; 0 is greedy
/max_tokens NUMBER  longest reply
/logprobs           show the logprob of every token of the replies, or stop showing them
/help               this list
/quit               leave (also the end of input)"""


@dataclass
class ChatSettings:
    """Sampling settings. Raises ConfigurationError for values out of range."""

    system: str | None = None
    temperature: float = 1.0
    max_tokens: int = 512
    show_logprobs: bool = False
    seed: int | None = None
    """None: random replies; otherwise the same lines get the same replies"""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigurationError(f"temperature={self.temperature}: must be a number of at least 0")
        if self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens={self.max_tokens}: must be at least 1")


@dataclass(frozen=True)
class Answer:
    """A policy's reply."""

    message: Message
    completion: TokensWithLogprobs
    is_clean: bool
    """False: the reply is malformed, or was cut off"""


async def answer(policy: Policy, messages: Sequence[Message], settings: ChatSettings, number: int) -> Answer:
    """The policy's next message.

    Args:
        messages: the whole conversation, including the system prompt.
        number: number of earlier replies; with a seed, each reply has separate random numbers.

    Raises:
        ConfigurationError: the conversation leaves no room in the context.
        RendererError: the renderer cannot render the conversation.
    """
    prompt = policy.renderer.build_generation_prompt(list(messages))
    complete = TinkerTokenCompleter(
        policy.sampling_client,
        settings.max_tokens,
        settings.temperature,
        context_window=policy.context_length,
        seed=None if settings.seed is None else derive_seed(settings.seed, number),
    )
    completion = await complete(prompt, policy.renderer.get_stop_sequences())
    message, termination = policy.renderer.parse_response(completion.tokens)
    return Answer(message, completion, termination.is_clean)


@dataclass
class ChatSession:
    """One conversation. `take` handles a line; it returns False when the user wants to leave."""

    policy: Policy
    settings: ChatSettings
    console: Console
    messages: list[Message] = field(default_factory=list[Message])
    replies: int = 0

    def __post_init__(self) -> None:
        self.reset()

    async def take(self, line: str) -> bool:
        """A line that begins with a slash is a command, any other is a message to the policy. Empty lines are ignored."""
        line = line.strip()
        if not line:
            return True
        try:
            if line.startswith("/"):
                return self._command(line)
            await self._say(line)
        except (ConfigurationError, RendererError) as error:
            self.console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return True

    def reset(self) -> None:
        """Clear the conversation."""
        system = self.settings.system
        self.messages = [{"role": "system", "content": system}] if system else []

    async def _say(self, text: str) -> None:
        messages = [*self.messages, Message(role="user", content=text)]
        answered = await answer(self.policy, messages, self.settings, self.replies)
        reply, completion = answered.message, answered.completion
        # Only now: a line without a reply must not stay in the conversation.
        self.messages = [*messages, reply]
        self.replies += 1
        self.console.print(
            Text("assistant> ", style="bold green") + Text(format_content_as_string(reply["content"])), soft_wrap=True
        )
        if completion.stop_reason == "length":
            self.console.print(f"(cut off after {len(completion.tokens)} tokens; see /max_tokens)", style="dim")
        elif not answered.is_clean:
            self.console.print("(the reply is malformed)", style="dim")
        for call in reply.get("tool_calls", []):
            self.console.print(f"(calls {call.function.name}({call.function.arguments}))", style="dim", markup=False)
        if self.settings.show_logprobs:
            self._show_logprobs(completion)

    def _show_logprobs(self, completion: TokensWithLogprobs) -> None:
        """Print every token with its logprob; less likely tokens are redder."""
        tokenizer = self.policy.renderer.tokenizer
        line = Text()
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
            red = round(255 * (1 - math.exp(logprob)))
            line += Text(repr(typed(tokenizer).decode([token]))[1:-1], style=f"rgb({red},{255 - red},80)")
            line += Text(f"[{logprob:.2f}] ", style="dim")
        self.console.print(line, soft_wrap=True)
        self.console.print(f"(sum {sum(completion.logprobs):.2f} over {len(completion.tokens)} tokens)", style="dim")

    def _command(self, line: str) -> bool:
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        settings = self.settings
        if name in ("quit", "exit"):
            return False
        if name == "reset":
            self.reset()
        elif name == "system":
            settings.system = argument or None
            self.reset()
        elif name == "temperature":
            settings.temperature = ChatSettings(temperature=_number(name, argument, float)).temperature
        elif name == "max_tokens":
            settings.max_tokens = ChatSettings(max_tokens=_number(name, argument, int)).max_tokens
        elif name == "logprobs":
            settings.show_logprobs = not settings.show_logprobs
        elif name == "help":
            self.console.print(HELP, markup=False, highlight=False)
            return True
        else:
            raise ConfigurationError(f"/{name} is not a command; /help lists them")
        self.console.print(f"({self.describe()})", style="dim", markup=False, highlight=False)
        return True

    def describe(self) -> str:
        """The settings in one line."""
        count = sum(message["role"] != "system" for message in self.messages)
        system = shlex.quote(self.settings.system) if self.settings.system else "none"
        return (
            f"temperature {self.settings.temperature:g}, max_tokens {self.settings.max_tokens}, system {system}, "
            f"logprobs {'on' if self.settings.show_logprobs else 'off'}, {count} messages"
        )


def converse(session: ChatSession, read: Callable[[], str | None], runner: asyncio.Runner) -> None:
    """Handle lines until the user leaves or `read` returns None.

    Ctrl-C during a reply cancels it and drops its line; while `read` waits, it ends the chat.
    """
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            return
        if line is None:
            return
        try:
            if not runner.run(session.take(line)):
                return
        except KeyboardInterrupt:
            session.console.print("(cancelled)", style="dim")


def _number(name: str, text: str, kind: type[Number]) -> Number:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigurationError(f"/{name} needs {wanted}, got {text!r}") from None
