"""Adapters as vLLM takes them: a folder for each snapshot, a name and a number that are never used again, and few at a time."""

from __future__ import annotations

import itertools
import shutil
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinker_local_backend.engine.model.lora import Adapter
from tinker_local_backend.engine.sampling.sampler import Post
from tinker_local_backend.storage.checkpoints import write_adapter


@dataclass(frozen=True)
class AdapterFiles:
    """A snapshot on disk. vLLM keeps what it computed under name and number: neither stands for other weights, ever."""

    number: int
    name: str
    folder: Path
    rank: int


class AdapterShelf:
    """Which snapshots are loaded. At most `slots` at a time; one that is used is never unloaded.

    On a CPU vLLM runs rows without an adapter through the one in its last slot, so a process must have one more than `slots`.

    Args:
        folder: where they are written, and nothing else; `close` removes it.
        unload: tells vLLM to forget one.
        post: the engine's; a snapshot may be collected on any thread.
    """

    def __init__(self, folder: Path, base_model: str, slots: int, unload: Callable[[AdapterFiles], None], post: Post):
        self._folder, self._base_model, self._slots = folder, base_model, slots
        self._unload, self._post = unload, post
        self._numbers = itertools.count(1)
        self._prefix = uuid.uuid4().hex[:12]
        self._files: weakref.WeakKeyDictionary[Adapter, AdapterFiles] = weakref.WeakKeyDictionary()
        self._loaded: OrderedDict[AdapterFiles, int] = OrderedDict()
        """how many orders use each, the one that was used last at the end"""
        self._seen: set[int] = set()

    @property
    def loaded(self) -> list[AdapterFiles]:
        return list(self._loaded)

    @property
    def seen(self) -> int:
        """Adapters that were loaded since `emptied`."""
        return len(self._seen)

    def is_new(self, adapter: Adapter | None) -> bool:
        """Whether it has not been loaded since `emptied`."""
        return adapter is not None and (adapter not in self._files or self._files[adapter].number not in self._seen)

    def take(self, adapter: Adapter, uses: int) -> AdapterFiles | None:
        """Written, and room made for it. None: every slot is in use."""
        files = self._files.get(adapter)
        if files is None or files not in self._loaded:
            if len(self._loaded) >= self._slots:
                idle = next((held for held, used in self._loaded.items() if used == 0), None)
                if idle is None:
                    return None
                self._drop(idle)
            files = files or self._write(adapter)
            self._loaded[files] = 0
            self._seen.add(files.number)
        self._loaded[files] += uses
        self._loaded.move_to_end(files)
        return files

    def give_back(self, files: AdapterFiles) -> None:
        """One use less."""
        if files in self._loaded:
            self._loaded[files] -= 1

    def emptied(self) -> None:
        """That vLLM is gone; the next one has none of them."""
        self._loaded.clear()
        self._seen.clear()

    def close(self) -> None:
        self.emptied()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, adapter: Adapter) -> AdapterFiles:
        number = next(self._numbers)
        name = f"tinker-{self._prefix}-{number}"
        files = AdapterFiles(number, name, (self._folder / name).absolute(), adapter.spec.rank)
        write_adapter(files.folder, adapter, self._base_model)
        self._files[adapter] = files
        weakref.finalize(adapter, self._post, lambda: self._forget(files)).atexit = False
        return files

    def _forget(self, files: AdapterFiles) -> None:
        """Nobody has the snapshot any more."""
        if files in self._loaded:
            self._drop(files)
        shutil.rmtree(files.folder, ignore_errors=True)

    def _drop(self, files: AdapterFiles) -> None:
        del self._loaded[files]
        self._unload(files)
