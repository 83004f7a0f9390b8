"""Chat with the checkpoints of a report's runs; weights are loaded at the first message."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from tinker_cookbook.chat import ChatSettings, answer
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, format_content_as_string
from tinker_cookbook.report.rollouts import DIGITS, Words
from tinker_cookbook.report.runs import RunData
from tinker_cookbook.runs.metadata import run_system_prompt
from tinker_cookbook.runs.vocabulary import token_bytes
from tinker_cookbook.utils.narrowing import is_list, is_mapping
from tinker_cookbook.weights_config import Policy, WeightsConfig

BASE = "base model"
MOST_OPEN = 2
"""Checkpoints that stay loaded; the least recently used is released."""

MOST_TOKENS = 512
"""Longest reply if the run's config has no max_tokens."""

_ROLES = ("system", "user", "assistant")


class Chats:
    """Policies of runs, in a thread with its own event loop, so that any thread may use them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._open: dict[tuple[str, str], tuple[Policy, Words]] = {}
        self._opening = asyncio.Lock()

    def described(self, run: RunData) -> dict[str, Any]:
        """The available policies: `names`, the newest checkpoint first and the base model last, and the run's
        settings: `system` (its system prompt), `temperature`, `max_tokens`.
        """
        config = run.config
        return {
            "names": [*_paths(run), BASE],
            "system": run_system_prompt(run.folder),
            "temperature": config.get("temperature"),
            "max_tokens": config.get("max_tokens") or MOST_TOKENS,
        }

    def reply(self, run: RunData, asked: Any) -> dict[str, Any]:
        """Sample a checkpoint's next reply.

        Args:
            asked: `name` (one of `described`), `messages` (each with `role` and `content`, the last one the user's),
                `temperature`, `max_tokens` and, for reproducible replies, `seed`.

        Returns:
            `content`, `tokens` (strings), `ids`, `sampled` (their logprobs), `stop` and `clean`.

        Raises:
            ConfigurationError: a field is missing or wrong, or there is no such checkpoint.
        """
        name, messages, settings = _checked(asked)
        paths = _paths(run)
        if name != BASE and name not in paths:
            raise ConfigurationError(f"name={name!r}: the run has {', '.join([*paths, BASE])}")
        pending = asyncio.run_coroutine_threadsafe(
            self._reply(run, name, paths.get(name), messages, settings), self._running()
        )
        return pending.result()

    def close(self) -> None:
        """End the thread. Policies are released."""
        self._open.clear()
        with self._starting:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
            self._loop = self._thread = None

    async def _reply(
        self, run: RunData, name: str, path: str | None, messages: list[Message], settings: ChatSettings
    ) -> dict[str, Any]:
        policy, words = await self._policy(run, name, path)
        reply = await answer(policy, messages, settings, 0)
        ids = reply.completion.tokens
        return {
            "content": format_content_as_string(reply.message["content"]),
            "tokens": words.split(np.array(ids, dtype=np.int64)),
            "ids": list(ids),
            "sampled": [float(f"{value:.{DIGITS}g}") for value in reply.completion.logprobs],
            "stop": reply.completion.stop_reason,
            "clean": reply.is_clean,
        }

    async def _policy(self, run: RunData, name: str, path: str | None) -> tuple[Policy, Words]:
        key = (str(run.folder), path or BASE)
        async with self._opening:
            opened = self._open.pop(key, None)
            if opened is None:
                while len(self._open) >= MOST_OPEN:
                    self._open.pop(next(iter(self._open)))
                policy = await _weights(run, path).open_policy(name)
                opened = policy, Words(token_bytes(policy.renderer.tokenizer))
            self._open[key] = opened
            return opened

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="chat", daemon=True)
                self._thread.start()
            return self._loop


def _paths(run: RunData) -> dict[str, str]:
    """Checkpoints with sampler weights, by name, newest first."""
    records = [record for record in run.store.read_checkpoint_records() if record.sampler_path]
    return {record.name: str(record.sampler_path) for record in reversed(records)}


def _weights(run: RunData, path: str | None) -> WeightsConfig:
    config = run.config
    return WeightsConfig(
        base_model=config.get("model_name"),
        load_checkpoint_path=path,
        renderer_name=config.get("renderer_name"),
        backend=config.get("backend"),
        base_url=config.get("base_url"),
    )


def _checked(asked: Any) -> tuple[str, list[Message], ChatSettings]:
    if not is_mapping(asked):
        raise ConfigurationError("a request is a JSON object with name and messages")
    if unknown := asked.keys() - {"name", "messages", "temperature", "max_tokens", "seed"}:
        raise ConfigurationError(f"{', '.join(sorted(unknown))}: no field of a request")
    messages = asked.get("messages")
    if not is_list(messages) or not messages or not all(_is_message(one) for one in messages):
        raise ConfigurationError(
            f"messages: give at least one, each with role ({', '.join(_ROLES)}) and content, a text"
        )
    if messages[-1]["role"] != "user":
        raise ConfigurationError("messages: the last one must be the user's")
    temperature, longest, seed = asked.get("temperature", 1.0), asked.get("max_tokens", MOST_TOKENS), asked.get("seed")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise ConfigurationError(f"temperature={temperature!r}: must be a number")
    for key, value in (("max_tokens", longest), ("seed", 0 if seed is None else seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigurationError(f"{key}={value!r}: must be a whole number")
    settings = ChatSettings(temperature=temperature, max_tokens=longest, seed=seed)
    return str(asked.get("name")), [Message(role=one["role"], content=one["content"]) for one in messages], settings


def _is_message(value: Any) -> bool:
    return (
        is_mapping(value)
        and set(value) == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )
