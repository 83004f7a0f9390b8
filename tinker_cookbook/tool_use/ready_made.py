"""Tools that are ready to use: exact arithmetic, and a search over a small local collection (extra: search)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tinker_cookbook.data.rows import read_file
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.tool_use.tools import FunctionTool, ToolError
from tinker_cookbook.utils.arithmetic import ExpressionError, evaluate, format_number
from tinker_cookbook.utils.extras import install_command
from tinker_cookbook.utils.misc_utils import concat_lists

MAX_QUERY = 200


def calculate(expression: Annotated[str, "numbers, + - * / // % ** and parentheses"]) -> str:
    """Compute an arithmetic expression."""
    try:
        return format_number(evaluate(expression))
    except ExpressionError as error:
        raise ToolError(str(error)) from None


class ArticleSearch:
    """Articles in memory with a word index (BM25). `tool()` makes the tool for a policy.

    Args:
        articles: the texts.
        max_characters: maximum length of a shown article; longer ones are truncated and end in dots. None: no limit.

    Raises:
        ConfigurationError: no articles, or the package bm25s is not installed.
    """

    def __init__(self, articles: Sequence[str], max_characters: int | None = None):
        if not articles:
            raise ConfigurationError("articles is empty: there is nothing to search")
        self.articles, self.max_characters = list(articles), max_characters
        self._bm25s = _bm25s()
        self._index = self._bm25s.BM25()
        self._index.index(self._words(self.articles), show_progress=False)

    @classmethod
    def from_jsonl(cls, *paths: str | Path, max_characters: int | None = None) -> ArticleSearch:
        """From files with a key `article` per line. Raises DataFormatError naming the file and line that lacks it."""
        expected = '{"article": "..."}'
        articles = [read_file(path, lambda row: row.text("article"), expected) for path in paths]
        return cls(concat_lists(articles), max_characters)

    def find(self, query: str, k: int = 1) -> list[str]:
        """The `k` best articles that share a word with the query, best first; of equally good ones, the earlier first."""
        words = self._words([query], return_ids=False)[0]
        if not words:
            return []
        scores = self._index.get_scores(words)
        order = sorted(range(len(self.articles)), key=lambda i: (-scores[i], i))
        return [self.articles[i] for i in order[:k] if scores[i] > 0]

    def tool(self) -> FunctionTool:
        def search(query: Annotated[str, "words that the article should have"]) -> str:
            """Find the news article that fits best."""
            if len(query) > MAX_QUERY:
                raise ToolError(f"the query has {len(query)} characters; at most {MAX_QUERY} are allowed")
            articles = self.find(query)
            if not articles:
                return "No article has any of these words."
            limit = self.max_characters
            return articles[0] if limit is None or len(articles[0]) <= limit else articles[0][:limit] + "..."

        return FunctionTool(search)

    def _words(self, texts: Sequence[str], **options: Any) -> Any:
        return self._bm25s.tokenize(list(texts), stopwords="en", show_progress=False, **options)


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigurationError(f"search needs the package bm25s: {install_command('search')}") from error
    return bm25s
