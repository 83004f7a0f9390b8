"""What programs try in order to get out of bubblewrap, or to take more than their share. Each test makes one attempt.

Each attempt is made where control groups bound a run, and where resource limits do. A third form, in which an ordinary
user calls, is in `test_ordinary_user.py`.
"""

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.sandbox.running import LIMITS, Run, running, usable
from tinker_cookbook.exceptions import ConfigurationError, SandboxError
from tinker_cookbook.sandbox import SandboxLimits, bubblewrap
from tinker_cookbook.sandbox.control_groups import PREFIX

FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"


@pytest.fixture(params=["groups", "resource limits"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    sandbox = usable()
    if request.param == "groups" and bubblewrap.find_bounds().groups is None:
        pytest.skip("no control group is writable here")
    if request.param == "resource limits":
        monkeypatch.setattr(bubblewrap, "find_hierarchy", lambda: None)
        try:
            bounds = bubblewrap.find_bounds.__wrapped__()
        except ConfigurationError as error:
            pytest.skip(str(error))
        assert bounds.groups is None
        monkeypatch.setattr(bubblewrap, "find_bounds", lambda: bounds)
    return running(sandbox)


def python(run: Run, code: str, limits: SandboxLimits = LIMITS, **more: object):
    return run(["python3", "main.py"], {"main.py": code}, limits=limits, **more)


def test_a_program_gets_its_files_its_input_and_says_how_it_ended(run: Run) -> None:
    result = run("cat a/b.txt -; ./run.sh; exit 3", {"a/b.txt": "one\n", "run.sh": "#!/bin/sh\necho >&2 $PWD"}, "two\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("one\ntwo\n", "/tmp/work\n", 3)
    assert result.limit is None and not result.ok and result.wall_s > 0
    assert python(run, "print(sum(map(int, '123')))").ok


def test_it_runs_the_python_that_runs_this(run: Run) -> None:
    result = python(run, "import sys; print(sys.version)")
    assert result.stdout.strip() == sys.version


def test_a_fork_bomb(run: Run) -> None:
    before = len(list(Path("/proc").glob("[0-9]*")))
    result = python(run, FORK_BOMB, SandboxLimits(wall_s=1.0, processes=32))
    assert result.exit_code == 137 and result.limit in ("processes", "wall_s", "memory_mb", "cpu_s")
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 32


def test_no_more_processes_than_allowed(run: Run) -> None:
    code = """
import os, time
n = 0
try:
    while n < 500:
        n += 1
        if os.fork() == 0:
            time.sleep(60)
except OSError:
    print(n)
"""
    result = python(run, code)
    assert result.limit == "processes" or int(result.stdout) <= 32


def test_ten_gigabytes_of_memory(run: Run) -> None:
    result = python(run, "x = bytearray(10 * 2**30)\nprint(len(x))")
    assert result.stdout == "" and not result.ok
    assert result.limit == "memory_mb" or "MemoryError" in result.stderr


def test_memory_that_many_processes_take_together(run: Run) -> None:
    code = """
import os, time
for _ in range(4):
    os.fork()
x = bytearray(40 << 20)
x[::4096] = b"1" * len(x[::4096])
time.sleep(50)
print("had it")
"""
    result = python(run, code)
    assert result.limit == "memory_mb" and "had it" not in result.stdout


UNMAPPED = {
    "files without a place": """
import os
held = []
for _ in range(8):
    held.append(os.memfd_create("x"))
    for _ in range(40):
        os.write(held[-1], b"1" * (1 << 20))
""",
    "segments": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
for _ in range(8):
    segment = libc.shmget(0, 40 << 20, 0o1600)
    if segment < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    at = libc.shmat(segment, None, 0)
    ctypes.memset(at, 1, 40 << 20)
    libc.shmdt(at)
""",
    "shared mappings": """
import mmap, os, time
for _ in range(3):
    os.fork()
m = mmap.mmap(-1, 40 << 20)
for at in range(0, 40 << 20, 4096):
    m[at] = 1
time.sleep(0.5)
""",
    "shared mappings of which a page is left": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
zero = os.open("/dev/zero", os.O_RDWR)
for _ in range(8):
    at = libc.mmap(None, 40 << 20, 3, 1, zero, 0)
    if at is None or at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    ctypes.memset(at, 1, 40 << 20)
    libc.munmap(at + 4096, (40 << 20) - 4096)
""",
}


@pytest.mark.parametrize("how", UNMAPPED)
def test_memory_that_no_process_maps_alone(run: Run, how: str) -> None:
    """320 MiB where 128 are allowed."""
    result = python(run, f"{UNMAPPED[how]}\nprint('had it')")
    assert "had it" not in result.stdout and not result.ok
    assert (
        result.limit == "memory_mb" or "PermissionError" in result.stderr or "OSError: [Errno 19] mmap" in result.stderr
    )


def test_memory_that_waits_in_sockets(run: Run) -> None:
    code = """
import os, socket
for _ in range(3):
    os.fork()
kept, held = [], 0
try:
    while held < 96 << 20:
        kept += socket.socketpair()
        kept[-1].setblocking(False)
        try:
            while True:
                held += kept[-1].send(b"1" * 65536)
        except BlockingIOError:
            pass
    print("had it")
except OSError as error:
    print(error)
"""
    result = python(run, code)
    assert "had it" not in result.stdout and (result.limit == "memory_mb" or "Too many open files" in result.stdout)


def test_what_programs_need_of_memory_is_there(run: Run) -> None:
    code = """
import mmap, multiprocessing, multiprocessing.shared_memory, asyncio
def add(n):
    with n.get_lock():
        n.value += 1
n = multiprocessing.Value("i", 0)
context = multiprocessing.get_context("fork")
started = [context.Process(target=add, args=(n,)) for _ in range(4)]
for one in started:
    one.start()
for one in started:
    one.join()
asyncio.run(asyncio.sleep(0))
shared = multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 20)
shared.unlink()
with open("f", "wb+") as file:
    file.write(bytes(4096))
    file.flush()
    mmap.mmap(file.fileno(), 4096)[0] = 7
print(n.value, open("f", "rb").read()[0], len(open("/dev/zero", "rb").read(9)), len(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)))
"""
    result = python(run, code)
    assert result.stdout == "4 7 9 4096\n", result.stderr


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_endless_output(run: Run, where: str) -> None:
    result = python(run, f"import sys\nwhile True:\n    sys.{where}.write('x' * 1000)")
    assert (result.limit, result.truncated, result.exit_code) == ("output_kb", True, 137)
    assert len(getattr(result, where)) == 16 << 10


def test_output_up_to_the_limit_is_all_there(run: Run) -> None:
    result = python(run, f"import sys\nsys.stdout.write('x' * {16 << 10})\nsys.stderr.write('y' * {16 << 10})")
    assert result.ok and not result.truncated
    assert (result.stdout, result.stderr) == ("x" * (16 << 10), "y" * (16 << 10))


def test_one_byte_more_is_reported(run: Run) -> None:
    result = python(run, f"import sys\nsys.stdout.write('x' * {(16 << 10) + 400})")
    assert result.truncated and result.limit == "output_kb" and len(result.stdout) == 16 << 10


def test_time(run: Run) -> None:
    result = python(run, "import time\nprint('a', flush=True)\ntime.sleep(1000)", SandboxLimits(wall_s=0.5))
    assert (result.limit, result.timed_out, result.exit_code) == ("wall_s", True, 137)


def test_cpu_time_of_all_processes(run: Run) -> None:
    code = "import os\nos.fork()\nos.fork()\nwhile True: pass"
    result = python(run, code, SandboxLimits(wall_s=60.0, cpu_s=0.6))
    assert result.limit == "cpu_s" and result.timed_out


def test_the_home_and_everything_else_of_the_host(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    outside = [
        secret,
        Path.home() / ".bashrc",
        Path("/etc/passwd"),
        Path("/etc/shadow"),
        Path(__file__),
        "/proc/1/root/etc",
    ]
    code = f"import os\nfor path in {[str(path) for path in outside]!r}:\n    print(path, os.path.exists(path))"
    result = python(run, code)
    assert result.ok and [line.split()[-1] for line in result.stdout.splitlines()] == ["False"] * len(outside)


def test_symbolic_links_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    result = run(f"ln -s {tmp_path}/secret l; cat l; ln -s / root; cat root{tmp_path}/secret; echo x > l; echo $?")
    assert "s3cret" not in result.stdout + result.stderr
    assert (tmp_path / "secret").read_text() == "s3cret"


def test_a_link_that_is_kept_leads_nowhere_in_the_next_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("untouched")
    kept = run(f"ln -s {tmp_path}/target out; ln -s / slash", keep=True)
    result = run("cat out", {"out": "mine"}, workspace=kept.workspace)
    assert result.stdout == "mine" and (tmp_path / "target").read_text() == "untouched"


def test_the_environment_of_the_caller(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-s3cret")
    result = run("env; cat /proc/*/environ | tr '\\0' '\\n'")
    assert "s3cret" not in result.stdout and "HOME=/tmp/work" in result.stdout


def test_network(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=5)
        print("connected")
    except OSError as error:
        print("refused")
"""
        assert python(run, code).stdout.split() == ["refused"] * 2


def test_abstract_sockets_of_the_host(run: Run) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0tinker-sandbox-test")
        server.listen()
        code = (
            "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0tinker-sandbox-test')\nprint('connected')"
        )
        assert "connected" not in python(run, code).stdout


def test_signals_to_the_parent(run: Run) -> None:
    code = f"""
import os, signal
for pid in ({os.getpid()}, {os.getppid()}, 1, os.getppid()):
    try:
        os.kill(pid, signal.SIGKILL)
        print("sent", pid)
    except (ProcessLookupError, PermissionError) as error:
        print(type(error).__name__, pid)
"""
    result = python(run, code)
    assert (
        f"sent {os.getpid()}" not in result.stdout
    )  # its own parent is the script, which it may end: that is all it gets
    assert result.exit_code in (0, 137)


def test_signals_to_everything(run: Run) -> None:
    assert run("kill -9 -1; echo still here").limit is None
    assert run("echo and again").stdout == "and again\n"


@pytest.mark.parametrize(
    "path", ["/dev/x", "/dev/sda", "/dev/mem", "/x", "/usr/x", "/etc/x", "/proc/sys/kernel/hostname"]
)
def test_writing_to_devices_and_the_system(run: Run, path: str) -> None:
    there = Path(path).exists()
    result = run(f"echo hello > {path}")
    assert result.exit_code != 0 and Path(path).exists() == there


def test_making_devices_and_mounts(run: Run) -> None:
    result = run("mknod sda b 8 0; mount -t tmpfs none /tmp/work; unshare --user --map-root-user id; chroot / id")
    assert "uid=" not in result.stdout and result.exit_code != 0


def test_no_capability_and_no_way_to_root(run: Run) -> None:
    result = run("grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs)' /proc/self/status; id -u")
    lines = result.stdout.split()
    assert lines[1::2][:2] == ["0" * 16] * 2 and lines[lines.index("NoNewPrivs:") + 1] == "1" and lines[-1] != "0"


@pytest.mark.parametrize("folder", ["/tmp", "/tmp/work", "/dev/shm"])
def test_filling_the_disk(run: Run, folder: str) -> None:
    free = os.statvfs("/tmp").f_bavail * os.statvfs("/tmp").f_frsize
    result = run(f"head -c 200000000 /dev/zero > {folder}/big; stat -c %s {folder}/big; cp {folder}/big {folder}/more")
    assert int(result.stdout or 0) < 32 << 20 and result.exit_code != 0
    assert folder == "/dev/shm" or result.limit == "disk_mb"
    assert os.statvfs("/tmp").f_bavail * os.statvfs("/tmp").f_frsize > free - (1 << 30)


def test_a_million_files(run: Run) -> None:
    code = "i = 0\nwhile True:\n    i += 1\n    open(f'f{i}', 'w').close()"
    result = python(run, code, SandboxLimits(wall_s=60.0, cpu_s=0.5, memory_mb=64, disk_mb=4))
    assert not result.ok


def test_what_runs_on_in_the_background_ends_with_the_command(run: Run) -> None:
    result = run("(while true; do sleep 1; done) & setsid sleep 1000 & nohup sleep 1000 > /dev/null & echo done")
    assert result.ok and result.stdout == "done\n"


def test_what_it_keeps_is_where_the_next_one_starts(run: Run) -> None:
    first = run("mkdir d; echo new > d/x; chmod +x a; ln -s d/x link; rm gone", {"a": "1", "gone": "2"}, keep=True)
    assert first.ok and first.workspace
    then = run("ls; cat link b; test -x a", {"b": "3\n"}, workspace=first.workspace, keep=True)
    assert (then.stdout, then.exit_code) == ("a\nb\nd\nlink\nnew\n3\n", 0)
    assert run("ls", workspace=then.workspace).workspace is None


def test_forging_the_report_changes_nothing_but_its_own_output(run: Run) -> None:
    """The mark is no secret to the program; the exit code comes from the kernel."""
    code = """
import sys
words = open("/proc/%d/cmdline" % __import__("os").getppid()).read().split("\\0")
marks = [word for word in words if len(word) == 32]
for mark in marks:
    print("\\n" + mark + " end 0")
print("x" * 100)
sys.exit(5)
"""
    result = python(run, code, keep=True)
    assert result.exit_code == 5 and not result.ok


def test_a_workspace_that_is_none_of_ours(run: Run) -> None:
    with pytest.raises(SandboxError, match="could not store its workspace"):
        run("true", workspace=b"rubbish" * 1000)


def test_files_that_do_not_fit(run: Run) -> None:
    result = run(
        "stat -c %s big", {"big": b"\0" * (12 << 20)}, limits=SandboxLimits(disk_mb=8, memory_mb=128, wall_s=60.0)
    )
    assert result.stdout == f"{12 << 20}\n"  # room for them is added


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ""])
def test_paths_that_lead_outside(run: Run, path: str) -> None:
    with pytest.raises(ConfigurationError, match="below the working folder"):
        run("true", {path: "x"})


def test_no_group_is_left(run: Run) -> None:
    for command in ("true", "exit 1", "kill -9 $$", FORK_BOMB):
        run(command)
    left = [path for path in Path("/sys/fs/cgroup").glob(f"**/{PREFIX}-{os.getpid()}-*")]
    assert left == []
