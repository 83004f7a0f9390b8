"""The renderer of a served model's chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models.info import get_recommended_renderer_names
from tinker_cookbook.models.renderer import RENDERER_NAME_METADATA_KEY
from tinker_cookbook.plugins import full_reference, is_reference, load_object
from tinker_cookbook.renderers import known_renderer_names
from tinker_cookbook.renderers.registry import RENDERER_KIND
from tinker_cookbook.serving.chat_format import RendererFormat
from tinker_cookbook.tokenizer_utils import Tokenizer

RENDERER, TEMPLATE = "renderer", "template"


class ServedFormats:
    """The chat formats of a server's models.

    Args:
        chat: "renderer": the checkpoint's renderer, else the one recommended for its base model, else the chat template.
            "template": the chat template. Otherwise the name of a renderer (as `renderer_name` of recipes), for all models.

    Raises ConfigurationError for an unknown name, and for a file or module without a renderer.
    """

    def __init__(self, chat: str = RENDERER) -> None:
        if chat not in (RENDERER, TEMPLATE, *known_renderer_names()) and not is_reference(chat):
            raise ConfigurationError(
                f"chat={chat!r} is unknown; choose {RENDERER}, {TEMPLATE}, or a renderer: {', '.join(known_renderer_names())}"
            )
        if is_reference(chat):
            chat = full_reference(chat)
            RENDERER_KIND.check(load_object(RENDERER_KIND, chat), repr(chat))
        self._chat = chat
        self._offered: dict[str, Sequence[str]] = {}
        self._made: dict[tuple[str, str], RendererFormat] = {}

    def name_of(self, model: str, user_metadata: Mapping[str, str]) -> str | None:
        """The renderer of a base model, or of a checkpoint of it with this metadata; None: the tokenizer's chat template.

        Raises ValueError for a checkpoint trained with a custom renderer, whose file is only loaded if `chat` names it.
        """
        if self._chat != RENDERER:
            return None if self._chat == TEMPLATE else self._chat
        recorded = user_metadata.get(RENDERER_NAME_METADATA_KEY)
        if recorded is None:
            return next(iter(self._names_for(model)), None)
        if recorded not in known_renderer_names():
            raise ValueError(
                f"this checkpoint was trained with the renderer {recorded!r:.200}, which the server loads only if it is started "
                "with chat=<that renderer>; or use /v1/completions with token ids"
            )
        return recorded

    def make(self, model: str, tokenizer: Tokenizer, user_metadata: Mapping[str, str]) -> RendererFormat | None:
        """The format of `name_of`. Raises ValueError as there, and if the tokenizer lacks a token of the format."""
        name = self.name_of(model, user_metadata)
        if name is None:
            return None
        if (model, name) not in self._made:
            self._made[model, name] = RendererFormat.of(name, tokenizer, model, self._names_for(model))
        return self._made[model, name]

    def _names_for(self, model: str) -> Sequence[str]:
        """The renderers that fit a base model; empty if none is known."""
        if model not in self._offered:
            try:
                names = get_recommended_renderer_names(model)
            except ConfigurationError:
                names = []
            self._offered[model] = [name for name in names if name in known_renderer_names()]
        return self._offered[model]
