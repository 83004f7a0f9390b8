"""How many examples a property is tried with."""

import os
from typing import Any

from hypothesis import settings

THOROUGH = "TINKER_TEST_EXAMPLES" in os.environ
SHARE = 5
FEWEST = 4


def examples(number: int, **others: Any) -> settings:
    """Hypothesis' settings for `number` examples in `make test-properties`, and a fifth of them in `make test`."""
    if not THOROUGH:
        number = min(number, max(FEWEST, number // SHARE))
    return settings(max_examples=number, **others)
