"""Hundreds of programs from eight threads, well-behaved and not, leave nothing behind."""

import asyncio
import os
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sandbox.running import running, usable
from tinker_cookbook.sandbox import Sandbox, SandboxLimits, bubblewrap
from tinker_cookbook.sandbox.bubblewrap import _NAMELESS_USERS
from tinker_cookbook.sandbox.control_groups import PREFIX

COUNT, THREADS = 500, 8
# Memory for as many processes as are allowed: those of "forks" must meet their own limit first.
LIMITS = SandboxLimits(wall_s=120.0, cpu_s=2.0, memory_mb=256, processes=16, output_kb=8, disk_mb=4)

PROGRAMS = {
    "prints": ("echo $((6 * 7))", 0, None),
    "fails": ("exit 9", 9, None),
    "kills itself": ("kill -9 $$", 137, None),
    "kills everything": ("kill -9 -1", None, None),
    "writes files": ("for i in 1 2 3; do echo x > f$i; done; mkdir -p /tmp/a/b; ls | wc -l", 0, None),
    "leaves a process": ("setsid sleep 1000 & echo left", 0, None),
    "prints without end": ("yes", 137, "output_kb"),
    "fills the disk": ("head -c 100000000 /dev/zero > big", 1, "disk_mb"),
    "forks": ("python3 -c 'import os\nwhile True: os.fork()'", None, "processes"),
    "is late": ("sleep 1000", 137, "wall_s"),
}


def left_over() -> dict[str, set[str]]:
    """What a run could leave: processes and files of its users, children, groups, mounts and open files of this process."""
    first, count = _NAMELESS_USERS
    own = {first + (os.getpid() * 256 + slot) % count for slot in range(256)}
    temporary = Path(tempfile.gettempdir())
    return {
        "processes": {folder.name for folder in Path("/proc").glob("[0-9]*") if _user(folder) in own},
        "files": {str(path) for path in temporary.iterdir() if _user(path) in own},
        "children": {folder.name for folder in Path("/proc").glob("[0-9]*") if _parent(folder) == os.getpid()},
        "groups": {str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{PREFIX}-{os.getpid()}-*")},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "open files": _open_files(),
    }


def _open_files() -> set[str]:
    """What is open, whatever its number; the k-th of several that are called the same has k in its name."""
    targets: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            targets[os.readlink(f"/proc/self/fd/{number}")] += 1
    return {f"{target} {k}" for target, count in targets.items() for k in range(count)}


def _user(folder: Path) -> int:
    try:
        return folder.stat().st_uid
    except OSError:
        return -1


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def run_some(sandbox: Sandbox, numbers: range) -> list[tuple[str, int | None, str | None, str]]:
    async def main() -> list[tuple[str, int | None, str | None, str]]:
        results = []
        for number in numbers:
            name = list(PROGRAMS)[number % len(PROGRAMS)]
            limits = SandboxLimits(wall_s=0.3) if name == "is late" else LIMITS
            result = await sandbox.run({"n": str(number)}, PROGRAMS[name][0], limits=limits, keep=number % 3 == 0)
            results.append((name, result.exit_code, result.limit, result.stdout))
        return results

    return asyncio.run(main())


def all_of_them(count: int, threads: int) -> None:
    sandbox = usable()
    run_some(sandbox, range(threads))  # the threads of runs stay
    before = left_over()
    with ThreadPoolExecutor(threads) as pool:
        shares = [range(start, count, threads) for start in range(threads)]
        results = [result for share in pool.map(run_some, [sandbox] * threads, shares) for result in share]
    assert len(results) == count
    seen: Counter[str] = Counter()
    for name, exit_code, limit, stdout in results:
        _, wanted_code, wanted_limit = PROGRAMS[name]
        assert (limit, name) == (wanted_limit, name)
        assert wanted_code is None or (exit_code, name) == (wanted_code, name)
        assert name != "prints" or stdout == "42\n"
        seen[name] += 1
    assert len(seen) == len(PROGRAMS)
    after = left_over()
    assert {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]} == {}


def test_a_few_programs_leave_nothing_behind() -> None:
    all_of_them(20, 4)


def test_nothing_is_left_without_control_groups_either(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = usable()
    monkeypatch.setattr(bubblewrap, "find_hierarchy", lambda: None)
    bounds = bubblewrap.find_bounds.__wrapped__()
    monkeypatch.setattr(bubblewrap, "find_bounds", lambda: bounds)
    daemon = "setsid sh -c 'exec < /dev/null > /dev/null 2>&1; sleep 1000' & sleep 0.05"
    run = running(sandbox)
    run("true")
    before = left_over()
    for command in (daemon, f"{daemon}; sleep 1000", f"{daemon}; kill -9 $$", "kill -9 -1") * 3:
        run(command, limits=SandboxLimits(wall_s=0.4))
        after = left_over()
        assert {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]} == {}, command


@pytest.mark.sandbox
def test_five_hundred_programs_from_eight_threads_leave_nothing_behind() -> None:
    all_of_them(COUNT, THREADS)
