"""Which engine a run uses: never a silent choice, never a wrong import, and one local engine while anyone holds it."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker

from tests.child import python_path
from tests.sweeps import toy
from tests.waiting import HANG_SECONDS
from tinker_cookbook import backends, server_watch
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sweeps import Recipe, grid, run_sweep

TINY = str(EXAMPLE_DATA / "tiny_chat")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in ("TINKER_BACKEND", "TINKER_LOCAL_BACKEND", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path))


class TestResolution:
    @pytest.mark.parametrize(
        ("argument", "environment", "expected"),
        [
            (None, {}, "local"),
            (None, {"TINKER_BACKEND": "tinker"}, "tinker"),
            (None, {"TINKER_BACKEND": "api"}, "tinker"),
            (None, {"TINKER_BACKEND": "local"}, "local"),
            (None, {"TINKER_LOCAL_BACKEND": "1"}, "local"),
            (None, {"TINKER_BACKEND": "api", "TINKER_LOCAL_BACKEND": "1"}, "tinker"),
            ("local", {"TINKER_BACKEND": "tinker"}, "local"),
            ("tinker", {"TINKER_BACKEND": "local"}, "tinker"),
            ("api", {"TINKER_LOCAL_BACKEND": "1"}, "tinker"),
        ],
    )
    def test_argument_then_environment_then_local(
        self, monkeypatch: pytest.MonkeyPatch, argument: str | None, environment: dict[str, str], expected: str
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert backends.resolve_backend(argument) == expected

    def test_unknown_names_say_where_they_came_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigurationError, match=r"^backend='vllm' is unknown; use local, or tinker"):
            backends.resolve_backend("vllm")
        monkeypatch.setenv("TINKER_BACKEND", "cloud")
        with pytest.raises(ConfigurationError, match=r"^TINKER_BACKEND='cloud' is unknown"):
            backends.resolve_backend()


class TestChecks:
    @pytest.mark.parametrize("name", ["tinker", "api"])
    def test_hosted_needs_a_key(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=r"export TINKER_API_KEY=.*or use backend=local"):
            backends.check_backend(name, "Qwen/Qwen3-8B")

    def test_hosted_takes_no_local_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-none")
        assert backends.check_backend("tinker", "Qwen/Qwen3-8B", "https://example.invalid") == "tinker"
        with pytest.raises(ConfigurationError, match="is a local directory"):
            backends.check_backend("tinker", TINY)

    @pytest.mark.parametrize("source", ["base_url", "TINKER_BASE_URL"])
    def test_an_address_names_its_protocol(self, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-none")
        monkeypatch.setenv("TINKER_BASE_URL", "gpu-machine:8000")
        with pytest.raises(ConfigurationError, match=rf"^{source}='gpu-machine:8000' is not an address"):
            backends.check_backend("tinker", "m", "gpu-machine:8000" if source == "base_url" else None)

    def test_local_takes_no_base_url(self) -> None:
        assert backends.check_backend("local", TINY) == "local"
        with pytest.raises(ConfigurationError, match=r"base_url='http://x'.*set backend=tinker with it, or drop it"):
            backends.check_backend("local", TINY, "http://x")

    @pytest.mark.parametrize("name", ["/no/such/model", "./tiny_chat", "~/nothing", "tiny"])
    def test_a_model_that_is_not_there(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=r"model_name: .*no config.json there"):
            backends.check_backend("local", name)


class TestLocalClient:
    def test_shared_while_held_and_freed_after(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A table of its own: another test's client may still be alive in this process.
        monkeypatch.setattr(backends, "_local_clients", weakref.WeakValueDictionary())
        first = backends.create_service_client("local")
        assert backends.create_service_client() is first
        watch = weakref.ref(first)
        del first
        gc.collect()
        assert watch() is None
        assert backends.create_service_client("local") is not None

    def test_a_sampling_client_alone_keeps_it(self) -> None:
        async def make():
            return await backends.create_service_client("local").create_sampling_client(base_model=TINY)

        sampler = asyncio.run(make())
        gc.collect()
        service = backends.create_service_client("local")
        assert sampler._owner is service  # pyright: ignore[reportAttributeAccessIssue]


@chz.chz
class OneKey:
    n: int


class Remote:
    """A client of the SDK: what it was closed with; a server that does not take the news with `fails`."""

    def __init__(self, fails: bool = False):
        self.closed: list[str] = []
        self._fails = fails

    def close(self, status: str) -> Future[None]:
        self.closed.append(status)
        done: Future[None] = Future()
        if not self._fails:
            done.set_result(None)
        return done


class TestTheEndOfAServersSession:
    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        def make(**how: Any) -> Any:
            monkeypatch.setattr(tinker, "ServiceClient", lambda base_url, display_name: Remote(**how))
            return backends.create_service_client("tinker", "https://example.invalid")

        monkeypatch.setattr(server_watch, "ServerWatch", lambda *_: None)
        return make

    @pytest.mark.parametrize(
        ("error", "status"), [(None, "success"), (ValueError, "errored"), (asyncio.CancelledError, "interrupted")]
    )
    def test_it_is_closed_once_with_how_the_body_ended(
        self, make: Callable[..., Any], error: type[BaseException] | None, status: str
    ) -> None:
        client, other = make(), make()

        async def main() -> None:
            async with backends.closed_afterwards(client):
                if error is not None:
                    raise error

        for _ in range(2):
            with pytest.raises(error) if error is not None else nullcontext():
                asyncio.run(main())
            assert (client.closed, other.closed) == ([status], [])

    def test_a_recipe_closes_what_is_left(self, make: Callable[..., Any]) -> None:
        """Also a client that nobody has any more, and not one that is not its own."""
        closed, other = [], make()

        async def main(config: OneKey) -> None:
            closed.append(make().closed)
            if config.n == 2:
                raise KeyboardInterrupt

        run_recipe(OneKey, main, argv=["n=1"])
        with pytest.raises(SystemExit):
            run_recipe(OneKey, main, argv=["n=2"])
        assert closed == [["success"], ["interrupted"]] and other.closed == []

    def test_each_run_of_a_sweep_in_one_process_closes_its_own(self, make: Callable[..., Any], tmp_path: Path) -> None:
        closed: list[list[str]] = []

        async def main(config: toy.CLIConfig) -> None:
            assert closed == [["success"]] * len(closed)
            closed.append(make().closed)
            await toy.main(config)

        recipe = Recipe("tests.sweeps.toy", toy.CLIConfig, main)
        results = asyncio.run(run_sweep(recipe, grid({"seed": ["1", "2"]}), tmp_path, processes=0, concurrent=1))
        assert [result.status for result in results] == ["finished"] * 2 and closed == [["success"]] * 2

    def test_a_server_that_does_not_answer_holds_up_nothing(
        self, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backends, "CLOSE_SECONDS", 0.05)
        with backends.closing_clients():
            stuck, silent = make(fails=True), make()
            monkeypatch.setattr(server_watch, "is_silent", lambda client: client is silent)
        assert (stuck.closed, silent.closed) == (["success"], [])

    def test_a_local_client_stays(self) -> None:
        async def main() -> None:
            client = backends.create_service_client("local")
            async with backends.closed_afterwards(client):
                pass
            await client.create_sampling_client(base_model=TINY)

        asyncio.run(main())


def test_hosted_runs_never_import_the_local_engine() -> None:
    """In a process of its own: everything a hosted recipe does up to the first network call."""
    script = """
        import sys
        import tinker

        class Hosted:
            def __init__(self, base_url=None, display_name=None):
                self.base_url = base_url

        tinker.ServiceClient = Hosted
        from recipes import debate_rs_grpo, rl_basic, single_turn, sl_basic
        from tinker_cookbook import backends
        from tinker_cookbook.rl import train

        assert backends.check_backend("tinker", "Qwen/Qwen3-8B") == "tinker"
        client = backends.create_service_client("tinker", "https://example.invalid")
        assert type(client) is Hosted and client.base_url == "https://example.invalid"
        light = {f"tinker_local_backend{name}" for name in ("", ".errors", ".environment", ".shipped")}  # where files lie
        loaded = [name for name in sys.modules if name.partition(".")[0] == "tinker_local_backend" and name not in light]
        assert not loaded, loaded
    """
    environment = {
        "PATH": "",
        "TINKER_API_KEY": "tml-none",
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
