"""Conversations and tools in OpenAI's form, both ways."""

import base64
import json
from pathlib import Path
from typing import Any, cast

import pytest

from tinker_cookbook.audio_processing_utils import audio_part_to_input_audio
from tinker_cookbook.exceptions import DataFormatError, MissingPackageError
from tinker_cookbook.image_processing_utils import image_to_data_uri, resize_image
from tinker_cookbook.renderers.types import AudioPart, Message, ToolCall, ToolSpec, UnparsedToolCall
from tinker_cookbook.third_party.openai_compat import (
    openai_messages_to_tinker,
    openai_tools_to_tinker,
    tinker_messages_to_openai,
    tool_specs_to_openai_tools,
)

CALL = ToolCall(id="c1", function=ToolCall.FunctionBody(name="find", arguments='{"q": "é"}'))
TOOLS: list[ToolSpec] = [
    {"name": name, "description": name.title(), "parameters": {"a": 1}} for name in ("find", "add")
]
CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image", "image": "data:image/png;base64,AA=="}]},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look."}],
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "found", "tool_call_id": "c1", "name": "find"},
]  # fmt: skip


def test_there_and_back() -> None:
    there = tinker_messages_to_openai(CONVERSATION)
    assert "tools" not in there
    assert there["messages"][2] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "id": "c1", "function": {"name": "find", "arguments": '{"q": "é"}'}},
        ],
    }
    assert there["messages"][1]["content"][1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AA=="},
    }
    assert openai_messages_to_tinker(json.loads(json.dumps(there["messages"]))) == CONVERSATION
    assert openai_tools_to_tinker([{"type": "file_search"}, *tool_specs_to_openai_tools(TOOLS)]) == TOOLS


def test_what_only_one_side_has() -> None:
    said = [{"role": "assistant", "content": None, "reasoning_content": "hm"}, {"role": "assistant", "content": None}]
    assert [message["content"] for message in openai_messages_to_tinker(said)] == [
        [{"type": "thinking", "thinking": "hm"}],
        "",
    ]
    thoughts: list[Any] = [{"type": "thinking", "thinking": text} for text in "ab"]
    quiet: Message = {"role": "assistant", "content": thoughts, "trainable": False}
    broken: Message = {**quiet, "unparsed_tool_calls": [UnparsedToolCall(raw_text="x", error="bad")]}
    for message in (quiet, broken):
        assert tinker_messages_to_openai([message])["messages"] == [
            {"role": "assistant", "content": "", "reasoning_content": "a\nb"}
        ]
    calling = tinker_messages_to_openai([{**quiet, "tool_calls": [CALL]}])["messages"][0]
    assert calling["content"] is None


def test_tools_that_a_conversation_declares() -> None:
    tools = tool_specs_to_openai_tools(TOOLS)
    declared: list[Message] = [{"role": "tool_declare", "content": json.dumps(part)} for part in (tools[:1], tools)]
    found = tinker_messages_to_openai([*declared, CONVERSATION[0]])
    assert found == {"messages": [{"role": "system", "content": "Be brief."}], "tools": tools}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "thinking", "thinking": "r"}]}, "only valid on assistant"),
        ({"role": "user", "content": [{"type": "video"}]}, "part type: 'video'"),
        ({"role": "tool_declare", "content": "namespace f {}"}, "JSON list"),
        ({"role": "tool_declare", "content": '[{"function": {}}]'}, "name must be a string"),
        (
            {"role": "tool_declare", "content": '[{"function": {"name": "f"}}, {"function": {"name": "f", "a": 1}}]'},
            "twice",
        ),
    ],
)
def test_what_has_no_form_there_is_refused(message: Any, said: str) -> None:
    with pytest.raises(DataFormatError, match=said):
        tinker_messages_to_openai([message])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": "a", "reasoning_content": "r"}, "only valid on assistant"),
        ({"role": "assistant", "content": "a", "reasoning_content": ["r"]}, "must be a string"),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}]},
            "base64",
        ),
    ],
)
def test_what_has_no_form_here_is_refused(message: Any, said: str) -> None:
    with pytest.raises(DataFormatError, match=said):
        openai_messages_to_tinker([message])


class TestRecordings:
    DATA = base64.b64encode(b"RIFF").decode()

    def test_from_wherever_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "é.wave").write_bytes(b"RIFF")
        path = tmp_path / "é.wave"
        for audio in (b"RIFF", str(path), path.as_uri(), f"data:audio/x-wav;base64,{self.DATA}"):
            part = cast(AudioPart, {"type": "audio", "audio": audio})
            assert audio_part_to_input_audio(part) == {"data": self.DATA, "format": "wav"}
        numbers = {"num_frames": 3, "sample_rate": 8000}
        part = cast(AudioPart, {"type": "audio", "audio": b"RIFF", "format": "mp3", **numbers})
        assert audio_part_to_input_audio(part) == {"data": self.DATA, "format": "mp3", **numbers}
        sent = tinker_messages_to_openai([{"role": "user", "content": [part]}])["messages"]
        assert openai_messages_to_tinker(sent)[0]["content"] == [part]

    @pytest.mark.parametrize(
        ("part", "said"),
        [
            ({"audio": "https://a.example/b.wav"}, "does not fetch remote"),
            ({"audio": "data:audio/wav,RIFF"}, "base64"),
            ({"audio": "data:audio/wav;base64,?"}, "no base64"),
            ({"audio": "data:audio/wav;base64,AA==", "format": "mp3"}, "disagrees"),
            ({"audio": b"", "format": "ogg"}, "must be wav, mp3 or flac"),
            ({"audio": b"", "format": "mp3"}, "must provide num_frames and sample_rate"),
            ({"audio": b"", "num_frames": 1}, "must provide num_frames and sample_rate"),
            ({"audio": b"", "num_frames": 0, "sample_rate": 1}, "must be positive"),
            ({"audio": 3}, "bytes or a text"),
        ],
    )
    def test_bad_ones_are_refused(self, part: Any, said: str) -> None:
        with pytest.raises(DataFormatError, match=said):
            audio_part_to_input_audio({"type": "audio", **part})  # pyright: ignore[reportArgumentType]


class TestImages:
    def test_nothing_is_fetched_and_addresses_pass(self) -> None:
        with pytest.raises(DataFormatError, match="does not fetch remote"):
            image_to_data_uri("https://a.example/b.png")
        with pytest.raises(DataFormatError, match="got int"):
            image_to_data_uri(cast(Any, 3))
        remote: Message = {"role": "user", "content": [{"type": "image", "image": "https://a.example/b.png"}]}
        (sent,) = tinker_messages_to_openai([remote])["messages"]
        assert sent["content"][0]["image_url"]["url"] == "https://a.example/b.png"

    def test_files_need_pillow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "PIL", None)
        with pytest.raises(MissingPackageError, match="pip install pillow"):
            image_to_data_uri(str(tmp_path / "a.png"))

    def test_an_image_is_written_and_made_smaller(self, tmp_path: Path) -> None:
        pillow = pytest.importorskip("PIL.Image")
        image = pillow.new("RGBA", (40, 10), (255, 0, 0, 255))
        image.save(tmp_path / "a.png")
        for form in (image, str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri()):
            assert image_to_data_uri(form).startswith("data:image/jpeg;base64,/9j/")
        assert resize_image(image, 20).size == (20, 5)
        assert resize_image(image, 40) is image
