"""Helpers for tests that compare renderers with a published template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tinker_cookbook.utils.narrowing import is_mapping

_SPACES_LOST = transformers.__version__ == "5.3.0" or transformers.__version__.startswith("5.6.")
"""Whether this transformers decodes text of DeepSeek's tokenizers without its spaces (its pull request 44801)."""


def extract_token_ids(result: Any) -> list[int]:
    """The ids of what `apply_chat_template` returns: a list up to transformers 4, an encoding from 5 on."""
    return list(result["input_ids"] if is_mapping(result) else result)


def skip_deepseek_tokenizer_bug(test: Callable[..., Any]) -> Callable[..., Any]:
    """Skip a test if transformers loses the spaces of DeepSeek's tokenizers."""
    import pytest

    return pytest.mark.skipif(_SPACES_LOST, reason=_reason())(test)


def skip_if_deepseek_tokenizer_bug(model_name: str) -> None:
    """Skip the calling test for a DeepSeek model if transformers loses the spaces of its tokenizer."""
    import pytest

    if _SPACES_LOST and "deepseek" in model_name.lower():
        pytest.skip(_reason())


def _reason() -> str:
    return f"transformers {transformers.__version__} decodes text of DeepSeek's tokenizers without its spaces"
