"""For tests that compare a renderer with a tokenizer's own chat template. Needs pytest."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import transformers

_LOSES_SPACES = transformers.__version__ == "5.3.0" or transformers.__version__.startswith("5.6.")
_WHY = f"transformers {transformers.__version__} loses spaces where it decodes with DeepSeek's tokenizers; use another"

skip_deepseek_tokenizer_bug = pytest.mark.skipif(_LOSES_SPACES, reason=_WHY)


def extract_token_ids(result: Mapping[str, Any] | Sequence[int]) -> list[int]:
    """The ids of what apply_chat_template(tokenize=True) returns: a list, or a mapping with `input_ids`."""
    return list(result["input_ids"] if isinstance(result, Mapping) else result)


def skip_if_deepseek_tokenizer_bug(model_name: str) -> None:
    """Skip the test that is running, if it decodes with DeepSeek's tokenizer under a release of transformers that cannot."""
    if _LOSES_SPACES and "deepseek" in model_name.lower():
        pytest.skip(_WHY)
