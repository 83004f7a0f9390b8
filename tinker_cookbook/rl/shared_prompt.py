"""The first prompt of a group's members, rendered once."""

from __future__ import annotations

import copy

from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.utils.lazy import tinker


class SharedPrompt:
    """A prompt that the members of a group render once, as long as they show the same conversation."""

    def __init__(self) -> None:
        self._rendered: tuple[Renderer, list[Message], tinker.ModelInput] | None = None

    def render(self, renderer: Renderer, messages: list[Message]) -> tinker.ModelInput:
        """The prompt for a reply to these messages."""
        if self._rendered is None or self._rendered[0] is not renderer or self._rendered[1] != messages:
            # A copy, because an env may change its messages later.
            self._rendered = renderer, copy.deepcopy(messages), renderer.build_generation_prompt(messages)
        return self._rendered[2]
