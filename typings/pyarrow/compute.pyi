# The package has no types of its own: all its names are Any.

from typing import Any

def __getattr__(name: str) -> Any: ...
