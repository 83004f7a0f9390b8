"""Quotes checked against the article and marked for the judge (Khan et al. 2024), so that a debater cannot make them
up.

A debater writes <quote>...</quote>. The judge sees <v_quote> if the article contains these words, else <u_quote>. Tags
that a debater forges are treated as any other quote.
"""

import re
from dataclasses import dataclass

QUOTE_REQUEST = "Quote the text between <quote> and </quote>, word for word; the judge is told which quotes are true."

_QUOTE = re.compile(r"<(?:[vu]_)?quote>(.*?)</(?:[vu]_)?quote>", re.DOTALL)
_STRAY = re.compile(r"</?(?:[vu]_)?quote>")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class MarkedText:
    """A speech with its quotes marked, and the number of verified ones."""

    text: str
    verified: int
    total: int


def mark_quotes(text: str, article: str) -> MarkedText:
    """Mark each quote as <v_quote> if the article contains its words in this order and adjacent, else as <u_quote>.

    Case, punctuation and white space are ignored; a quote without words is not verified. Unpaired tags are dropped.
    """
    known = f" {' '.join(_words(article))} "
    counts, parts, end = [0, 0], list[str](), 0
    for match in _QUOTE.finditer(text):
        inner = _without_tags(match.group(1))
        words = _words(inner)
        verified = bool(words) and f" {' '.join(words)} " in known
        counts[0] += verified
        counts[1] += 1
        tag = "v_quote" if verified else "u_quote"
        parts += [_without_tags(text[end : match.start()]), f"<{tag}>{inner}</{tag}>"]
        end = match.end()
    return MarkedText("".join([*parts, _without_tags(text[end:])]), *counts)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _without_tags(text: str) -> str:
    """Removing a tag can create another one from the text around it."""
    while _STRAY.search(text):
        text = _STRAY.sub("", text)
    return text
