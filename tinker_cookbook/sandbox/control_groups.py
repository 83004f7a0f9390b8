"""Linux control groups: limits on the memory and the number of processes of a whole run.

Resource limits (setrlimit) apply to each process separately, and not to root. A group limits all processes of a run together.
Both versions are supported: v1 has a folder for each controller, v2 one for all.
"""

import itertools
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tinker_cookbook.exceptions import SandboxError
from tinker_cookbook.sandbox.sandbox_interface import LimitName, SandboxLimits

PREFIX = "tinker-sandbox"
EXTRA_PROCESSES = 4
"""bubblewrap's two, the script's shell, and the tar that unpacks the files."""
EMPTY_SECONDS = 10.0
"""How long to wait for killed processes of a group to end."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Hierarchy:
    """Where groups can be created.

    Attributes:
        version: 1 or 2.
        parents: controller -> folder; in version 2 the same one for each.
    """

    version: int
    parents: dict[str, Path]

    def make(self, limits: SandboxLimits) -> "ControlGroup":
        """A new group with these limits. Raises OSError if that is not allowed."""
        name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        group = ControlGroup(self.version, {key: folder / name for key, folder in self.parents.items()})
        try:
            for folder in set(group.folders.values()):
                folder.mkdir()
            group.set_limits(limits)
        except OSError:
            group.remove()
            raise
        return group

    def remove_stale(self) -> None:
        """Remove the groups of processes that were killed before they could."""
        for parent in set(self.parents.values()):
            for folder in parent.glob(f"{PREFIX}-*-*"):
                pid = folder.name.split("-")[2]
                if pid.isdigit() and not Path("/proc", pid).exists():
                    with suppress(OSError):
                        folder.rmdir()


@dataclass(frozen=True)
class ControlGroup:
    """The group of one run."""

    version: int
    folders: dict[str, Path] = field(default_factory=dict[str, Path])

    def set_limits(self, limits: SandboxLimits) -> None:
        """Limit memory (including swap) and processes. Raises OSError."""
        memory, processes = str(limits.memory_mb << 20), str(limits.processes + EXTRA_PROCESSES)
        _write(self.folders["pids"] / "pids.max", processes)
        if self.version == 2:
            _write(self.folders["memory"] / "memory.max", memory)
            swap, no_swap = self.folders["memory"] / "memory.swap.max", "0"
        else:
            _write(self.folders["memory"] / "memory.limit_in_bytes", memory)
            swap, no_swap = self.folders["memory"] / "memory.memsw.limit_in_bytes", memory
        if swap.exists():
            _write(swap, no_swap)

    @property
    def entrances(self) -> list[str]:
        """The files to which a process writes its id to join the group."""
        return sorted({str(folder / "cgroup.procs") for folder in self.folders.values()})

    def reached(self) -> LimitName | None:
        """The limit that has been reached, if any."""
        if self.version == 2:
            killed = _count(self.folders["memory"] / "memory.events", "oom_kill")
        else:
            killed = _count(self.folders["memory"] / "memory.oom_control", "oom_kill")
        if killed:
            return "memory_mb"
        return "processes" if _count(self.folders["pids"] / "pids.events", "max") else None

    def cpu_seconds(self) -> float | None:
        """CPU seconds of all processes so far; None if the kernel does not count them."""
        if self.version == 2:
            used = _count(self.folders["memory"] / "cpu.stat", "usage_usec")
            return None if used is None else used / 1e6
        if "cpuacct" not in self.folders:
            return None
        return int((self.folders["cpuacct"] / "cpuacct.usage").read_text()) / 1e9

    def kill(self) -> None:
        """Kill every process of the group, and wait until all have ended. Raises SandboxError if one does not."""
        with suppress(OSError):
            _write(self.folders["pids"] / "pids.max", "0")  # none can be forked meanwhile
        until = time.monotonic() + EMPTY_SECONDS
        while pids := self._members():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                raise SandboxError(f"processes {', '.join(map(str, pids))} of a sandbox cannot be killed; see dmesg")
            time.sleep(0.002)

    def _members(self) -> list[int]:
        try:
            return [int(line) for line in (self.folders["pids"] / "cgroup.procs").read_text().split()]
        except FileNotFoundError:
            return []

    def remove(self) -> None:
        """Remove the folders of an empty group."""
        until = time.monotonic() + EMPTY_SECONDS
        for folder in set(self.folders.values()):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:  # the kernel may need a moment to remove the last process
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.002)


def _write(file: Path, text: str) -> None:
    """Write to a file that the kernel created. Raises OSError if it does not exist: the group lacks that controller."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_TRUNC), "w") as opened:
        opened.write(text)


def _count(file: Path, key: str) -> int | None:
    """The number after a key of a flat keyed file; None without file or key."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == key), None)


def find_hierarchy(own: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mounts")) -> Hierarchy | None:
    """Where this process may create groups with limits; None: nowhere.

    In version 2: the nearest group, from the process's own upwards, that can delegate memory and pids. A group with
    processes cannot, unless it is the root.
    """
    mounted = [line.split() for line in mounts.read_text().splitlines()]
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in own.read_text().splitlines()}
    hierarchy = _version_1(mounted, paths) or _version_2(mounted, paths)
    if hierarchy is not None:
        hierarchy.remove_stale()
    return hierarchy


def _version_1(mounted: list[list[str]], paths: dict[str, str]) -> Hierarchy | None:
    parents: dict[str, Path] = {}
    for _, target, kind, options, *_ in mounted:
        for controllers, path in paths.items():
            for name in set(controllers.split(",")) & {"memory", "pids", "cpuacct"}:
                if kind == "cgroup" and name in options.split(","):
                    folder = Path(target + path) if Path(target + path).is_dir() else Path(target)
                    if os.access(folder, os.W_OK):
                        parents[name] = folder
    return _usable(Hierarchy(1, parents)) if {"memory", "pids"} <= parents.keys() else None


def _version_2(mounted: list[list[str]], paths: dict[str, str]) -> Hierarchy | None:
    for _, target, kind, *_ in mounted:
        if kind == "cgroup2" and "" in paths:
            root = Path(target)
            folder = root / paths[""].lstrip("/")
            for candidate in [folder, *folder.parents]:
                if candidate.is_relative_to(root) and os.access(candidate, os.W_OK):
                    _delegate(candidate)
                    if hierarchy := _usable(Hierarchy(2, {"memory": candidate, "pids": candidate})):
                        return hierarchy
    return None


def _delegate(folder: Path) -> None:
    """Enable limits for the children of a group, if the kernel allows it."""
    with suppress(OSError):
        given = (folder / "cgroup.subtree_control").read_text().split()
        if not {"memory", "pids"} <= set(given):
            _write(folder / "cgroup.subtree_control", "+memory +pids")


def _usable(hierarchy: Hierarchy) -> Hierarchy | None:
    """The hierarchy, if a group with limits can be created in it."""
    try:
        group = hierarchy.make(SandboxLimits())
    except OSError:
        return None
    usable = all(Path(entrance).exists() for entrance in group.entrances)
    group.remove()
    return hierarchy if usable else None
