"""What holds for every sandbox: names, refusals, folders that last, cancellation; and the one without isolation."""

import asyncio
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import chz
import pytest

from tests.sandbox.running import LIMITS, running, usable
from tests.waiting import HANG_SECONDS
from tinker_cookbook.exceptions import ConfigurationError, SandboxError
from tinker_cookbook.sandbox import (
    Sandbox,
    SandboxBackend,
    SandboxInterface,
    SandboxKeys,
    SandboxLimits,
    SandboxResource,
    SandboxResult,
    SandboxSession,
    SandboxTerminatedError,
    bubblewrap,
    get_sandbox,
    register_sandbox,
)
from tinker_cookbook.sandbox.backends import SANDBOXES, unregister_sandbox


class TestNames:
    def test_model_code_is_never_run_without_a_word(self) -> None:
        with pytest.raises(ConfigurationError, match=r"bubblewrap.*only with sandbox=unsafe_subprocess"):
            get_sandbox(None)

    def test_an_unknown_name_lists_the_known_ones_without_the_unsafe_one(self) -> None:
        with pytest.raises(ConfigurationError, match="sandbox='bublewrap' is unknown") as raised:
            get_sandbox("bublewrap")
        assert "docker, podman, modal, sandbox_fusion; without isolation" in str(raised.value)

    @pytest.mark.parametrize("name", SANDBOXES)
    def test_every_sandbox_is_picklable_and_says_its_name(self, name: str) -> None:
        assert pickle.loads(pickle.dumps(get_sandbox(name))).name == name

    def test_names_of_tinker_cookbook(self) -> None:
        assert get_sandbox(SandboxBackend.SANDBOXFUSION).name == "sandbox_fusion"
        assert get_sandbox(SandboxBackend.MODAL).name == "modal"

    @pytest.mark.parametrize(
        ("name", "key"),
        [("bubblewrap", "url"), ("bubblewrap", "image"), ("docker", "url"), ("sandbox_fusion", "image")],
    )
    def test_what_a_sandbox_does_not_take(self, name: str, key: str) -> None:
        with pytest.raises(ConfigurationError, match=f"sandbox_{key}='x': sandbox={name} takes none"):
            get_sandbox(name, **{key: "x"})

    def test_a_custom_one(self) -> None:
        register_sandbox("mine", lambda url, image: get_sandbox("unsafe_subprocess"))
        try:
            assert get_sandbox("mine").name == "unsafe_subprocess"
            with pytest.raises(ConfigurationError, match="taken"):
                register_sandbox("mine", lambda url, image: get_sandbox("docker"))
        finally:
            unregister_sandbox("mine")
        with pytest.raises(ConfigurationError, match="unknown"):
            get_sandbox("mine")

    def test_what_runs_programs_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        Config(sandbox="unsafe_subprocess").get_sandbox()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "without isolation, with your rights" in caplog.text

    @pytest.mark.parametrize("field", ["wall_s", "cpu_s", "memory_mb", "processes", "output_kb", "disk_mb"])
    def test_limits_of_nothing(self, field: str) -> None:
        with pytest.raises(ValueError, match=field):
            SandboxLimits(**{field: type(getattr(SandboxLimits(), field))(0)})


@chz.chz(typecheck=True)
class Config(SandboxKeys):
    """An environment with programs."""


class TestBubblewrapIsMissing:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(bubblewrap, "_program", bubblewrap._program.__wrapped__)
        monkeypatch.setattr(bubblewrap, "find_bounds", bubblewrap.find_bounds.__wrapped__)

    def stand_in(self, tmp_path: Path, text: str) -> None:
        program = tmp_path / "bwrap"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def test_one_sentence_with_the_fix(self) -> None:
        with pytest.raises(ConfigurationError, match="bwrap is not installed; apt-get install bubblewrap"):
            Config().get_sandbox()

    def test_too_old(self, tmp_path: Path) -> None:
        self.stand_in(tmp_path, "echo bubblewrap 0.4.1")
        with pytest.raises(ConfigurationError, match=r"bwrap is bubblewrap 0\.4\.1; install 0\.7"):
            Config().get_sandbox()

    def test_it_does_not_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bubblewrap, "find_hierarchy", lambda: None)
        self.stand_in(tmp_path, '[ "$1" = --version ] && echo bubblewrap 0.11.0 || { echo no namespaces >&2; exit 1; }')
        with pytest.raises(ConfigurationError, match=r"does not work here \(no namespaces\); allow user namespaces"):
            Config().get_sandbox()

    def test_nothing_would_bound_a_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bubblewrap, "find_hierarchy", lambda: None)
        monkeypatch.setattr(bubblewrap, "seccomp_filter", lambda **_: None)
        self.stand_in(tmp_path, "echo bubblewrap 0.11.0")
        with pytest.raises(
            ConfigurationError, match=r"no writable control group.* nothing would bound memory and processes"
        ):
            Config().get_sandbox()

    def test_an_ordinary_user_of_an_old_kernel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bubblewrap, "find_hierarchy", lambda: None)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr("platform.release", lambda: "5.10.0-8-amd64")
        self.stand_in(tmp_path, "echo bubblewrap 0.11.0")
        with pytest.raises(ConfigurationError, match=r"Linux is older than 5\.14"):
            Config().get_sandbox()


@pytest.fixture(params=["unsafe_subprocess", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return usable(request.param)


class TestEverySandbox:
    def test_text_that_is_no_utf_8(self, sandbox: Sandbox) -> None:
        assert running(sandbox)("printf 'a\\377b'").stdout == "a�b"

    def test_bytes_and_surrogates_go_in_as_they_are(self, sandbox: Sandbox) -> None:
        result = running(sandbox)("od -An -tx1 x; od -An -tx1", {"x": b"\xff\x00"}, "\udcff")
        assert result.stdout.split() == ["ff", "00", "ff"]

    def test_input_that_nobody_reads(self, sandbox: Sandbox) -> None:
        assert running(sandbox)("true", stdin="x" * 1_000_000, limits=chz.replace(LIMITS, disk_mb=16)).ok

    def test_a_command_of_words_is_not_read_by_a_shell(self, sandbox: Sandbox) -> None:
        assert running(sandbox)(["echo", "$HOME; a  'b'"]).stdout == "$HOME; a  'b'\n"

    def test_runs_at_the_same_time_do_not_see_each_other(self, sandbox: Sandbox) -> None:
        async def main() -> list[SandboxResult]:
            runs = [sandbox.run({"x": str(i)}, "sleep 0.1; cat *; ls", limits=LIMITS) for i in range(6)]
            return await asyncio.gather(*runs)

        assert [result.stdout for result in asyncio.run(main())] == [f"{i}x\n" for i in range(6)]

    def test_a_cancelled_run_leaves_nothing(self, sandbox: Sandbox) -> None:
        mark = f"sleep 10{os.getpid()}.5"

        def is_running() -> bool:
            return any(
                mark.encode() in _cmdline(folder).replace(b"\0", b" ") for folder in Path("/proc").glob("[0-9]*")
            )

        async def main() -> None:
            task = asyncio.create_task(sandbox.run({}, f"{mark}; true", limits=LIMITS))
            while not is_running():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not is_running()

        asyncio.run(main())


def _cmdline(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""


class TestSession:
    def test_the_folder_lasts(self, sandbox: Sandbox) -> None:
        async def main() -> None:
            session = SandboxSession(sandbox, LIMITS, {"a.txt": "1\n"})
            assert isinstance(session, SandboxInterface)
            assert (await session.run_command("echo 2 >> a.txt; mkdir -p d/e")).ok
            assert (await session.run_command("pwd; cat ../../a.txt", workdir="d/e")).stdout.endswith("/d/e\n1\n2\n")
            assert (await session.write_file("d/new/x.sh", "echo $1 done", executable=True)).ok
            assert (await session.run_command("d/new/x.sh well")).stdout == "well done\n"
            assert (await session.read_file("d/new/x.sh", max_bytes=4)).stdout == "echo"
            assert (await session.read_file("missing")).exit_code == 1
            assert (await session.run_command("exit 7", workdir="no/such")).exit_code == 1
            await session.send_heartbeat()
            await SandboxResource(session).cleanup()
            with pytest.raises(SandboxTerminatedError, match="removed"):
                await session.run_command("true")
            with pytest.raises(SandboxTerminatedError):
                await session.send_heartbeat()

        asyncio.run(main())

    def test_trying_out_and_being_killed_change_nothing(self, sandbox: Sandbox) -> None:
        async def main() -> None:
            session = SandboxSession(sandbox, LIMITS, {"a": "1"})
            assert (await session.try_out("rm a; ls", files={"b": "2"})).stdout == "b\n"
            killed = await session.run("rm a; sleep 1000", limits=SandboxLimits(wall_s=0.3))
            assert killed.timed_out
            assert (await pickle.loads(pickle.dumps(session)).run("ls")).stdout == "a\n"

        asyncio.run(main())

    def test_a_command_s_time_is_its_own(self, sandbox: Sandbox) -> None:
        session = SandboxSession(sandbox, SandboxLimits(wall_s=0.01))
        assert asyncio.run(session.run_command("sleep 0.1; echo over", timeout=int(HANG_SECONDS))).stdout == "over\n"


class TestUnsafeSubprocess:
    def test_it_leaves_no_folder_and_no_child(self) -> None:
        pattern = Path(tempfile.gettempdir()).glob("tinker-unsafe-*")
        before = set(pattern)
        result = running(usable("unsafe_subprocess"))("sleep 1000 & echo $!; mkdir d; chmod 0 d")
        assert result.ok and set(Path(tempfile.gettempdir()).glob("tinker-unsafe-*")) == before
        child = Path("/proc", result.stdout.strip(), "stat")
        assert not child.exists() or child.read_text().split()[2] == "Z"

    def test_secrets_of_the_environment_stay_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-s3cret")
        assert "s3cret" not in running(usable("unsafe_subprocess"))("env").stdout

    def test_what_fails_outside_of_the_program_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sandbox = usable("unsafe_subprocess")
        monkeypatch.setattr("tinker_cookbook.sandbox.packing.SCRIPT", "echo broken >&2; exit 3")
        with pytest.raises(SandboxError, match=r"did not start the program \(exit code 3\): broken"):
            running(sandbox)("true")


def test_a_run_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    """Killed at any instant, as a training run may be: bubblewrap dies with its parent, and all in it with bubblewrap."""
    usable()
    mark = f"sleep 20{os.getpid()}.5"
    code = f"""
import asyncio
from tinker_cookbook.sandbox import SandboxLimits, get_sandbox
asyncio.run(get_sandbox("bubblewrap").run({{}}, {mark!r}, limits=SandboxLimits(wall_s=1000.0)))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)

    def is_running() -> bool:
        return any(mark.encode() in _cmdline(folder).replace(b"\0", b" ") for folder in Path("/proc").glob("[0-9]*"))

    async def until(wanted: bool) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while is_running() != wanted:
                assert process.poll() is None or not wanted
                await asyncio.sleep(0.02)

    asyncio.run(until(True))
    process.kill()
    process.wait()
    asyncio.run(until(False))
    assert shutil.which("bwrap")


def test_a_result_is_a_chz_object_as_upstream_s_is() -> None:
    """Scripts copy it with other fields."""
    changed = chz.replace(SandboxResult(stdout="a", stderr="", exit_code=0), exit_code=1)
    assert (changed.stdout, changed.exit_code, changed.ok) == ("a", 1, False)
