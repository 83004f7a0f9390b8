"""Samplers whose logprobs are a function of the text, for environments that ask the model about itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tinker
from hypothesis import strategies as st

from tests.debate.arena import TINY
from tinker_cookbook.rl.run_clients import Shared
from tinker_cookbook.tokenizer_utils import get_tokenizer

HUGE = 200_000
"""Characters of the longest replies that are tried."""
FOREIGN = st.text(st.characters(min_codepoint=0x0660, max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=30)
"""Other scripts: Arabic and Devanagari digits, Chinese, full-width letters."""


@dataclass
class Listener:
    """Gives every token of a text the same logprob, which `score` tells from the whole text.

    Attributes:
        heard: the texts that it was asked about.
    """

    score: Callable[[str], float]
    heard: list[str] = field(default_factory=list)

    def read(self, prompt: tinker.ModelInput) -> str:
        """The text of a prompt."""
        self.heard.append(str(get_tokenizer(TINY).decode(prompt.to_ints())))
        return self.heard[-1]

    async def compute_logprobs(self, prompt: tinker.ModelInput) -> list[float | None]:
        text = self.read(prompt)
        return [None] + [self.score(text)] * (prompt.length - 1)


def info_of(sampler: Any, **own: Any) -> dict[str, Any]:
    """What a reward function is told by a group of its own."""
    shared = Shared()
    return {"sampling_client": sampler, "tokenizer": get_tokenizer(TINY), "run": shared, "group": shared, **own}
