# What we use, for where the package is not installed.

from collections.abc import Sequence
from typing import Any

class SentenceTransformer:
    def __init__(self, model_name_or_path: str) -> None: ...
    def encode(self, sentences: Sequence[str], *, normalize_embeddings: bool) -> Any: ...
