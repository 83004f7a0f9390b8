"""Quotes that were checked against the article, marked for the judge (Khan et al. 2024): a debater cannot make them up.

A debater writes <quote>...</quote>. The judge reads <v_quote> where the article has these words, and <u_quote> where not.
Tags that a debater forges are marked anew like any other.
"""

import re
from dataclasses import dataclass

QUOTE_REQUEST = "Quote the text between <quote> and </quote>, word for word; the judge is told which quotes are true."

_QUOTE = re.compile(r"<(?:[vu]_)?quote>(.*?)</(?:[vu]_)?quote>", re.DOTALL)
_STRAY = re.compile(r"</?(?:[vu]_)?quote>")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class MarkedText:
    """A speech with its quotes marked, and how many of them are true."""

    text: str
    verified: int
    total: int


def mark_quotes(text: str, article: str) -> MarkedText:
    """Each quote as <v_quote> when its words stand in the article in this order, next to each other, else as <u_quote>.

    Case, punctuation and white space do not count; a quote without words is not true. Tags without a partner are dropped.
    """
    known = f" {' '.join(_words(article))} "
    counts, parts, end = [0, 0], list[str](), 0
    for found in _QUOTE.finditer(text):
        inner = _without_tags(found.group(1))
        words = _words(inner)
        verified = bool(words) and f" {' '.join(words)} " in known
        counts[0] += verified
        counts[1] += 1
        tag = "v_quote" if verified else "u_quote"
        parts += [_without_tags(text[end : found.start()]), f"<{tag}>{inner}</{tag}>"]
        end = found.end()
    return MarkedText("".join([*parts, _without_tags(text[end:])]), *counts)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _without_tags(text: str) -> str:
    """Dropping a tag can leave another one, put together of what stood around it."""
    while _STRAY.search(text):
        text = _STRAY.sub("", text)
    return text
