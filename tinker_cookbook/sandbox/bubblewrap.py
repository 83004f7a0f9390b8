"""Runs in bubblewrap (Linux, package `bubblewrap`): namespaces of their own, a read-only system, files in memory.

The program sees the system's programs and the Python that runs this one, an empty /tmp, and nothing else: no home, no
network, no other process. Called by root, it runs as a user without a name and without capabilities, never as root.
What bounds it: a control group where one can be made; otherwise the resource limits of that user, or of a user
namespace, which bind memory for each process alone, so that their sum is looked at all the time, and memory that would
belong to no process, or to several, is denied. Where neither binds, runs are refused.
"""

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tinker_cookbook.exceptions import ConfigurationError, SandboxError
from tinker_cookbook.sandbox.control_groups import Hierarchy, find_hierarchy
from tinker_cookbook.sandbox.host import HostSandbox, ScriptMaker
from tinker_cookbook.sandbox.sandbox_interface import SandboxLimits
from tinker_cookbook.sandbox.seccomp import open_filter, seccomp_filter
from tinker_cookbook.sandbox.supervision import Supervised, usage_below

INSTALL = "apt-get install bubblewrap"
OLDEST = (0, 7)
"""The first version that bounds the size of a tmpfs."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of the root that the program sees; links stay links."""
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
"""What programs need of /etc to start, without anything about this machine or its users."""
SHARED_MEMORY_BYTES = 16 << 20
FEW_FILES = 128
"""Open files of a process where no group counts what their buffers hold."""
_NAMELESS_USERS = (1 << 30, 1 << 30)
"""First user id for runs that root starts, and how many there are."""

ENTER = 'for file do shift; [ "$file" = -- ] && break; echo $$ > "$file" || exit 125; done; exec "$@"'
"""Enters control groups, up to `--`, and becomes the command behind it."""

END_SECONDS = 10.0
"""How long a sandbox may take to vanish."""

_slots = itertools.count()


@dataclass(frozen=True)
class Bounds:
    """What bounds the processes of a run.

    Attributes:
        groups: where control groups can be made; None: resource limits.
        as_root: root calls, so that another user must run the program.
    """

    groups: Hierarchy | None
    as_root: bool


class BubblewrapSandbox(HostSandbox):
    """Runs in bubblewrap."""

    name = "bubblewrap"

    def check(self) -> None:
        _program()
        find_bounds()

    @contextmanager
    def opened(
        self, script: ScriptMaker, limits: SandboxLimits, payload_bytes: int, keep: bool
    ) -> Generator[Supervised]:
        bounds = find_bounds()
        with ExitStack() as stack:
            files: tuple[int, ...] = ()
            if (denied := seccomp_filter(unmapped_memory=bounds.groups is not None)) is not None:
                files = (open_filter(denied),)
                stack.callback(os.close, files[0])
            program, *words = [*self.argv(limits, payload_bytes, bounds, *files), *script.argv(self.root)]
            env = {"PATH": os.defpath}  # of bubblewrap itself: what it inherits, the program could read
            if bounds.groups is None:
                told, tells = os.pipe()
                stack.callback(os.close, tells)
                stack.callback(os.close, told)
                argv = [program, "--info-fd", str(tells), *words]
                kill = partial(_await_end, told)
                yield Supervised(argv, env, script.end_mark, keep, kill=kill, usage=usage_below, files=(*files, tells))
                return
            try:
                group = bounds.groups.make(limits)
            except OSError as error:
                raise SandboxError(f"sandbox={self.name}: no control group can be made any more: {error}") from error
            stack.callback(group.remove)
            stack.callback(group.kill)
            argv = ["/bin/sh", "-c", ENTER, "enter", *group.entrances, "--", program, *words]
            yield Supervised(argv, env, script.end_mark, keep, group, files=files)

    def argv(self, limits: SandboxLimits, payload_bytes: int, bounds: Bounds, *filters: int) -> list[str]:
        """bubblewrap with its arguments, up to the script. `filters` are open files with denied system calls."""
        size = str((limits.disk_mb << 20) + 2 * payload_bytes)  # archive and files
        return [
            _program(),
            *_namespaces(bounds),
            *_system(),
            *("--proc", "/proc", "--dev", "/dev", *_zero(bounds), "--size", str(SHARED_MEMORY_BYTES)),
            *("--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--remount-ro", "/"),
            *("--clearenv", "--setenv", "PATH", _path(), "--setenv", "HOME", f"{self.root}/work"),
            *("--setenv", "LANG", "C.UTF-8", "--setenv", "PYTHONDONTWRITEBYTECODE", "1", "--chdir", "/tmp"),
            *(word for file in filters for word in ("--seccomp", str(file))),
            "--",
            *_privileges(bounds),
            *_resource_limits(limits, bounds),
        ]


def _await_end(told: int) -> None:
    """Wait until the first process of the sandbox is gone, and with it all others. It dies with bubblewrap.

    Args:
        told: where bubblewrap has written its id.
    """
    os.set_blocking(told, False)
    try:
        first = Path("/proc", str(json.loads(os.read(told, 1 << 16))["child-pid"]))
    except (BlockingIOError, ValueError, KeyError):
        return  # it was never started
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until:
        try:
            _, _, name_and_state = (first / "stat").read_text().partition("(")
            if not name_and_state.startswith("bwrap) ") or name_and_state.startswith("bwrap) Z"):
                return  # only its exit code is left, or the id is another's by now
        except OSError:
            return
        time.sleep(0.002)


def _namespaces(bounds: Bounds) -> list[str]:
    own = ["pid", "net", "ipc", "uts", "cgroup-try", *([] if bounds.as_root else ["user"])]
    # Root's capabilities are for setpriv, which becomes another user and gives them away.
    kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP") if bounds.as_root else ()
    capabilities = [*("--cap-drop", "ALL"), *(word for name in kept for word in ("--cap-add", name))]
    return [*(f"--unshare-{name}" for name in own), *capabilities, "--die-with-parent", "--new-session"]


@cache
def _system() -> list[str]:
    """The read-only part of the sandbox: the system's programs, and the Python that runs this."""
    words: list[str] = []
    for path in (Path("/", name) for name in SYSTEM):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    words += _readable_folder("/etc")
    for path in SETTINGS:
        words += ["--ro-bind-try", path, path]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        for above in reversed(prefix.parents[:-1]):
            words += _readable_folder(str(above))
        words += ["--ro-bind", str(prefix), str(prefix)]
    return words


def _zero(bounds: Bounds) -> list[str]:
    """Where no group counts it, /dev/full in place of /dev/zero: it reads the same, and gives nobody memory to share."""
    return [] if bounds.groups is not None else ["--dev-bind", "/dev/full", "/dev/zero"]


def _readable_folder(path: str) -> list[str]:
    """An empty folder, which bubblewrap would make for its owner alone."""
    return ["--perms", "0755", "--dir", path]


def _path() -> str:
    return f"{Path(sys.base_prefix).resolve() / 'bin'}:/usr/local/bin:/usr/bin:/bin"


def _privileges(bounds: Bounds) -> list[str]:
    if not bounds.as_root:
        return []
    user = str(_nameless_user())
    drop = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
    return ["/usr/bin/setpriv", "--reuid", user, "--regid", user, *drop]


def _nameless_user() -> int:
    """A user of its own for each run that is under way, so that the count of processes is that of one run."""
    first, count = _NAMELESS_USERS
    _, _, length = map(int, Path("/proc/self/uid_map").read_text().splitlines()[0].split())
    if length < first + count:
        first, count = length // 2, length // 2 - 1
    return first + (os.getpid() * 256 + next(_slots) % 256) % count


def _resource_limits(limits: SandboxLimits, bounds: Bounds) -> list[str]:
    seconds = int(limits.cpu_s) + 1
    words = [f"--cpu={seconds}:{seconds + 1}", "--core=0"]
    if bounds.groups is None:
        # What waits in pipes and sockets is counted nowhere else.
        words += [f"--nproc={limits.processes}", f"--as={limits.memory_mb << 20}", f"--nofile={FEW_FILES}"]
    else:
        words += ["--nofile=1024"]
    return ["/usr/bin/prlimit", *words, "--"]


@cache
def _program() -> str:
    """The path of bwrap. Raises ConfigurationError if it is missing, too old or not allowed to work."""
    refused = partial("sandbox=bubblewrap: {}; {}, or choose another sandbox (docs/sandbox.md)".format)
    found = shutil.which("bwrap")
    if found is None:
        raise ConfigurationError(refused("bwrap is not installed", INSTALL))
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:2]))
    if version < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ConfigurationError(refused(f"bwrap is {said.strip() or 'of an unknown version'}", f"install {wanted}"))
    if missing := [tool for tool in ("setpriv", "prlimit", "tar") if not Path("/usr/bin", tool).exists()]:
        raise ConfigurationError(refused(f"/usr/bin/{missing[0]} is missing", "apt-get install util-linux tar"))
    return found


@cache
def find_bounds() -> Bounds:
    """What bounds runs on this machine. Raises ConfigurationError if bubblewrap does not work, or nothing would."""
    bounds = Bounds(find_hierarchy(), os.geteuid() == 0)
    refusal = None if bounds.groups is not None else _why_no_limits_bind(bounds)
    if refusal is not None:
        raise ConfigurationError(f"sandbox=bubblewrap: {refusal}, so nothing would bound memory and processes")
    probe = BubblewrapSandbox().argv(SandboxLimits(), 0, bounds)
    tried = subprocess.run([*probe, "true"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if tried.returncode:
        raise ConfigurationError(
            f"sandbox=bubblewrap does not work here ({tried.stderr.strip()[-200:] or tried.returncode}); allow user "
            "namespaces to this program, or choose another sandbox (docs/sandbox.md)"
        )
    return bounds


def _why_no_limits_bind(bounds: Bounds) -> str | None:
    """Why resource limits would not bound a run; None if they do."""
    without = "there is no writable control group, and"
    if seccomp_filter() is None:
        return f"{without} no filter of system calls for {platform.machine()}"
    if bounds.as_root:
        _, _, length = map(int, Path("/proc/self/uid_map").read_text().splitlines()[0].split())
        return None if length > 1024 else f"{without} no other user to run as"
    # From Linux 5.14 on, processes are counted within the user namespace.
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return None if release >= (5, 14) else f"{without} Linux is older than 5.14"
