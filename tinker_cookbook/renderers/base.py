"""Re-exports the parts of the renderers that scripts import from here."""

from tinker_cookbook.renderers.content import PARSE_FAILURE_DETAIL_MAX_CHARS as PARSE_FAILURE_DETAIL_MAX_CHARS
from tinker_cookbook.renderers.content import UNTERMINATED_TOOL_BLOCK_ERROR as UNTERMINATED_TOOL_BLOCK_ERROR
from tinker_cookbook.renderers.content import classify_parse_failure as classify_parse_failure
from tinker_cookbook.renderers.content import content_to_jsonable as content_to_jsonable
from tinker_cookbook.renderers.content import detect_unterminated_tool_block as detect_unterminated_tool_block
from tinker_cookbook.renderers.content import ensure_list as ensure_list
from tinker_cookbook.renderers.content import ensure_text as ensure_text
from tinker_cookbook.renderers.content import format_content_as_string as format_content_as_string
from tinker_cookbook.renderers.content import get_text_content as get_text_content
from tinker_cookbook.renderers.content import has_thinking as has_thinking
from tinker_cookbook.renderers.content import message_to_jsonable as message_to_jsonable
from tinker_cookbook.renderers.content import parse_content_blocks as parse_content_blocks
from tinker_cookbook.renderers.content import parse_think_blocks as parse_think_blocks
from tinker_cookbook.renderers.content import remove_thinking as remove_thinking
from tinker_cookbook.renderers.decoding import Utf8TokenDecoder as Utf8TokenDecoder
from tinker_cookbook.renderers.decoding import (
    tokens_weights_from_strings_weights as tokens_weights_from_strings_weights,
)
from tinker_cookbook.renderers.renderer import RenderContext as RenderContext
from tinker_cookbook.renderers.renderer import RenderedMessage as RenderedMessage
from tinker_cookbook.renderers.renderer import Renderer as Renderer
from tinker_cookbook.renderers.replies import parse_response_for_stop_token as parse_response_for_stop_token
from tinker_cookbook.renderers.streaming import ReasoningStreamingParser as ReasoningStreamingParser
from tinker_cookbook.renderers.streaming import StreamingParser as StreamingParser
from tinker_cookbook.renderers.types import AudioPart as AudioPart
from tinker_cookbook.renderers.types import Content as Content
from tinker_cookbook.renderers.types import ContentPart as ContentPart
from tinker_cookbook.renderers.types import ImagePart as ImagePart
from tinker_cookbook.renderers.types import Message as Message
from tinker_cookbook.renderers.types import MessageDelta as MessageDelta
from tinker_cookbook.renderers.types import ParseFailureKind as ParseFailureKind
from tinker_cookbook.renderers.types import ParseTermination as ParseTermination
from tinker_cookbook.renderers.types import Role as Role
from tinker_cookbook.renderers.types import StreamingMessageHeader as StreamingMessageHeader
from tinker_cookbook.renderers.types import StreamingTextDelta as StreamingTextDelta
from tinker_cookbook.renderers.types import StreamingThinkingDelta as StreamingThinkingDelta
from tinker_cookbook.renderers.types import StrictBase as StrictBase
from tinker_cookbook.renderers.types import TextPart as TextPart
from tinker_cookbook.renderers.types import ThinkingPart as ThinkingPart
from tinker_cookbook.renderers.types import ToolCall as ToolCall
from tinker_cookbook.renderers.types import ToolSpec as ToolSpec
from tinker_cookbook.renderers.types import TrainOnWhat as TrainOnWhat
from tinker_cookbook.renderers.types import UnparsedToolCall as UnparsedToolCall
from tinker_cookbook.tokenizer_utils import Tokenizer as Tokenizer
