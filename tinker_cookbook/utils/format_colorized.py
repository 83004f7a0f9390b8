"""Tokens on a terminal, coloured by their weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

_RESET = "\033[0m"
_COLORS = {1: "\033[32m", 0: "\033[33m", -1: "\033[31m"}
"""sign of the weight -> green, yellow, red"""


class Decodes(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int]) -> Any: ...


def format_colorized(
    tokens: Sequence[int], weights: Sequence[float], tokenizer: Decodes, draw_newline_arrow: bool = False
) -> str:
    """The text with escape codes: green where weights are positive, yellow where they are 0, red where they are negative.

    Adjacent tokens of one colour are decoded together, so that characters that span tokens stay whole.

    Args:
        draw_newline_arrow: show each line break as an arrow before it.

    Raises:
        ValueError: the numbers of weights and tokens differ.
    """
    if len(tokens) != len(weights):
        raise ValueError(f"there are {len(tokens)} tokens and {len(weights)} weights; each token needs one")
    shown: list[str] = []
    signs = [(weight > 0) - (weight < 0) for weight in weights]
    for sign, run in groupby(zip(tokens, signs, strict=True), key=lambda pair: pair[1]):
        text = str(tokenizer.decode([token for token, _ in run]))
        # Line by line: a colour that continues across a line break would also colour a pager's decorations.
        for line in text.splitlines(keepends=True):
            shown.append(
                f"{_COLORS[sign]}{line.replace(chr(10), '↵' + chr(10)) if draw_newline_arrow else line}{_RESET}"
            )
    return "".join(shown)
