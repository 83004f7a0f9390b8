"""Kimi-K2.6 with the preserve_thinking of its template: the reasoning of every answer stays in history."""

from tinker_cookbook.renderers.images import ImageProcessorProtocol
from tinker_cookbook.renderers.kimi_k25 import KimiK25Renderer
from tinker_cookbook.tokenizer_utils import Tokenizer


class KimiK26PreserveThinkingRenderer(KimiK25Renderer):
    """Kimi-K2.6 with reasoning kept in history, so that prompts extend each other."""

    def __init__(self, tokenizer: Tokenizer, image_processor: ImageProcessorProtocol | None = None) -> None:
        super().__init__(tokenizer, image_processor, strip_thinking_from_history=False)
