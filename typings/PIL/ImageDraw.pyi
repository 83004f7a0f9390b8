# What we use, for where Pillow is not installed.

from typing import Any

from PIL.Image import Image

def Draw(im: Image) -> Any: ...
