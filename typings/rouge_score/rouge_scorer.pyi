# What we use: the package has no types of its own.

from collections.abc import Mapping, Sequence
from typing import Protocol

class _Score(Protocol):
    fmeasure: float

class _Tokenizer(Protocol):
    def tokenize(self, text: str) -> list[str]: ...

class RougeScorer:
    def __init__(
        self, rouge_types: Sequence[str], use_stemmer: bool = ..., *, tokenizer: _Tokenizer | None = ...
    ) -> None: ...
    def score(self, target: str, prediction: str) -> Mapping[str, _Score]: ...
