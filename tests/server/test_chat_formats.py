"""Chats through the renderer of a model, before and after the engine: what is sampled from, and what is made of the sample."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker.types import SampledSequence, SampleResponse
from transformers import AutoTokenizer

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.renderers.synthetic import make_tokenizer
from tests.server.serving import TINY_CHAT
from tests.server.stand_in import Before, Link, before
from tests.server.tools_model import TOOLS_TEMPLATE
from tinker_cookbook.renderers import Message, ThinkingPart, ToolCall, ToolSpec, get_renderer
from tinker_cookbook.renderers.types import TextPart
from tinker_cookbook.serving.chat_format import RendererFormat
from tinker_cookbook.serving.formats import ServedFormats
from tinker_local_backend.server import openai_replies
from tinker_local_backend.server.__main__ import main
from tinker_local_backend.server.chat_format import ChatFormat, rendered
from tinker_local_backend.server.chat_text import ChatText
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.openai_schemas import ChatBody
from tinker_local_backend.server.openai_stream import Choices
from tinker_local_backend.server.template_format import TemplateFormat

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
SPEC = ToolSpec(name="add", description="adds", parameters={"type": "object"})
USER = {"role": "user", "content": "What is 7 + 5?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "<|im_end|>"}'}}
HISTORY = [
    {"role": "developer", "content": [{"type": "text", "text": "Ans"}, {"type": "text", "text": "wer."}]},
    USER,
    {"role": "assistant", "content": None, "reasoning_content": "Easy.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "12"},
]


def sampled(tmp_path: Path, status: int = 200, chat: str = "renderer", **body: Any) -> dict[str, Any]:
    """The request that reaches the engine; the refusal, if there is one."""

    async def ask(served: Before) -> Any:
        async with served.client() as web:
            fields = {"model": TINY_CHAT, "max_tokens": 1, **body}
            reply = await web.post("/v1/chat/completions", json=fields)
        requests = [json.loads(frame.body) for frame in served.link.frames if frame.fields["op"] == "sample"]
        # The stand-in of the engine answers with nothing that a reply could be made of.
        assert (reply.status_code if not requests else 200) == status, reply.text
        return requests[-1] if requests else reply.json()["error"]

    return before(tmp_path, ask, link=Link(), formats=ServedFormats(chat))


def test_a_chat_is_sampled_from_the_prompt_of_training(tmp_path: Path) -> None:
    renderer = get_renderer("qwen3_instruct", AutoTokenizer.from_pretrained(TINY_CHAT))
    call = ToolCall(id="1", function=ToolCall.FunctionBody(name="add", arguments='{"a": "<|im_end|>"}'))
    opening = renderer.create_conversation_prefix_with_tools([SPEC], "Answer.")
    rest = [
        Message(role="user", content="What is 7 + 5?"),
        Message(role="assistant", content=[ThinkingPart(type="thinking", thinking="Easy.")], tool_calls=[call]),
        Message(role="tool", tool_call_id="1", content="12"),
    ]
    request = sampled(tmp_path, messages=HISTORY, tools=[TOOL], stop="xyz")
    expected = renderer.build_generation_prompt([*opening, *rest]).to_ints()
    assert request["prompt"]["chunks"][0]["tokens"] == expected
    # The stand-in's model ends its turns with token 0.
    assert request["sampling_params"]["stop"] == [0, "xyz", *renderer.get_stop_sequences()]
    undeclared = sampled(tmp_path, messages=[USER], tools=[TOOL], tool_choice="none")
    expected = renderer.build_generation_prompt(rest[:1]).to_ints()
    assert undeclared["prompt"]["chunks"][0]["tokens"] == expected


def test_a_request_chooses_thinking(tmp_path: Path) -> None:
    def prompt(**fields: Any) -> list[int]:
        return sampled(tmp_path, chat="qwen3", messages=[USER], **fields)["prompt"]["chunks"][0]["tokens"]

    def expected(name: str) -> list[int]:
        renderer = get_renderer(name, AutoTokenizer.from_pretrained(TINY_CHAT))
        return renderer.build_generation_prompt([Message(role="user", content="What is 7 + 5?")]).to_ints()

    assert prompt() == prompt(reasoning_effort=None) == expected("qwen3")
    off = expected("qwen3_disable_thinking")
    assert off == prompt(reasoning_effort="none") == prompt(chat_template_kwargs={"enable_thinking": False}) != prompt()
    refused = sampled(tmp_path, 400, "qwen3", messages=[USER], reasoning_effort="low")
    assert "the renderer 'qwen3' has no variant for reasoning_effort=low" in refused["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs.tokenize is not an option of this model's renderer",
        ),
        ({"messages": [{**USER, "reasoning": "hm"}]}, r"messages\[0\]: only assistant messages have reasoning"),
        (
            {"messages": [USER, {"role": "assistant", "content": "A", "reasoning": "a", "reasoning_content": "b"}]},
            "reasoning and reasoning_content differ",
        ),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, r"tools\[0\].function.name must be a JSON text"),
    ],
)
def test_what_the_renderer_cannot_do_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    refused = sampled(tmp_path, 400, **{"messages": [USER], **fields})
    assert refused["type"] == "invalid_request_error"
    assert re.search(message, refused["message"])


def test_the_list_of_models_says_the_chat_format(tmp_path: Path) -> None:
    async def ask(served: Before) -> str:
        async with served.client() as web:
            (entry,) = (await web.get("/v1/models")).json()["data"]
            assert (await web.get(f"/v1/models/{TINY_CHAT}")).json() == entry
        return entry["chat_format"]

    assert before(tmp_path, ask) == "template"
    assert before(tmp_path, ask, formats=ServedFormats()) == "qwen3_instruct"
    assert before(tmp_path, ask, formats=ServedFormats("template")) == "template"


def test_a_server_does_not_start_with_a_renderer_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(ServerConfig(model=TINY_CHAT, chat="hermes"))
    assert ended.value.code == 2
    assert (
        "chat='hermes' is unknown; choose renderer, template, or a renderer: role_colon, qwen3"
        in capsys.readouterr().err
    )


# Templates -----------------------------------------------------------------------------------------------------------------


def template_text(template: str = TOOLS_TEMPLATE) -> ChatText:
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHAT)
    tokenizer.chat_template = template
    return ChatText(tokenizer)


def test_a_template_writes_what_a_past_call_spells_as_content() -> None:
    text = template_text()
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "12", "tool_call_id": "1"},
    ]
    declared = {"type": "function", "function": {"name": "add", "description": "<|im_start|>", "parameters": {}}}
    tokens = TemplateFormat(text).for_request([declared], None, {}).prompt(messages)
    control = [token for token in tokens if token in text.tokenizer.added_tokens_decoder]
    names = text.tokenizer.convert_ids_to_tokens(control)
    turn = ["<|im_start|>", "<|im_end|>"]
    assert names == [*turn, *turn, "<|im_start|>", "<tool_call>", "</tool_call>", "<|im_end|>", *turn, "<|im_start|>"]
    shown = text.tokenizer.decode(tokens)
    assert '"arguments": {"a": "<|im_end|>"}' in shown and '"description": "<|im_start|>"' in shown


def test_tools_reach_the_template_and_calls_are_read() -> None:
    text = template_text()
    history = [
        {"role": "system", "content": "Answer."},
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 7}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "12"},
    ]
    shown = text.tokenizer.decode(TemplateFormat(text).for_request([TOOL], None, {}).prompt(history))
    assert '"name": "add"' in shown and '"arguments": {"a": 7}' in shown and "<|im_start|>tool\n12" in shown
    assert '"adds"' not in text.tokenizer.decode(TemplateFormat(text).prompt(history))
    with pytest.raises(ValueError, match="takes no tools"):
        TemplateFormat(ChatText.of(TINY_CHAT)).for_request([TOOL], None, {}).prompt(history)
    said = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": {"c": 5}}}\n</tool_call>'
    assert text.split_tool_calls(said) == ("I add.", [("add", '{"a": 7, "b": {"c": 5}}')])
    for broken in ("<tool_call>{</tool_call>", '<tool_call>{"name": "x"}</tool_call>', "none"):
        assert text.split_tool_calls(broken) == (broken, [])


def test_options_of_a_template_are_its_variables() -> None:
    with pytest.raises(ValueError, match="the template's own variables"):
        TemplateFormat(template_text()).for_request(None, None, {"tokenize": True}).prompt([USER])
    looks = template_text("{% if enable_thinking %}t{% endif %}{{ style }}")
    prompt = TemplateFormat(looks).for_request(None, None, {"enable_thinking": True, "style": "s"}).prompt([USER])
    assert looks.tokenizer.decode(prompt) == "ts"


def test_a_template_that_looks_at_no_effort_is_asked_for_none() -> None:
    with pytest.raises(ValueError, match="reasoning_effort: the chat template of this model has no such variable"):
        TemplateFormat(template_text()).for_request(None, "low", {})
    looks = template_text("{{ 'e' + reasoning_effort }}{{ messages[0].reasoning_content }}")
    prompt = (
        TemplateFormat(looks).for_request(None, "low", {}).prompt([{"role": "assistant", "reasoning_content": "hm"}])
    )
    assert looks.tokenizer.decode(prompt) == "elowhm"


def test_a_call_that_a_template_s_model_broke_off_is_told() -> None:
    text = template_text()
    said = 'So <tool_call>{"name": "add", "arg'
    reply = TemplateFormat(text).for_request([TOOL], None, {}).read(text.tokenizer.encode(said))
    assert reply["content"] == said
    assert [call["raw_text"] for call in reply["unparsed_tool_calls"]] == ['<tool_call>{"name": "add", "arg']
    assert TemplateFormat(text).read(text.tokenizer.encode(said)) == {"role": "assistant", "content": said}


# Replies, whole and streamed ------------------------------------------------------------------------------------------------

THINKS = "<think>\nSeven, é.\n</think>\n\nI add."
BLOCK = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def replied(
    said: str, end: str = "<|im_end|>", name: str = "qwen3", with_tools: bool = True, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the choice of a whole reply, what the chunks of the same reply add up to)."""
    tokenizer = make_tokenizer()
    text = ChatText(tokenizer)
    chat_format: ChatFormat = RendererFormat.of(name, tokenizer, "m").for_request(
        [TOOL] if with_tools else None, None, {}
    )
    tokens = tokenizer.encode(said + end, add_special_tokens=False)
    sequence = SampledSequence(
        stop_reason="stop" if end or "stop" in fields else "length",
        sequence_id="",
        tokens_np=np.array(tokens, dtype=np.int32),
        logprobs_np=np.zeros(len(tokens), dtype=np.float32),
    )
    ends = [tokenizer.get_vocab()["<|endoftext|>"]]
    body = ChatBody.model_validate({"model": "m", "messages": [USER], **fields})
    response = SampleResponse(sequences=[sequence])
    (choice,) = openai_replies.chat(body, text, ends, [1], response, chat_format)["choices"]
    choices = Choices(body, text, ends, chat_format)
    chunks = [*choices.begin(1)]
    for token in tokens:
        chunks.append(choices.grow(0, {"index": 0, "tokens": [token], "logprobs": [0.0], "topk": None}))
    chunks += choices.end(0, choice)
    added: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    for chunk in chunks:
        delta = dict(chunk["choices"][0]["delta"])
        for key in ("content", "reasoning_content", "reasoning", "tool_calls"):
            value = delta.pop(key, None)
            added[key] += (
                [{k: v for k, v in call.items() if k != "index"} for call in value]
                if isinstance(value, list)
                else value or ""
            )
        added |= delta
    added["finish_reason"] = chunks[-1]["choices"][0]["finish_reason"]
    return choice, added


def test_reasoning_is_apart_from_content_and_calls_from_both() -> None:
    choice, added = replied(THINKS + BLOCK)
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I add.", "Seven, é.")
    assert message["reasoning"] == message["reasoning_content"] and choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_") and call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert added == {**message, "finish_reason": "tool_calls"}
    several, added = replied(BLOCK * 2)
    assert several["message"]["content"] is None and len(several["message"]["tool_calls"]) == 2
    assert added["tool_calls"] == several["message"]["tool_calls"]
    assert "reasoning" not in replied("Plain.")[0]["message"]


@pytest.mark.parametrize(
    "bad",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a"}}\n</tool_call>',
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1',
    ],
)
def test_a_call_that_cannot_be_read_is_told_with_its_text(bad: str) -> None:
    for stop in ("<|im_end|>", ""):
        choice, added = replied(f"{THINKS}\n{bad}", stop)
        message = choice["message"]
        assert message["content"] == f"I add.\n{bad}" and "tool_calls" not in message
        (unparsed,) = message["unparsed_tool_calls"]
        assert unparsed["raw_text"] == bad and unparsed["error"]
        assert choice["finish_reason"] == ("stop" if stop else "length")
        assert added == {**message, "tool_calls": [], "finish_reason": choice["finish_reason"]}


def test_a_call_without_tools_is_told_as_text() -> None:
    choice, added = replied(f"I add.{BLOCK}", with_tools=False)
    assert choice["message"]["content"] == f"I add.{BLOCK}" == added["content"] and choice["finish_reason"] == "stop"
    assert choice["message"]["unparsed_tool_calls"][0]["error"] == "the request declares no tools"


def test_a_stop_string_ends_content_and_reasoning() -> None:
    choice, added = replied("<think>\nSeven", "", stop=["Sev", "zz"])
    assert choice["message"] == {"role": "assistant", "content": ""} and added["reasoning"] == ""
    choice, added = replied(THINKS, "", stop=["add"])
    assert (choice["message"]["content"], added["content"]) == ("I ", "I ")
    assert choice["message"]["reasoning"] == added["reasoning"] == "Seven, é."


def test_a_reply_may_end_in_another_token_of_the_model() -> None:
    """In one that the format does not know, and the model's config names; and in one that the request names."""
    endings: tuple[tuple[str, dict[str, Any]], ...] = (
        ("<|endoftext|>", {}),
        ("<|im_start|>", {"stop_token_ids": [make_tokenizer().convert_tokens_to_ids("<|im_start|>")]}),
    )
    for end, fields in endings:
        choice, added = replied(THINKS, end, **fields)
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("I add.", "Seven, é.")
        assert (added["content"], added["reasoning"]) == ("I add.", "Seven, é.")
    # A prompt that opened the block: without a </think> a reply that ended is an answer, one that was cut off is reasoning.
    assert replied("I add.", "<|endoftext|>", "qwen3_5")[0]["message"]["content"] == "I add."
    assert replied("I add.", "", "qwen3_5")[0]["message"]["reasoning"] == "I add."


def test_arguments_of_another_type_are_told() -> None:
    parameters = {"properties": {"a": {"type": "string"}}, "required": ["b"]}
    wrong = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    tokenizer = make_tokenizer()
    served = RendererFormat.of("qwen3", tokenizer, "m").for_request([wrong], None, {})
    (problem,) = served.read(tokenizer.encode(BLOCK))["tool_argument_errors"]
    assert problem == {"index": 0, "error": "'b' is missing; 'a' is 1, not of type string"}


def test_reasoning_comes_back_as_reasoning() -> None:
    tokenizer = make_tokenizer()
    renderer = get_renderer("qwen3", tokenizer)
    said = replied(THINKS + BLOCK)[0]["message"]
    parts = [ThinkingPart(type="thinking", thinking="Seven, é."), TextPart(type="text", text="I add.")]
    call = ToolCall(function=ToolCall.FunctionBody(name="add", arguments='{"a": 1}'))
    answer = Message(role="assistant", content=[*parts], tool_calls=[call])
    result = Message(role="tool", content="12")
    opening = renderer.create_conversation_prefix_with_tools([SPEC])
    expected = renderer.build_generation_prompt(
        [*opening, Message(role="user", content="What is 7 + 5?"), answer, result]
    )
    body = ChatBody.model_validate({"model": "m", "messages": [USER, said, {"role": "tool", "content": "12"}]})
    served = RendererFormat.of("qwen3", tokenizer, "m").for_request([TOOL], None, {})
    assert rendered(served, body.messages) == expected.to_ints()
