"""Which engine a run uses: never a silent choice, never a wrong import, and one local engine while anyone holds it."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import weakref

import pytest

from tests.child import python_path
from tinker_cookbook import backends
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError

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
        with pytest.raises(ConfigurationError, match=rf"^{source}='gpu-machine:8000' is no address"):
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


def test_hosted_runs_never_import_the_local_engine() -> None:
    """In a process of its own: everything a hosted recipe does up to the first network call."""
    script = """
        import sys
        import tinker

        class Hosted:
            def __init__(self, base_url=None):
                self.base_url = base_url

        tinker.ServiceClient = Hosted
        from recipes import debate_rs_grpo, rl_basic, single_turn, sl_basic
        from tinker_cookbook import backends
        from tinker_cookbook.rl import train

        assert backends.check_backend("tinker", "Qwen/Qwen3-8B") == "tinker"
        client = backends.create_service_client("tinker", "https://example.invalid")
        assert type(client) is Hosted and client.base_url == "https://example.invalid"
        loaded = [name for name in sys.modules if name.partition(".")[0] == "tinker_local_backend"]
        assert not loaded, loaded
    """
    environment = {
        "PATH": "",
        "TINKER_API_KEY": "tml-none",
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
