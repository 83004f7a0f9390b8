"""Any OpenAI-compatible endpoint as a MessageCompleter: a judge, a grader or a teacher that returns text.

The endpoint may be a hosted service, a vLLM server, or this project's own server (docs/server.md). Requests are
retried after transient errors, with limits on number and time. Tokens and cost are counted, and replies can be cached
on disk by request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import random
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import chz

from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.exceptions import ConfigurationError, EndpointError
from tinker_cookbook.field_groups import LongestReply, SamplingSeed, Temperature
from tinker_cookbook.renderers import Message, ToolCall, get_text_content
from tinker_cookbook.renderers.content import ensure_list
from tinker_cookbook.utils.fields import FieldGroup, docs
from tinker_cookbook.utils.files import read_json_object, write_json
from tinker_cookbook.utils.lazy import httpx
from tinker_cookbook.utils.narrowing import is_object
from tinker_cookbook.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

ROUTE = "/chat/completions"
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses of transient errors: the same request may succeed later."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Pause between attempts: doubles each time, plus up to half at random; or what the endpoint asks for, within these bounds."""


@chz.chz(typecheck=True)
class Retries(FieldGroup):
    """How often a request is repeated."""

    max_retries: int = chz.field(default=5, doc="retries after a transient error", validator=chz.validators.ge(0))


@chz.chz(typecheck=True)
class EndpointConfig(Retries):
    """A model behind an OpenAI-compatible endpoint. The methods take the user's name for this config, for errors."""

    base_url: str | None = chz.field(
        default=None, doc="address of the endpoint, including its version, such as http://127.0.0.1:8000/v1"
    )
    model: str | None = chz.field(
        default=None,
        doc="the model's name at the endpoint; on this project's server also the tinker:// path of a checkpoint",
    )
    api_key_variable: str | None = chz.field(
        default="OPENAI_API_KEY", doc="environment variable with the API key; None: the endpoint needs none"
    )
    max_concurrency: int = chz.field(
        default=16, doc="concurrent requests of this process", validator=chz.validators.gt(0)
    )
    timeout_seconds: float = chz.field(default=120.0, doc="time limit of one attempt", validator=chz.validators.gt(0))
    send_seed: bool = chz.field(
        default=True, doc="send a seed with each request; False for endpoints that refuse the field"
    )
    max_tokens_field: str = chz.field(
        default="max_tokens", doc="name of the field for max_tokens; max_completion_tokens for some models"
    )
    cache_dir: str | None = chz.field(
        default=None, doc="folder of cached replies: the same request is not sent again; None: no cache"
    )
    prompt_price: float = chz.field(
        default=0.0, doc="price of a million prompt tokens, for the metric `cost`", validator=chz.validators.ge(0)
    )
    completion_price: float = chz.field(
        default=0.0, doc="price of a million completion tokens, for the metric `cost`", validator=chz.validators.ge(0)
    )

    @property
    def is_named(self) -> bool:
        """Whether an endpoint is set."""
        return self.base_url is not None or self.model is not None

    def check(self, name: str) -> None:
        """Check everything that needs no request. Raises ConfigurationError."""
        if self.base_url is None or not self.base_url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"{name}.base_url={self.base_url!r} is not an address of an endpoint; give one such as http://127.0.0.1:8000/v1"
            )
        if not self.model:
            raise ConfigurationError(f"{name}.model is missing; name the model as the endpoint calls it")
        self.key_for(name)

    def check_used(self, name: str, used: bool, by: str) -> None:
        """Like `check` if the endpoint is used. Raises ConfigurationError if one is named but not used.

        Args:
            by: the setting that enables its use.
        """
        if used:
            self.check(name)
        elif self.is_named:
            raise ConfigurationError(f"{name} names an endpoint that is not used: set {by}, or drop {name}")

    def open(self, name: str, max_tokens: int, temperature: float, seed: int | None = None) -> EndpointCompleter:
        """A completer for this endpoint. Sends no request. Raises as `check`."""
        self.check(name)
        return EndpointCompleter(self, name, max_tokens, temperature, seed)

    def key_for(self, name: str) -> str | None:
        """The API key; None: the endpoint needs none. Raises ConfigurationError if its variable is not set."""
        if self.api_key_variable is None:
            return None
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise ConfigurationError(
                f"{name}.api_key_variable={self.api_key_variable}: this environment variable is not set; export it, name "
                f"another, or set {name}.api_key_variable=None for an endpoint that needs no key"
            )
        return key


@chz.chz(typecheck=True)
class AskConfig(LongestReply, Temperature, SamplingSeed, Retries, max_tokens=256, temperature=0.0, max_retries=1):
    """A model whose replies a program parses: grades or verdicts."""

    DOCS = docs(
        seed="seed of its replies; combined with the key of each request",
        max_retries="retries after an unreadable reply",
    )

    endpoint: EndpointConfig = chz.field(default_factory=EndpointConfig, doc="the endpoint to query")

    def open_endpoint(self, name: str) -> EndpointCompleter:
        """A completer for the endpoint of the config that the user calls `name`. Raises as EndpointConfig.check."""
        return self.endpoint.open(f"{name}.endpoint", self.max_tokens, self.temperature, self.seed)


@dataclass
class Usage:
    """Usage of all calls so far. Tokens are those that the endpoint reports; cached replies use none."""

    calls: int = 0
    cached: int = 0
    resent: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def add(self, other: Usage) -> None:
        for entry in dataclasses.fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))


@dataclass(frozen=True)
class LikelyToken:
    """A token of a reply, as text, and the logprobs of the likeliest tokens at its position."""

    text: str
    logprobs: dict[str, float]


class _Connections:
    """A client and a semaphore per event loop, created on first use; neither is pickled."""

    def __init__(self, config: EndpointConfig):
        self._config = config
        self._by_loop: weakref.WeakKeyDictionary[Any, tuple[httpx.AsyncClient, asyncio.Semaphore]] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Connections, (self._config,)

    def here(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        """The client and semaphore of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            most = self._config.max_concurrency
            client = httpx.AsyncClient(
                timeout=self._config.timeout_seconds, limits=httpx.Limits(max_connections=most), follow_redirects=True
            )
            self._by_loop[loop] = client, asyncio.Semaphore(most)
        return self._by_loop[loop]


@dataclass(eq=False)
class EndpointCompleter(MessageCompleter):
    """A policy over chat messages behind an endpoint. Picklable: the key is read at each request.

    Args:
        name: the user's name for the endpoint, for errors.
        max_tokens: longest reply.
        seed: sent with each request, derived from the fork's seed; None: not sent. Call i of a completer has its own
            seed, so that asking again is a different request.
        tools: declarations in OpenAI's form, sent with each request.

    Raises:
        EndpointError: on a call, when the endpoint rejects it, or `max_retries` more attempts have failed.
    """

    config: EndpointConfig
    name: str
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    spent: Usage = field(default_factory=Usage)
    """usage of this completer, without its forks"""
    _connections: _Connections | None = None
    _calls: int = 0

    def __post_init__(self) -> None:
        self._connections = self._connections or _Connections(self.config)

    def fork(self, *key: int | str) -> Self:
        """A completer with its own seed and counts starting at zero; connections and their limit are shared."""
        seed = None if self.seed is None else derive_seed(self.seed, *key)
        return dataclasses.replace(self, seed=seed, spent=Usage(), _calls=0)

    def usage(self) -> dict[str, float]:
        """`spent` as metrics; `cost` only if prices are set."""
        metrics = {key: float(value) for key, value in dataclasses.asdict(self.spent).items()}
        if not (self.config.prompt_price or self.config.completion_price):
            del metrics["cost"]
        return metrics

    async def __call__(self, messages: list[Message]) -> Message:
        return _message(await self._reply(messages, {}), self.name)

    async def with_logprobs(self, messages: list[Message], top: int) -> tuple[Message, list[LikelyToken]]:
        """A reply, and for each of its tokens the `top` likeliest ones at its position.

        Raises EndpointError as a call does, and for an endpoint that returns no logprobs.
        """
        reply = await self._reply(messages, {"logprobs": True, "top_logprobs": top})
        try:
            tokens = [
                LikelyToken(one["token"], {other["token"]: float(other["logprob"]) for other in one["top_logprobs"]})
                for one in reply["choices"][0]["logprobs"]["content"]
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EndpointError(
                f"{self.name}: {self.config.base_url} (model {self.config.model!r}) answers without choices[0].logprobs; use an "
                "endpoint that has top_logprobs, or turn the probabilities off"
            ) from error
        return _message(reply, self.name), tokens

    async def _reply(self, messages: list[Message], fields: dict[str, Any]) -> dict[str, Any]:
        """The endpoint's whole reply, or the cached one. `fields` are added to the request."""
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [as_openai(message, f"{self.name}: messages[{i}]") for i, message in enumerate(messages)],
            self.config.max_tokens_field: self.max_tokens,
            "temperature": self.temperature,
            **fields,
        }
        if self.tools is not None:
            body["tools"] = self.tools
        seed = None if self.seed is None else derive_seed(self.seed, self._calls)
        self._calls += 1
        if seed is not None and self.config.send_seed:
            body["seed"] = seed
        cache_file = self._cache_path(body, seed)
        if cache_file is not None and cache_file.exists():
            self.spent.add(Usage(calls=1, cached=1))
            stored = read_json_object(cache_file, "delete it, and the request is sent again")
            return stored["reply"]
        reply = await self._ask(body)
        _message(reply, self.name)  # an invalid reply is not cached
        if cache_file is not None:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache_file, {"request": body, "reply": reply})
        return reply

    def _cache_path(self, body: dict[str, Any], seed: int | None) -> Path | None:
        """The cache path of this request's reply. The seed is part of the key, whether it is sent or not."""
        if self.config.cache_dir is None:
            return None
        identity = json.dumps([self.config.base_url, body, seed], sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()
        return Path(self.config.cache_dir).expanduser() / digest[:2] / f"{digest}.json"

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._connections is not None
        client, limit = self._connections.here()
        attempt = 0
        while True:
            async with limit:
                reply, problem, pause = await self._attempt(client, body)
            if reply is not None:
                self.spent.add(self._spent_on(reply, attempt))
                return reply
            if pause is None or attempt == self.config.max_retries:
                tried = f" ({attempt + 1} attempts)" if attempt else ""
                raise EndpointError(
                    f"{self.name}: {self.config.base_url} (model {self.config.model!r}) {problem}{tried}"
                )
            wait = max(pause, FIRST_PAUSE_SECONDS * 2**attempt * (1 + random.random() / 2))
            logger.warning("%s: %s %s; trying again", self.name, self.config.base_url, problem)
            await asyncio.sleep(min(wait, LONGEST_PAUSE_SECONDS))
            attempt += 1

    async def _attempt(
        self, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, str, float | None]:
        """The reply, or the error and the minimum pause before the next attempt (None: do not retry)."""
        key = self.config.key_for(self.name)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            async with asyncio.timeout(self.config.timeout_seconds):
                response = await client.post(str(self.config.base_url).rstrip("/") + ROUTE, json=body, headers=headers)
        except (TimeoutError, httpx.TimeoutException):
            return None, f"did not answer within timeout_seconds={self.config.timeout_seconds:g}", 0.0
        except httpx.HTTPError as error:
            return None, f"cannot be reached ({type(error).__name__}: {error})", 0.0
        if response.status_code in PASSING:
            return None, _refusal(response), _seconds(response.headers.get("retry-after"))
        if response.status_code != 200:
            return None, _refusal(response), None
        try:
            reply = response.json()
        except ValueError:
            return None, f"does not answer with JSON: {response.text[:200]!r}", None
        return reply, "", 0.0

    def _spent_on(self, reply: dict[str, Any], retries: int) -> Usage:
        usage: dict[str, Any] = reply.get("usage") or {}
        num_prompt_tokens, completion_tokens = (
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
        )
        cost = (num_prompt_tokens * self.config.prompt_price + completion_tokens * self.config.completion_price) / 1e6
        return Usage(1, 0, retries, num_prompt_tokens, completion_tokens, cost)


def _refusal(response: httpx.Response) -> str:
    try:
        reason: Any = response.json()["error"]
        reason = reason["message"] if is_object(reason) else reason
    except (ValueError, KeyError, TypeError):
        reason = response.text
    return f"answers HTTP {response.status_code}: {str(reason)[:500]}"


def _seconds(header: str | None) -> float:
    """The seconds of a Retry-After header; 0 for a date or an invalid value."""
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0


def as_openai(message: Message, where: str = "message") -> dict[str, Any]:
    """A message in the form of OpenAI's chat API: text and tool calls, without thinking.

    Raises ConfigurationError for images and audio.
    """
    media = sorted({part["type"] for part in ensure_list(message["content"])} - {"text", "thinking"})
    if media:
        raise ConfigurationError(f"{where} holds {', '.join(media)}; an endpoint is sent text only")
    converted: dict[str, Any] = {"role": message["role"], "content": get_text_content(message)}
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
    return converted | {key: value for key in ("tool_call_id", "name") if (value := message.get(key))}


def _message(reply: dict[str, Any], name: str) -> Message:
    """The first choice of a reply."""
    try:
        reply_message = reply["choices"][0]["message"]
        message: Message = {"role": "assistant", "content": reply_message.get("content") or ""}
        listed: list[Any] = reply_message.get("tool_calls") or []
        calls = [
            ToolCall(
                id=call.get("id"),
                function=ToolCall.FunctionBody(name=call["function"]["name"], arguments=call["function"]["arguments"]),
            )
            for call in listed
        ]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise EndpointError(f"{name}: the endpoint's reply has no message in choices[0]: {str(reply)[:300]}") from error
    if calls:
        message["tool_calls"] = calls
    return message
