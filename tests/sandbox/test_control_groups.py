"""Where groups are made, on trees of folders that look like those of the kernel; `test_bubblewrap.py` uses real ones."""

import os
from pathlib import Path

import pytest

from tinker_cookbook.sandbox import control_groups
from tinker_cookbook.sandbox.control_groups import PREFIX, Hierarchy, find_hierarchy
from tinker_cookbook.sandbox.sandbox_interface import SandboxLimits


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder made here gets the files that the kernel would put there, and may be removed with them."""
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def make(folder: Path) -> None:
        mkdir(folder)
        names = [
            "cgroup.procs",
            "pids.max",
            "pids.events",
            "memory.max",
            "memory.swap.max",
            "memory.events",
            "cpu.stat",
        ]
        names += ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control", "cpuacct.usage"]
        given = folder.parent / "cgroup.subtree_control"
        if given.exists() and not {"+memory", "+pids"} & set(given.read_text().split()):
            names = [name for name in names if name.startswith("cgroup")]
        for name in names:
            if given.exists() or name not in ("memory.max", "memory.swap.max"):
                (folder / name).touch()

    def remove(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        rmdir(folder)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)


def version_2(tmp_path: Path, own: str) -> Hierarchy | None:
    mounts, groups = tmp_path / "mounts", tmp_path / "own"
    mounts.write_text(f"cgroup2 {tmp_path}/fs cgroup2 rw,nosuid 0 0\n")
    groups.write_text(f"0::{own}\n")
    return find_hierarchy(groups, mounts)


def folder(tmp_path: Path, path: str) -> Path:
    made = tmp_path / "fs" / path
    os.makedirs(made)
    (made / "cgroup.subtree_control").touch()
    return made


def test_version_2_takes_the_nearest_group_that_gives_controllers(tmp_path: Path, kernel: None) -> None:
    own = folder(tmp_path, "user.slice/app.slice/mine.scope")
    (tmp_path / "fs" / "cgroup.subtree_control").touch()
    for above in (own.parent, own.parent.parent):
        (above / "cgroup.subtree_control").touch()
    os.remove(own / "cgroup.subtree_control")  # as the kernel refuses to divide a group with processes
    (own / "cgroup.subtree_control").symlink_to("/nowhere/at/all")
    found = version_2(tmp_path, "/user.slice/app.slice/mine.scope")
    assert found is not None and found.version == 2 and found.parents["memory"] == own.parent
    group = found.make(SandboxLimits(memory_mb=100, processes=7))
    made = group.folders["memory"]
    assert (made / "memory.max").read_text() == str(100 << 20) and (made / "memory.swap.max").read_text() == "0"
    assert (made / "pids.max").read_text() == str(7 + control_groups.EXTRA_PROCESSES)
    assert group.entrances == [str(made / "cgroup.procs")]


def test_version_2_reports_what_was_reached(tmp_path: Path, kernel: None) -> None:
    parent = folder(tmp_path, "a")
    (parent / "cgroup.subtree_control").write_text("+memory +pids")
    group = Hierarchy(2, {"memory": parent, "pids": parent}).make(SandboxLimits())
    made = group.folders["memory"]
    assert group.reached() is None and group.cpu_seconds() is None
    (made / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (made / "memory.events").write_text("low 0\nmax 4\noom 1\noom_kill 0\n")
    (made / "pids.events").write_text("max 0\n")
    assert group.reached() is None and group.cpu_seconds() == 1.5
    (made / "pids.events").write_text("max 3\n")
    assert group.reached() == "processes"
    (made / "memory.events").write_text("low 0\nmax 4\noom 1\noom_kill 2\n")
    assert group.reached() == "memory_mb"
    group.kill()
    assert (made / "pids.max").read_text() == "0"
    group.remove()
    assert not made.exists()


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path, kernel: None) -> None:
    for name in ("memory/docker/abc", "pids/docker/abc", "cpuacct"):
        os.makedirs(tmp_path / "fs" / name)
    mounts, own = tmp_path / "mounts", tmp_path / "own"
    mounts.write_text(
        "".join(f"cgroup {tmp_path}/fs/{name} cgroup rw,{name} 0 0\n" for name in ("memory", "pids", "cpuacct"))
    )
    own.write_text("8:pids:/docker/abc\n4:memory:/docker/abc\n2:cpuacct:/docker/abc\n")
    found = find_hierarchy(own, mounts)
    assert found is not None and found.version == 1
    assert found.parents["memory"] == tmp_path / "fs/memory/docker/abc"
    assert found.parents["cpuacct"] == tmp_path / "fs/cpuacct"  # a container sees its own group as the root
    group = found.make(SandboxLimits(memory_mb=64))
    assert (group.folders["memory"] / "memory.memsw.limit_in_bytes").read_text() == str(64 << 20)
    (group.folders["cpuacct"] / "cpuacct.usage").write_text("2500000000")
    (group.folders["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group.cpu_seconds() == 2.5 and group.reached() == "memory_mb"


@pytest.mark.parametrize("own", ["/", "/a"])
def test_nothing_where_no_controller_is_given(
    tmp_path: Path, kernel: None, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    folder(tmp_path, "a")
    (tmp_path / "fs" / "cgroup.subtree_control").touch()
    monkeypatch.setattr(control_groups, "_delegate", lambda folder: None)
    assert version_2(tmp_path, own) is None


def test_groups_of_programs_that_were_killed_are_removed(tmp_path: Path, kernel: None) -> None:
    parent = folder(tmp_path, "a")
    ended, running = parent / f"{PREFIX}-999999999-0", parent / f"{PREFIX}-{os.getpid()}-0"
    for group in (ended, running):
        os.makedirs(group)
    Hierarchy(2, {"memory": parent, "pids": parent}).remove_stale()
    assert not ended.exists() and running.exists()
