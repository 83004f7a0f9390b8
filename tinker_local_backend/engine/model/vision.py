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
from concurrent.futures import ThreadPoolExecutor, wait
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
    is_picture,
)
from tinker_local_backend.errors import RequestError

FEATURE_BYTES = 256 << 20
"""Embeddings of pictures that are kept, with their files, between passes: those used last. Others are made again."""

INPUT_BYTES = 1 << 30
"""Inputs of the tower that wait for it, in main memory; a megapixel takes 12 to 25 MB. Others are made again when it runs."""

DECODING_THREADS = 2
"""Pictures of one call that are decoded at a time."""
PATIENCE = 0.01
"""Seconds for which the worker waits for a picture before it does other work."""


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
        self._inputs = _WaitingInputs()
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
        if picture is None or picture.digest != digest:
            decoded = self._files.decode(chunk.data, where)
            new = Picture(content, decoded.positions, digest, decoded.grid, chunk.data)
            with self._lock:
                picture = self._known.setdefault(content, new)
                self._inputs.put(content, decoded.inputs)
        expected = chunk.expected_tokens
        if expected is not None and expected != picture.positions:
            raise RequestError(
                f"{where} says expected_tokens={expected}, but model {self._name!r} makes {picture.positions} tokens of this "
                "picture; use the image processor of this model in the renderer"
            )
        return picture

    def prepare(
        self, chunks: Iterable[tinker.types.ImageChunk], in_order: bool
    ) -> Generator[None, None, list[Picture]]:
        """Decode pictures on other threads, a few at a time. Yields while they are to do, so that the worker does other work.

        Pictures that cannot be decoded are left out: `picture` says why.

        Args:
            in_order: how often it yields depends on `chunks` alone, so that deterministic runs have the same order of work; the
                worker waits for each few. Otherwise it waits for no longer than PATIENCE at a time.
        """
        different = list({chunk.data: chunk for chunk in chunks}.values())
        if self._threads is None and different:
            self._threads = ThreadPoolExecutor(DECODING_THREADS, "tinker-pictures")
        pictures: list[Picture] = []
        for i in range(0, len(different), DECODING_THREADS):
            assert self._threads is not None
            few = [self._threads.submit(self.picture, chunk, "") for chunk in different[i : i + DECODING_THREADS]]
            try:
                while wait(few, None if in_order else PATIENCE).not_done:
                    yield
                yield
            finally:
                for future in few:
                    future.cancel()
            pictures += [future.result() for future in few if future.exception() is None]
        return pictures

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
        for content in np.unique(pictures.contents).tolist():
            of_picture = np.flatnonzero(pictures.contents == content)
            wanted = torch.from_numpy(pictures.offsets[of_picture]).to(tokens_T.device)
            rows, features = index_of[torch.from_numpy(of_picture).to(tokens_T.device)], self._features(content)
            embeddings_NH.index_copy_(0, rows, features.embeddings_NH[wanted].to(embeddings_NH.dtype))
            if (found_LNH := features.deeper_LNH) is not None:
                into = deeper_LNH
                if into is None:
                    into = embeddings_NH.new_zeros(len(found_LNH), *embeddings_NH.shape)
                deeper_LNH = into.index_copy_(1, rows, found_LNH[:, wanted].to(into.dtype))
        self._trim()
        encoded = SimpleNamespace(
            pooler_output=embeddings_NH[None] if self._family.one_tensor else [embeddings_NH],
            deepstack_features=None if deeper_LNH is None else [[part] for part in deeper_LNH],
        )
        return {"input_ids": tokens_T[None], "mm_encoder_outputs": {"image": encoded}}

    def encode(self, pictures: SequencePictures, start: int, end: int) -> None:
        """Run the vision tower on a sequence's pictures at tokens start:end, before a pass that needs them, on the worker. What
        it makes is kept until that pass is over.

        Raises RequestError if the model's image processor and its tower do not fit each other, or memory runs out.
        """
        for picture in pictures.within(start, end):
            try:
                self._features_of(picture)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                # Without its traceback, whose frames keep what the tower had made.
                self._encode_with_room(picture)

    def _encode_with_room(self, picture: Picture) -> None:
        """After memory ran out: once more without what is kept of other pictures."""
        self.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self._features_of(picture)
        except Exception as error:
            if not out_of_memory(error):
                raise
            why = f"there is too little memory to encode a picture of {picture.positions} tokens; scale it down"
            raise RequestError(f"{why}, or lower TINKER_LOCAL_KV_CACHE_TOKENS", remote=f"{why}, or try again") from None

    def release(self) -> None:
        """Free the embeddings that are kept. They are made again when they are needed."""
        while self._recent:
            self._drop_oldest()

    def _features(self, content: int) -> Features:
        return self._features_of(self._known[content])

    def _features_of(self, picture: Picture) -> Features:
        """Only on the engine's worker. The bound of what is kept holds between passes (`_trim`): one needs all its pictures."""
        features = picture.features
        if features is None:
            features = picture.features = self._run_tower(picture)
            self._recent[picture.content] = picture
            self._recent_bytes += _kept_bytes(picture)
        else:
            self._recent.move_to_end(picture.content)
        return features

    def _trim(self) -> None:
        while self._recent_bytes > FEATURE_BYTES and len(self._recent) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        picture = self._recent.popitem(last=False)[1]
        self._recent_bytes -= _kept_bytes(picture)
        picture.features = None

    def _run_tower(self, picture: Picture) -> Features:
        self.encoded += 1
        with self._lock:
            given = self._inputs.take(picture.content)
        if given is None:
            given = self._files.decode(picture.data, "a picture").inputs
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


class _WaitingInputs:
    """Inputs of the tower by content, up to INPUT_BYTES; those that came first make room."""

    def __init__(self) -> None:
        self._by_content: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()
        self._bytes = 0

    def put(self, content: int, inputs: dict[str, torch.Tensor]) -> None:
        self.take(content)
        self._by_content[content] = inputs
        self._bytes += _bytes_of(inputs)
        while self._bytes > INPUT_BYTES:
            self._bytes -= _bytes_of(self._by_content.popitem(last=False)[1])

    def take(self, content: int) -> dict[str, torch.Tensor] | None:
        """They are gone afterwards. None: there are none."""
        found = self._by_content.pop(content, None)
        self._bytes -= 0 if found is None else _bytes_of(found)
        return found


def _bytes_of(inputs: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())


def _kept_bytes(picture: Picture) -> int:
    """Of its file, too, which whoever keeps the picture keeps alive."""
    assert picture.features is not None
    return picture.features.nbytes + len(picture.data)
