# The package's own types are partial: what is not here is Any.

from collections.abc import Callable
from typing import Any

load_dataset: Callable[..., Any]
load_from_disk: Callable[..., Any]

def __getattr__(name: str) -> Any: ...
