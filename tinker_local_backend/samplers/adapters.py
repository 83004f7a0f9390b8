"""Adapters for vLLM: a folder per snapshot, with a name and a number that are never reused, and LRU eviction of loaded ones."""

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
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.engine.sampling.sampler import Post
from tinker_local_backend.storage.checkpoints import write_adapter


@dataclass(frozen=True)
class AdapterFiles:
    """A snapshot on disk. vLLM caches by name and number, so neither is ever reused for other weights."""

    number: int
    name: str
    folder: Path
    layout: ExpertLayout = "frozen"
    """layout of its routed experts"""

    @property
    def is_3d(self) -> bool:
        """Whether experts are in PEFT's form, vLLM's `is_3d_lora_weight`."""
        return self.layout == "per_expert"


def expert_option(layout: ExpertLayout) -> str | None:
    """The vLLM option that enables adapters with this layout of experts."""
    return {"shared_outer": "enable_moe_shared_loras", "per_expert": "enable_mixed_moe_lora_format"}.get(layout)


class LoadedAdapters:
    """The snapshots that are loaded, at most `slots` at a time. One that is in use is never unloaded.

    On a CPU vLLM runs rows without an adapter through the one in its last slot, so a process needs one slot more than `slots`.

    Args:
        folder: for the adapters' files only; `close` removes it.
        unload: tells vLLM to unload one.
        post: runs a callback on the engine's worker; a snapshot may be garbage-collected on any thread.
    """

    def __init__(self, folder: Path, base_model: str, slots: int, unload: Callable[[AdapterFiles], None], post: Post):
        self._folder, self._base_model, self._slots = folder, base_model, slots
        self._unload, self._post = unload, post
        self._numbers = itertools.count(1)
        self._prefix = uuid.uuid4().hex[:12]
        self._files: weakref.WeakKeyDictionary[Adapter, AdapterFiles] = weakref.WeakKeyDictionary()
        self.loaded: OrderedDict[AdapterFiles, int] = OrderedDict()
        """number of completions that use each, in LRU order"""
        self.seen: set[int] = set()
        """numbers of the adapters that were loaded since `clear`"""

    def is_new(self, adapter: Adapter) -> bool:
        """Whether it has not been loaded since `clear`."""
        return adapter not in self._files or self._files[adapter].number not in self.seen

    def acquire(self, adapter: Adapter, uses: int) -> AdapterFiles | None:
        """Write and load it, and evict an unused adapter if no slot is free. Returns None if every slot is in use."""
        files = self._files.get(adapter)
        if files is None or files not in self.loaded:
            if len(self.loaded) >= self._slots:
                idle = next((loaded for loaded, used in self.loaded.items() if used == 0), None)
                if idle is None:
                    return None
                self._evict(idle)
            files = files or self._write(adapter)
            self.loaded[files] = 0
            self.seen.add(files.number)
        self.loaded[files] += uses
        self.loaded.move_to_end(files)
        return files

    def release(self, files: AdapterFiles) -> None:
        if files in self.loaded:
            self.loaded[files] -= 1

    def clear(self) -> None:
        """Forget what is loaded: this vLLM has ended."""
        self.loaded.clear()
        self.seen.clear()

    def close(self) -> None:
        self.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, adapter: Adapter) -> AdapterFiles:
        number = next(self._numbers)
        name = f"tinker-{self._prefix}-{number}"
        files = AdapterFiles(number, name, (self._folder / name).absolute(), adapter.spec.experts)
        # "stacked" stores shared factors once, also in vLLM's memory: with 128 experts an adapter takes a quarter of the space.
        form = "stacked" if files.layout == "shared_outer" else "peft"
        write_adapter(files.folder, adapter, self._base_model, form)
        self._files[adapter] = files
        weakref.finalize(adapter, self._post, lambda: self._delete(files)).atexit = False
        return files

    def _delete(self, files: AdapterFiles) -> None:
        """Unload and delete a garbage-collected snapshot."""
        if files in self.loaded:
            self._evict(files)
        shutil.rmtree(files.folder, ignore_errors=True)

    def _evict(self, files: AdapterFiles) -> None:
        del self.loaded[files]
        self._unload(files)
