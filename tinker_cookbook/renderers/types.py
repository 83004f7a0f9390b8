"""The types of chat: messages, their parts, tool calls, and the two enums that a renderer's callers use.

Plain data only. renderer.py and the family files convert messages to tokens; content.py parses content.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from PIL.Image import Image

Role: TypeAlias = str
"""system, user, assistant or tool; docs/renderers.md describes how others are rendered."""


class TextPart(TypedDict):
    """Plain text."""

    type: Literal["text"]
    text: str


class ThinkingPart(TypedDict):
    """Reasoning, without the tags that delimit it in the model's format."""

    type: Literal["thinking"]
    thinking: str


class ImagePart(TypedDict):
    """An image, for vision models."""

    type: Literal["image"]
    image: "str | Image"
    """A file path, a file:// address, a data URI, or an image of Pillow; for services also a URL."""


class AudioPart(TypedDict):
    """A recording, for audio models."""

    type: Literal["audio"]
    audio: str | bytes
    """Encoded bytes, a URL, a file path or a data URI."""
    format: NotRequired[Literal["wav", "mp3", "flac"]]
    num_frames: NotRequired[int]
    sample_rate: NotRequired[int]
    """per second"""


ContentPart: TypeAlias = TextPart | ThinkingPart | ImagePart | AudioPart
Content: TypeAlias = str | list[ContentPart]


class StrictBase(BaseModel):
    """An immutable model that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolCall(StrictBase):
    """A call requested by the model. `arguments` is the model's unchanged JSON text, so that it can be rendered again."""

    class FunctionBody(StrictBase):
        name: str
        arguments: str

    type: Literal["function"] = "function"
    id: str | None = None
    function: FunctionBody


class UnparsedToolCall(StrictBase):
    """A tool call block that could not be parsed: its unchanged text, including tags, and the reason."""

    raw_text: str
    error: str


class ToolSpec(TypedDict):
    """A tool as declared to the model; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, object]


class Message(TypedDict):
    """One message of a conversation: `role` and `content`, and other keys where they apply."""

    role: Role
    content: Content
    tool_calls: NotRequired[list[ToolCall]]
    unparsed_tool_calls: NotRequired[list[UnparsedToolCall]]
    trainable: NotRequired[bool]
    """Required on every message with TrainOnWhat.CUSTOMIZED, forbidden otherwise."""
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class TrainOnWhat(StrEnum):
    """Which tokens of a conversation have weight in a supervised example."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    """The assistant message that ends the conversation."""
    LAST_ASSISTANT_TURN = "last_assistant_turn"
    """Every assistant message after the last user message: a turn with tool calls has several."""
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    ALL_MESSAGES = "all_messages"
    ALL_TOKENS = "all_tokens"
    ALL_USER_AND_SYSTEM_MESSAGES = "all_user_and_system_messages"
    CUSTOMIZED = "customized"
    """The messages whose key `trainable` is True."""


class ParseTermination(StrEnum):
    """How a sampled response ended. Every member is truthy: use `.is_clean`, never `if termination`."""

    STOP_SEQUENCE = "stop_sequence"
    EOS = "eos"
    MALFORMED = "malformed"

    @property
    def is_clean(self) -> bool:
        """The model ended the message itself, by the stop sequence or by its end-of-text token."""
        return self is not ParseTermination.MALFORMED

    @property
    def is_stop_sequence(self) -> bool:
        return self is ParseTermination.STOP_SEQUENCE


class ParseFailureKind(StrEnum):
    """Why a response is not a usable message."""

    STRUCTURAL = "structural"
    """It did not end cleanly (cut off): a retry with the same budget would not help."""
    CONTENT = "content"
    """It ended cleanly, but has a tool call that cannot be parsed: a corrective message may help."""


@dataclass(frozen=True)
class StreamingMessageHeader:
    """First item of a stream: the speaker."""

    role: Role


@dataclass(frozen=True)
class StreamingTextDelta:
    """More of the reply's text."""

    text: str


@dataclass(frozen=True)
class StreamingThinkingDelta:
    """More of the reply's reasoning."""

    thinking: str


MessageDelta: TypeAlias = StreamingMessageHeader | StreamingTextDelta | StreamingThinkingDelta | Message
"""A stream is one header, then deltas, then the whole Message as parse_response would return it."""
