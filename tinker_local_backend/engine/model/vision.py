"""Pictures for a model that takes them: its image processor, its frozen vision tower, and the positions of their tokens.

The tower's embeddings replace those of placeholder tokens in the model's own forward pass, which takes them ready made
(`mm_encoder_outputs` of transformers). A picture is encoded by itself, so that its embeddings do not depend on what else is in a
pass, and once, as long as they are kept.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
import torch
from torch import nn
from transformers import __version__ as VERSION

from tinker_local_backend.engine.model.memory import out_of_memory
from tinker_local_backend.engine.model.passes import BothWays
from tinker_local_backend.engine.model.picture_files import PictureFiles
from tinker_local_backend.engine.model.pictures import (
    ContentNumbers,
    Features,
    PassPictures,
    Picture,
    SequencePictures,
    content_and_offset,
    is_picture,
)
from tinker_local_backend.errors import RequestError

FEATURE_BYTES = 256 << 20
"""Embeddings of pictures that are kept, those used last. Others are made again from their files."""

INPUT_BYTES = 256 << 20
"""Inputs of the tower that wait for it, in main memory; a megapixel takes 12 to 25 MB. Others are made when it runs."""

DECODING_THREADS = 2
PICTURES_PER_PART = 16
"""Pictures of training data that the worker waits for at a time; a megapixel takes some 50 ms."""


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
        self._files = PictureFiles(name, config, self._body.dtype)
        self._numbers = ContentNumbers()
        self._threads: ThreadPoolExecutor | None = None
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
        """The picture of a chunk. May be called on any thread; a picture that nobody refers to yet is decoded.

        Raises RequestError, which begins with `where`: it cannot be decoded, takes another number of tokens than the chunk says,
        or transformers is too old.
        """
        if self.refusal:
            raise RequestError(f"{where} is a picture: {self.refusal}")
        content, digest = self._numbers.of(chunk.data)
        with self._lock:
            picture = self._known.get(content)
        if picture is None:
            decoded = self._files.decode(chunk.data, where)
            new = Picture(content, decoded.positions, digest, decoded.grid, chunk.data, decoded.inputs)
            with self._lock:
                waiting = sum(other.input_bytes for other in self._known.values())
                if waiting + new.input_bytes > INPUT_BYTES:
                    new.inputs = None
                picture = self._known.setdefault(content, new)
        expected = chunk.expected_tokens
        if expected is not None and expected != picture.positions:
            raise RequestError(
                f"{where} says expected_tokens={expected}, but model {self._name!r} makes {picture.positions} tokens of this "
                "picture; use the image processor of this model in the renderer"
            )
        return picture

    def prepare(self, chunks: Iterable[tinker.types.ImageChunk]) -> Generator[None, None, list[Picture]]:
        """Decode pictures on other threads. Yields while some of them are still to do, so that the worker can do other work.

        How often it yields depends on `chunks` alone, so that deterministic runs have the same order of work. Pictures that
        cannot be decoded are left out: `picture` says why.
        """
        different = {chunk.data: chunk for chunk in chunks}
        if self._threads is None and different:
            self._threads = ThreadPoolExecutor(DECODING_THREADS, "tinker-pictures")
        found: list[Future[Picture]] = []
        for chunk in different.values():
            assert self._threads is not None
            found.append(self._threads.submit(self.picture, chunk, ""))
        for i in range(0, len(found), PICTURES_PER_PART):
            wait(found[i : i + PICTURES_PER_PART])
            yield
        return [future.result() for future in found if future.exception() is None]

    def adopt(self, pictures: SequencePictures) -> SequencePictures:
        """The pictures of a sequence that another process has checked, as this one knows them."""
        found: list[Picture] = []
        for picture in pictures.pictures:
            self._numbers.take_over(picture.content, picture.digest)
            with self._lock:
                found.append(self._known.setdefault(picture.content, picture))
        return replace(pictures, pictures=tuple(found))

    def of_sequence(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> SequencePictures:
        """The pictures of a sequence with these tokens, and its positions.

        Sources: the positions of three axes are those of Qwen2-VL (arXiv 2409.12191, section 2.1): all axes count text, a picture
        has one position in time and its rows and columns, and what follows begins behind the largest.
        """
        merge = getattr(self._config.vision_config, "spatial_merge_size", 1)
        upcoming = iter(pictures)
        ends: list[int] = []
        parts: list[npt.NDArray[np.int64]] = []
        index = position = 0
        while index < len(tokens):
            if is_picture(tokens[index]):
                picture = next(upcoming)
                index += picture.positions
                ends.append(index)
                if self._has_axes:
                    assert picture.grid is not None
                    placed = self._body.get_vision_position_ids(position, torch.tensor(picture.grid), 1, merge)
                    parts.append(placed.cpu().numpy())
                    position += max(picture.grid[1:]) // merge
            else:
                start = index
                while index < len(tokens) and not is_picture(tokens[index]):
                    index += 1
                parts.append(np.tile(np.arange(position, position + index - start), (3, 1)))
                position += index - start
        if not self._has_axes:
            return SequencePictures(tuple(pictures), tuple(ends))
        return SequencePictures(tuple(pictures), tuple(ends), np.concatenate(parts, axis=1), position - index)

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

    def encode(self, pictures: SequencePictures, start: int) -> None:
        """Run the vision tower on a sequence's pictures from token `start` on, before a pass that needs them, on the worker.

        Raises RequestError if the model's image processor and its tower do not fit each other, or memory runs out.
        """
        for picture in pictures.since(start):
            try:
                self._features_of(picture)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                raise RequestError(
                    f"there is too little memory to encode a picture of {picture.positions} tokens; scale it down, or lower "
                    "TINKER_LOCAL_KV_CACHE_TOKENS"
                ) from None

    def release(self) -> None:
        """Free the embeddings that are kept. They are made again when they are needed."""
        while self._recent:
            self._drop_oldest()

    def _features(self, token: int) -> Features:
        """Of the picture with this token."""
        return self._features_of(self._known[content_and_offset(token)[0]])

    def _features_of(self, picture: Picture) -> Features:
        """Only on the engine's worker. What was used last is kept, up to FEATURE_BYTES."""
        features = picture.features
        if features is None:
            features = picture.features = self._run_tower(picture)
            picture.inputs = None
            self._recent[picture.content] = picture
            self._recent_bytes += features.nbytes
            while self._recent_bytes > FEATURE_BYTES and len(self._recent) > 1:
                self._drop_oldest()
        else:
            self._recent.move_to_end(picture.content)
        return features

    def _drop_oldest(self) -> None:
        picture = self._recent.popitem(last=False)[1]
        if picture.features is not None:
            self._recent_bytes -= picture.features.nbytes
            picture.features = None

    def _run_tower(self, picture: Picture) -> Features:
        self.encoded += 1
        given = picture.inputs or self._files.decode(picture.data, "a picture").inputs
        with torch.inference_mode(False), torch.no_grad():  # training reads them too
            inputs = {key: value.to(self._device) for key, value in given.items()}
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
