"""Calls of the clients `openai` and `anthropic`, as programs that use a server of text models make them.

Each is written as its row in docs/server_clients.md. A call raises what the client raises, and returns what must be true.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

CHAT: Any = [{"role": "user", "content": "What is 7 + 5?"}]
PARTS: Any = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "7 + 5?"}]}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "add"}}
CALLED: Any = [
    *CHAT,
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "12"},
]
FUNCTION: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
USE: Any = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}
ANTHROPIC_TOOL: Any = {"name": "add", "input_schema": SCHEMA}


class Sum(BaseModel):
    is_even: bool


@dataclass(frozen=True)
class Asked:
    """A client of either kind, its async sibling, and what there is to ask."""

    client: Any
    sibling: Any
    model: str
    latest: str
    """a checkpoint"""


def chat(asked: Asked, **fields: Any) -> Any:
    return asked.client.chat.completions.create(
        **{"model": asked.model, "messages": CHAT, "max_completion_tokens": 40, **fields}
    )


def complete(asked: Asked, **fields: Any) -> Any:
    return asked.client.completions.create(**{"model": asked.model, "prompt": "Seven", "max_tokens": 4, **fields})


def respond(asked: Asked, **fields: Any) -> Any:
    return asked.client.responses.create(
        **{"model": asked.model, "input": "What is 7 + 5?", "max_output_tokens": 40, **fields}
    )


def say(asked: Asked, **fields: Any) -> Any:
    return asked.client.messages.create(**{"model": asked.model, "messages": CHAT, "max_tokens": 40, **fields})


def text(reply: Any) -> str:
    return reply.choices[0].message.content


def ends(reply: Any) -> bool:
    """Whether a reply is whole. Its text may be empty: the model is tiny, and draws what it likes."""
    return isinstance(text(reply), str) and reply.choices[0].finish_reason in ("stop", "length")


def ends_streamed(stream: Any) -> bool:
    chunks = [chunk for chunk in stream if chunk.choices]
    return len(chunks) > 1 and chunks[-1].choices[0].finish_reason in ("stop", "length")


def is_response(reply: Any) -> bool:
    return reply.status in ("completed", "incomplete") and reply.usage.output_tokens > 0


def is_message(reply: Any) -> bool:
    return reply.stop_reason in ("end_turn", "max_tokens") and reply.usage.output_tokens > 0


def is_called(reply: Any) -> bool:
    (call,) = reply.choices[0].message.tool_calls
    return json.loads(call.function.arguments)["a"] in (1, 2)


def is_streamed_call(stream: Any) -> bool:
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    return json.loads("".join(call.function.arguments or "" for call in calls))["a"] in (1, 2)


def final(manager: Any, name: str) -> Any:
    with manager as stream:
        for _ in stream:
            pass
        return getattr(stream, name)()


FORM: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
Call = Callable[[Asked], Any]

OPENAI: dict[str, Call] = {
    "models.list()": lambda a: a.model in [model.id for model in a.client.models.list()],
    "models.retrieve(model)": lambda a: a.client.models.retrieve(a.model).id == a.model,
    "models.retrieve(checkpoint)": lambda a: a.client.models.retrieve(a.latest).id.startswith("tinker://"),
    "chat.completions.create(messages=...)": lambda a: ends(chat(a)),
    "chat.completions.create(model=checkpoint)": lambda a: chat(a, model=a.latest).model.startswith("tinker://"),
    "chat.completions.create(stream=True)": lambda a: ends_streamed(chat(a, stream=True)),
    "chat.completions.create(stream_options=...)": lambda a: (
        [*chat(a, stream=True, stream_options={"include_usage": True})][-1].usage.total_tokens
    ),
    "chat.completions.create(n=3)": lambda a: len(chat(a, n=3).choices) == 3,
    "chat.completions.create(seed=1)": lambda a: text(chat(a, seed=1)) == text(chat(a, seed=1)),
    "chat.completions.create(stop=[...])": lambda a: "2" not in text(chat(a, stop=["2", "1"])),
    "chat.completions.create(max_tokens=3)": lambda a: (
        chat(a, max_tokens=3, max_completion_tokens=None).usage.completion_tokens <= 3
    ),
    "chat.completions.create(max_completion_tokens=3)": lambda a: (
        chat(a, max_completion_tokens=3).usage.completion_tokens <= 3
    ),
    "chat.completions.create(temperature=0)": lambda a: text(chat(a, temperature=0)) == text(chat(a, temperature=0)),
    "chat.completions.create(top_p=0.5)": lambda a: ends(chat(a, top_p=0.5)),
    "chat.completions.create(logprobs=True, top_logprobs=3)": lambda a: (
        len(chat(a, logprobs=True, top_logprobs=3).choices[0].logprobs.content[0].top_logprobs) == 3
    ),
    "chat.completions.create(presence_penalty=1.5)": lambda a: chat(a, presence_penalty=1.5).choices,
    "chat.completions.create(frequency_penalty=1.5)": lambda a: chat(a, frequency_penalty=1.5).choices,
    "chat.completions.create(logit_bias={...})": lambda a: (
        chat(a, logit_bias={"5": 100}, max_completion_tokens=3).usage.completion_tokens == 3
    ),
    'chat.completions.create(response_format={"type": "text"})': lambda a: ends(
        chat(a, response_format={"type": "text"})
    ),
    'chat.completions.create(response_format={"type": "json_object"})': lambda a: (
        text(chat(a, response_format={"type": "json_object"}))[0] == "{"
    ),
    'chat.completions.create(response_format={"type": "json_schema", ...})': lambda a: json.loads(
        text(chat(a, response_format=FORM))
    )["a"],
    "chat.completions.parse(response_format=Model)": lambda a: isinstance(
        a.client.chat.completions.parse(model=a.model, messages=CHAT, response_format=Sum).choices[0].message.parsed,
        Sum,
    ),
    "chat.completions.stream(...)": lambda a: ends(
        final(a.client.chat.completions.stream(model=a.model, messages=CHAT), "get_final_completion")
    ),
    "chat.completions.create(tools=[...])": lambda a: chat(a, tools=[TOOL]).choices,
    'chat.completions.create(tool_choice="auto")': lambda a: chat(a, tools=[TOOL], tool_choice="auto").choices,
    'chat.completions.create(tool_choice="none")': lambda a: (
        chat(a, tools=[TOOL], tool_choice="none").choices[0].message.tool_calls is None
    ),
    'chat.completions.create(tool_choice="required")': lambda a: is_called(
        chat(a, tools=[TOOL], tool_choice="required")
    ),
    "chat.completions.create(tool_choice={named})": lambda a: is_called(chat(a, tools=[TOOL], tool_choice=NAMED)),
    "chat.completions.create(tools=[...], stream=True)": lambda a: is_streamed_call(
        chat(a, tools=[TOOL], tool_choice=NAMED, stream=True)
    ),
    "chat.completions.create(parallel_tool_calls=True)": lambda a: (
        chat(a, tools=[TOOL], parallel_tool_calls=True).choices
    ),
    "chat.completions.create(messages=[..., results of tools])": lambda a: ends(chat(a, messages=CALLED, tools=[TOOL])),
    "chat.completions.create(messages=[parts of text])": lambda a: (
        text(chat(a, messages=PARTS, seed=1)) == text(chat(a, seed=1))
    ),
    "chat.completions.create(messages=[developer, ...])": lambda a: ends(
        chat(a, messages=[{"role": "developer", "content": "Answer."}, *CHAT])
    ),
    "chat.completions.create(user=..., metadata=...)": lambda a: ends(chat(a, user="me", metadata={"run": "1"})),
    "chat.completions.with_raw_response.create(...)": lambda a: ends(
        a.client.chat.completions.with_raw_response.create(model=a.model, messages=CHAT).parse()
    ),
    'chat.completions.create(extra_body={"top_k", "min_p", "repetition_penalty"})': lambda a: ends(
        chat(a, extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1})
    ),
    'chat.completions.create(extra_body={"structured_outputs"})': lambda a: (
        text(chat(a, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})) in ("yes", "no")
    ),
    'chat.completions.create(extra_body={"min_tokens"})': lambda a: (
        chat(a, extra_body={"min_tokens": 20}).usage.completion_tokens > 20
    ),
    'chat.completions.create(extra_body={"continue_final_message"})': lambda a: (
        chat(
            a,
            messages=[*CHAT, {"role": "assistant", "content": "It is"}],
            extra_body={"add_generation_prompt": False, "continue_final_message": True},
        ).choices
    ),
    "AsyncOpenAI().chat.completions.create(...)": lambda a: ends(
        asyncio.run(a.sibling.chat.completions.create(model=a.model, messages=CHAT, max_tokens=8))
    ),
    'completions.create(prompt="...")': lambda a: complete(a).choices[0].finish_reason,
    "completions.create(prompt=[texts])": lambda a: len(complete(a, prompt=["One", "Two"]).choices) == 2,
    "completions.create(prompt=[ids])": lambda a: complete(a, prompt=[1, 2, 3]).usage.prompt_tokens == 3,
    "completions.create(prompt=[lists of ids])": lambda a: len(complete(a, prompt=[[1, 2], [3]]).choices) == 2,
    "completions.create(stream=True)": lambda a: [*complete(a, stream=True)][-1].choices[0].finish_reason,
    "completions.create(logprobs=3)": lambda a: len(complete(a, logprobs=3).choices[0].logprobs.top_logprobs[0]) == 3,
    "completions.create(echo=True)": lambda a: complete(a, echo=True).choices[0].text.startswith("Seven"),
    "completions.create(echo=True, max_tokens=0, logprobs=1)": lambda a: (
        complete(a, echo=True, max_tokens=0, logprobs=1).choices[0].logprobs.token_logprobs[0] is None
    ),
    "completions.create(n=2, best_of=4)": lambda a: len(complete(a, n=2, best_of=4).choices) == 2,
    "completions.create(presence_penalty=1, frequency_penalty=1)": lambda a: (
        complete(a, presence_penalty=1, frequency_penalty=1).choices
    ),
    "completions.create(logit_bias={...})": lambda a: complete(a, logit_bias={"5": -100}).choices,
    'responses.create(input="...")': lambda a: is_response(respond(a)),
    "responses.create(instructions=..., input=[...])": lambda a: is_response(
        respond(a, instructions="Answer.", input=CHAT)
    ),
    "responses.create(stream=True)": lambda a: is_response([*respond(a, stream=True)][-1].response),
    "responses.create(tools=[...])": lambda a: (
        respond(a, tools=[FUNCTION], tool_choice="required").output[0].type == "function_call"
    ),
    "responses.create(input=[..., function_call_output])": lambda a: (
        respond(
            a,
            input=[
                *CHAT,
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "12"},
            ],
            tools=[FUNCTION],
        ).usage.output_tokens
    ),
    "responses.create(include=[logprobs])": lambda a: is_response(
        respond(a, include=["message.output_text.logprobs"], top_logprobs=2)
    ),
    "responses.parse(text_format=Model)": lambda a: isinstance(
        a.client.responses.parse(model=a.model, input="Is it?", text_format=Sum).output_parsed, Sum
    ),
    "responses.stream(...)": lambda a: is_response(
        final(a.client.responses.stream(model=a.model, input="Hi."), "get_final_response")
    ),
    "responses.input_tokens.count(...)": lambda a: (
        a.client.responses.input_tokens.count(model=a.model, input="Hi.").input_tokens
    ),
    "responses.retrieve(id)": lambda a: a.client.responses.retrieve("resp_1"),
    "embeddings.create(...)": lambda a: a.client.embeddings.create(model=a.model, input="x"),
    "moderations.create(...)": lambda a: a.client.moderations.create(input="x"),
    "images.generate(...)": lambda a: a.client.images.generate(model=a.model, prompt="x"),
    "audio.speech.create(...)": lambda a: a.client.audio.speech.create(model=a.model, voice="alloy", input="x"),
    "files.create(...)": lambda a: a.client.files.create(file=b"x", purpose="batch"),
    "batches.create(...)": lambda a: a.client.batches.create(
        completion_window="24h", endpoint="/v1/chat/completions", input_file_id="f"
    ),
    "fine_tuning.jobs.create(...)": lambda a: a.client.fine_tuning.jobs.create(model=a.model, training_file="f"),
}

ANTHROPIC: dict[str, Call] = {
    "models.list()": lambda a: a.model in [model.id for model in a.client.models.list()],
    "models.retrieve(model)": lambda a: a.client.models.retrieve(a.model).id == a.model,
    "messages.create(messages=...)": lambda a: is_message(say(a)),
    "messages.create(model=checkpoint)": lambda a: say(a, model=a.latest).model.startswith("tinker://"),
    "messages.create(system=...)": lambda a: is_message(say(a, system="Answer.")),
    "messages.create(system=[blocks])": lambda a: is_message(
        say(a, system=[{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}])
    ),
    "messages.create(messages=[blocks of text])": lambda a: is_message(say(a, messages=PARTS)),
    "messages.create(stream=True)": lambda a: [*say(a, stream=True)][-1].type == "message_stop",
    "messages.stream(...)": lambda a: is_message(
        final(a.client.messages.stream(model=a.model, messages=CHAT, max_tokens=20), "get_final_message")
    ),
    "messages.create(stop_sequences=[...])": lambda a: all(
        "1" not in block.text for block in say(a, stop_sequences=["1"]).content
    ),
    'messages.create(extra_body={"temperature", "top_k", "top_p"})': lambda a: is_message(
        say(a, extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9})
    ),
    "messages.create(metadata=...)": lambda a: is_message(say(a, metadata={"user_id": "me"})),
    "messages.create(tools=[...])": lambda a: say(a, tools=[ANTHROPIC_TOOL]).usage.output_tokens,
    'messages.create(tool_choice={"type": "auto"})': lambda a: (
        say(a, tools=[ANTHROPIC_TOOL], tool_choice={"type": "auto"}).usage.output_tokens
    ),
    'messages.create(tool_choice={"type": "any"})': lambda a: (
        say(a, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}).content[0].input["a"] in (1, 2)
    ),
    'messages.create(tool_choice={"type": "tool", ...})': lambda a: (
        say(a, tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool", "name": "add"}).stop_reason == "tool_use"
    ),
    'messages.create(tool_choice={"type": "none"})': lambda a: (
        say(a, tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}).stop_reason != "tool_use"
    ),
    "messages.create(messages=[..., tool_use, tool_result])": lambda a: (
        say(
            a,
            messages=[
                *CHAT,
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "12"}]},
            ],
            tools=[ANTHROPIC_TOOL],
        ).usage.output_tokens
    ),
    "messages.create(messages=[..., beginning of the reply])": lambda a: (
        say(a, messages=[*CHAT, {"role": "assistant", "content": "It is"}]).usage.output_tokens
    ),
    "messages.create(output_config={format})": lambda a: json.loads(
        say(a, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).content[0].text
    )["a"],
    "messages.count_tokens(...)": lambda a: (
        a.client.messages.count_tokens(model=a.model, messages=CHAT, tools=[ANTHROPIC_TOOL]).input_tokens
    ),
    "beta.messages.create(...)": lambda a: is_message(
        a.client.beta.messages.create(model=a.model, messages=CHAT, max_tokens=8, betas=["x"])
    ),
    "AsyncAnthropic().messages.create(...)": lambda a: is_message(
        asyncio.run(a.sibling.messages.create(model=a.model, messages=CHAT, max_tokens=8))
    ),
    "messages.create(messages=[image])": lambda a: say(
        a,
        messages=[
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}]}
        ],
    ),
    "messages.create(thinking={budget_tokens})": lambda a: say(
        a, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1100
    ),
    "messages.create(tools=[server tools])": lambda a: say(
        a, tools=[{"type": "web_search_20250305", "name": "web_search"}]
    ),
    "messages.batches.create(...)": lambda a: a.client.messages.batches.create(requests=[]),
}

REFUSED: dict[str, dict[str, str]] = {
    "openai": {
        "responses.retrieve(id)": "no route GET /v1/responses/resp_1",
        "embeddings.create(...)": "no route POST /v1/embeddings",
        "moderations.create(...)": "no route POST /v1/moderations",
        "images.generate(...)": "no route POST /v1/images/generations",
        "audio.speech.create(...)": "no route POST /v1/audio/speech",
        "files.create(...)": "no route here takes files",
        "batches.create(...)": "no route POST /v1/batches",
        "fine_tuning.jobs.create(...)": "no route POST /v1/fine_tuning/jobs",
    },
    "anthropic": {
        "messages.create(messages=[image])": "'image'",
        "messages.create(thinking={budget_tokens})": "no budget can be enforced",
        "messages.create(tools=[server tools])": "tools.0.type",
        "messages.batches.create(...)": "no route POST /v1/messages/batches",
    },
}
"""By client: the calls that are refused, and what the error says."""

CALLS = {"openai": OPENAI, "anthropic": ANTHROPIC}


def table(client: str) -> str:
    """The table of a client's calls, as docs/server_clients.md has it."""
    refused = REFUSED[client]
    rows = [f"| `{name}` | {f'refused: {refused[name]}' if name in refused else 'works'} |" for name in CALLS[client]]
    return "\n".join([f"| call of `{client}` | here |", "|---|---|", *rows])
