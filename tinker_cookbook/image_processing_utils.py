"""Images in messages for services. The renderers here only support text; Pillow is needed to decode an image."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlparse

from tinker_cookbook.exceptions import DataFormatError, MissingPackageError
from tinker_cookbook.utils.lazy import transformers

if TYPE_CHECKING:
    from PIL.Image import Image  # pyright: ignore[reportMissingModuleSource]


def get_image_processor(model_name: str) -> Any:
    """The image processor of a model, by hub name or folder. Raises the errors of transformers if there is none."""
    return cast(Any, transformers.AutoImageProcessor).from_pretrained(model_name.partition(":")[0])


def image_to_data_uri(image: Image | str) -> str:
    """`data:image/jpeg;base64,...` for a Pillow image, a path or a file:// URL; a data URI is returned unchanged.

    Raises:
        DataFormatError: the image is at another kind of address; nothing is downloaded.
        MissingPackageError: Pillow is needed to read a file, and is not installed.
    """
    if isinstance(image, str):
        if image.startswith("data:"):
            return image
        place = urlparse(image)
        if place.scheme not in ("", "file") or place.netloc not in ("", "localhost"):
            raise DataFormatError(
                f"image={image!r}: this library does not fetch remote image URLs; give an image, a path or a data URI"
            )
        image = _open(Path(unquote(place.path) if place.scheme else image).expanduser())
    if isinstance(image, str) or not hasattr(image, "convert"):
        raise DataFormatError(f"image must be an image of Pillow or a text, got {type(image).__name__}")
    file = io.BytesIO()
    (image.convert("RGB") if image.mode in ("RGBA", "LA", "P") else image).save(file, format="JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def resize_image(image: Image, max_size: int) -> Image:
    """Scale the image down, keeping its proportions, so that no side exceeds `max_size` pixels; smaller ones are
    unchanged.
    """
    longest = max(image.size)
    if longest <= max_size:
        return image
    from PIL.Image import Resampling  # pyright: ignore[reportMissingModuleSource]

    width, height = (max(1, side * max_size // longest) for side in image.size)
    return image.resize((width, height), Resampling.LANCZOS)


def _open(path: Path) -> Image:
    try:
        from PIL import Image  # pyright: ignore[reportMissingModuleSource]
    except ImportError as error:
        raise MissingPackageError(f"image={str(path)!r}: reading it needs Pillow; pip install pillow") from error
    with Image.open(path) as opened:
        return opened.copy()
