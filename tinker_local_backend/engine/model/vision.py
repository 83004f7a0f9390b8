"""Pictures for a model that takes them: its image processor, its frozen vision tower, and the positions of their tokens.

The tower's embeddings replace those of placeholder tokens in the model's own forward pass, which takes them ready made
(`mm_encoder_outputs` of transformers). A picture is encoded once as long as something refers to it, and by itself, so that its
embeddings do not depend on what else is in a pass.
"""

from __future__ import annotations

import inspect
import io
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
import torch
from torch import nn
from transformers import __version__ as VERSION
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from tinker_local_backend.engine.model.passes import BothWays
from tinker_local_backend.engine.model.pictures import (
    MAX_POSITIONS,
    Features,
    PassPictures,
    Picture,
    SequencePictures,
    content_and_offset,
    content_of,
    is_picture,
)
from tinker_local_backend.errors import RequestError

RECENT_BYTES = 256 << 20
"""Embeddings of pictures that nothing refers to any more, kept for the next request with one of them."""


@dataclass(frozen=True)
class Family:
    """How the models of one type take pictures."""

    both_ways: BothWays = "no"
    """the layers in which the tokens of a picture see each other in both directions"""
    pads: bool = False
    """without a picture, its forward pass computes a placeholder as padding"""
    one_tensor: bool = False
    """its forward pass takes the embeddings of all pictures as one tensor, not as a list"""


_QWEN = Family()
FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": Family("everywhere", one_tensor=True),
    "gemma4": Family("windowed", pads=True),
}
"""By the model type of the whole model."""


TOWERS = ("visual", "vision_tower", "multi_modal_projector", "embed_vision")
"""Names of the modules that turn pictures into embeddings."""


def takes_pictures(config: Any) -> bool:
    """Whether a model with this config (of the whole model) takes pictures here."""
    return config.model_type in FAMILIES and getattr(config, "vision_config", None) is not None


def sees(body: nn.Module | type[nn.Module]) -> bool:
    """Whether the forward pass of a model takes embeddings of pictures, as from transformers 5.18 on; before, it drops them."""
    return "mm_encoder_outputs" in inspect.signature(body.forward).parameters


class Vision:
    """The pictures of one model.

    Args:
        name: directory or hub id, which has the image processor's config.
        body: transformers' model without its head, with the vision tower.
    """

    def __init__(self, name: str, body: nn.Module, device: torch.device):
        self._name, self._device = name, device
        self._body: Any = body
        config: Any = self._body.config
        self._family = FAMILIES[config.model_type]
        self._placeholder: int = config.image_token_id
        self._config = config
        self._has_axes = hasattr(body, "get_vision_position_ids")
        self._processor: Any = None
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[int, Picture] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[int, Picture] = OrderedDict()
        self._recent_bytes = 0
        self.refusal = "" if sees(body) else f"pictures need transformers 5.18 or later, {VERSION} is installed"
        """why no picture can be taken"""
        self.encoded = 0
        """pictures that went through the vision tower"""

    @property
    def both_ways(self) -> BothWays:
        """The layers in which the tokens of a picture see each other in both directions."""
        text = self._config.get_text_config()
        if self._config.model_type == "gemma4" and text.use_bidirectional_attention != "vision":
            return "no"
        return self._family.both_ways

    @property
    def placeholder(self) -> int:
        """The token id that stands for a position of a picture in the model's own prompts."""
        return self._placeholder

    def picture(self, chunk: tinker.types.ImageChunk, where: str) -> Picture:
        """The picture of a chunk. May be called on any thread.

        Raises RequestError, which begins with `where`: it cannot be decoded, takes another number of tokens than the chunk says,
        or transformers is too old.
        """
        if self.refusal:
            raise RequestError(f"{where} is a picture: {self.refusal}")
        content, digest = content_of(chunk.data)
        with self._lock:
            picture = self._known.get(content)
        if picture is None or picture.digest != digest:
            picture = self._processed(chunk.data, content, digest, where)
            with self._lock:
                picture = self._known.setdefault(content, picture)
        if picture.digest != digest:
            raise RequestError(f"{where} has the same content number as another picture; change one of its pixels")
        expected = chunk.expected_tokens
        if expected is not None and expected != picture.positions:
            raise RequestError(
                f"{where} says expected_tokens={expected}, but model {self._name!r} makes {picture.positions} tokens of this "
                "picture; use the image processor of this model in the renderer"
            )
        return picture

    def adopt(self, pictures: SequencePictures) -> SequencePictures:
        """The pictures of a sequence that another process has checked, as this one knows them."""
        found: list[Picture] = []
        with self._lock:
            for picture in pictures.pictures:
                if picture.features is not None:
                    picture.features = picture.features.to(self._device)
                found.append(self._known.setdefault(picture.content, picture))
        return replace(pictures, pictures=tuple(found))

    def _processed(self, data: bytes, content: int, digest: bytes, where: str) -> Picture:
        try:
            from PIL import Image
        except ImportError as error:
            raise RequestError(f"{where} is a picture, which needs Pillow: pip install pillow") from error
        try:
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
                pixels = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise RequestError(f"{where} cannot be decoded ({error}); send a whole PNG or JPEG file") from error
        try:
            inputs = dict(self._image_processor()(images=[pixels], return_tensors="pt"))
        except ValueError as error:
            size = f"{pixels.width}x{pixels.height}"
            raise RequestError(f"{where} of {size} pixels does not suit model {self._name!r}: {error}") from error
        grid: tuple[int, int, int] | None = None
        if (of_grid := inputs.get("image_grid_thw")) is not None:
            grid = tuple(of_grid[0].tolist())
            positions = int(np.prod(grid)) // self._config.vision_config.spatial_merge_size**2
        elif (soft := inputs.get("num_soft_tokens_per_image")) is not None:
            positions = int(soft[0])
        else:
            positions = int(self._config.mm_tokens_per_image)
        if not 0 < positions < MAX_POSITIONS:
            raise RequestError(f"{where} takes {positions} tokens; scale it down")
        kept = {key: inputs[key] for key in ("pixel_values", "image_grid_thw", "image_position_ids") if key in inputs}
        return Picture(content, positions, digest, grid, kept)

    def _image_processor(self) -> Any:
        with self._lock:
            if self._processor is None:
                try:
                    self._processor = AutoImageProcessor.from_pretrained(self._name, backend="pil")
                except (OSError, ValueError, ImportError) as error:
                    raise RequestError(
                        f"model {self._name!r} has no image processor that can be loaded ({error}); put its "
                        "preprocessor_config.json into its folder"
                    ) from error
            return self._processor

    def of_sequence(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> SequencePictures:
        """The pictures of a sequence with these tokens, and its positions.

        Sources: the positions of three axes are those of Qwen2-VL (arXiv 2409.12191, section 2.1): all axes count text, a picture
        has one position in time and its rows and columns, and what follows begins behind the largest.
        """
        if not self._has_axes:
            return SequencePictures(tuple(pictures))
        merge = self._config.vision_config.spatial_merge_size
        by_content = {picture.content: picture for picture in pictures}
        parts: list[npt.NDArray[np.int64]] = []
        index = position = 0
        while index < len(tokens):
            if is_picture(tokens[index]):
                picture = by_content[content_and_offset(tokens[index])[0]]
                assert picture.grid is not None
                placed = self._body.get_vision_position_ids(position, torch.tensor(picture.grid), 1, merge)
                parts.append(placed.cpu().numpy())
                index += picture.positions
                position += max(picture.grid[1:]) // merge
            else:
                start = index
                while index < len(tokens) and not is_picture(tokens[index]):
                    index += 1
                parts.append(np.tile(np.arange(position, position + index - start), (3, 1)))
                position += index - start
        return SequencePictures(tuple(pictures), np.concatenate(parts, axis=1), position - index)

    def body_inputs(self, tokens_T: torch.Tensor, pictures: PassPictures) -> dict[str, Any]:
        """Arguments of the model's forward pass: tokens (T,) with placeholders for pictures, and the pictures' embeddings."""
        rows_N = torch.from_numpy(pictures.rows).to(tokens_T.device)
        tokens_T = tokens_T.index_fill(0, rows_N, self._placeholder)
        # A placeholder that was sampled is a token like any other: what it has without pictures goes where they would be.
        at = (tokens_T == self._placeholder).nonzero().flatten()
        own = self._config.get_text_config().pad_token_id if self._family.pads else self._placeholder
        embeddings_NH = self._body.get_input_embeddings()(torch.full_like(at, own))
        index_of = torch.searchsorted(at, rows_N)
        deeper_LNH: torch.Tensor | None = None
        first = 0
        for start, end in pictures.blocks:
            token, count = int(pictures.ids[first]), end - start
            features, offset = self._features(token), content_and_offset(token)[1]
            rows, wanted = index_of[first : first + count], slice(offset, offset + count)
            found_NH = features.embeddings_NH[wanted].to(embeddings_NH.dtype)
            embeddings_NH = embeddings_NH.index_copy(0, rows, found_NH)
            if (found_LNH := features.deeper_LNH) is not None:
                known = (
                    embeddings_NH.new_zeros(len(found_LNH), *embeddings_NH.shape) if deeper_LNH is None else deeper_LNH
                )
                deeper_LNH = known.index_copy(1, rows, found_LNH[:, wanted].to(known.dtype))
            first += count
        encoded = SimpleNamespace(
            pooler_output=embeddings_NH[None] if self._family.one_tensor else [embeddings_NH],
            deepstack_features=None if deeper_LNH is None else [[part] for part in deeper_LNH],
        )
        return {"input_ids": tokens_T[None], "mm_encoder_outputs": {"image": encoded}}

    def _features(self, token: int) -> Features:
        """Of the picture with this token. Only the engine's worker calls it."""
        content = content_and_offset(token)[0]
        picture = self._known[content]
        if picture.features is None:
            assert picture.inputs is not None
            picture.features = self._encode(picture)
            picture.inputs = None
        self._keep(picture)
        return picture.features

    def _encode(self, picture: Picture) -> Features:
        assert picture.inputs is not None
        self.encoded += 1
        with torch.inference_mode(False), torch.no_grad():  # training reads them too
            inputs = {key: value.to(self._device) for key, value in picture.inputs.items()}
            inputs["pixel_values"] = inputs["pixel_values"].to(self._body.dtype)
            output = self._body.get_image_features(**inputs, return_dict=True)
            embeddings_NH = torch.cat([*output.pooler_output]).flatten(0, -2)
            deeper = getattr(output, "deepstack_features", None)
            deeper_LNH = None if not deeper else torch.stack([torch.cat([*layer]) for layer in deeper])
        if len(embeddings_NH) != picture.positions:
            raise RequestError(
                f"the vision tower of model {self._name!r} makes {len(embeddings_NH)} embeddings of a picture that takes "
                f"{picture.positions} tokens: its preprocessor_config.json does not fit its config.json"
            )
        return Features(embeddings_NH, deeper_LNH)

    def _keep(self, picture: Picture) -> None:
        """Keep the most recently used pictures alive."""
        if self._recent.pop(picture.content, None) is None:
            self._recent_bytes += _size(picture)
        self._recent[picture.content] = picture
        while self._recent_bytes > RECENT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= _size(self._recent.popitem(last=False)[1])


def _size(picture: Picture) -> int:
    features = picture.features
    assert features is not None
    deeper = features.deeper_LNH
    return features.embeddings_NH.nbytes + (0 if deeper is None else deeper.nbytes)
