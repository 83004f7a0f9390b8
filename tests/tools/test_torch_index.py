"""Which builds of torch an installation takes. The index itself is never asked: not every machine reaches it."""

import contextlib
import http.server
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import start_serving
from tools import torch_index
from tools.torch_index import CPU, answers, choose, has_nvidia_driver


def unasked(*_: object) -> bool:
    raise AssertionError("the variable decides alone")


@pytest.mark.parametrize(
    ("platform", "driver", "reached", "index"),
    [
        ("linux", False, True, CPU),
        ("linux", False, False, None),
        ("linux", True, True, None),
        ("darwin", False, True, None),
        ("win32", False, True, None),
    ],
)
def test_the_choice(platform: str, driver: bool, reached: bool, index: str | None) -> None:
    assert choose({}, platform, lambda: driver, lambda asked: reached and asked == CPU)[0] == index
    assert choose({"TORCH_INDEX": ""}, platform, lambda: driver, lambda _: reached)[0] == index


@pytest.mark.parametrize(
    ("value", "index"),
    [("cpu", CPU), ("default", None), ("https://a.example/whl/cu130", "https://a.example/whl/cu130")],
)
def test_a_variable_chooses(value: str, index: str | None) -> None:
    assert choose({"TORCH_INDEX": value}, "linux", unasked, unasked)[0] == index


def test_what_is_no_index_is_told() -> None:
    with pytest.raises(ValueError, match="TORCH_INDEX='gpu': must be cpu, default, or the URL of an index"):
        choose({"TORCH_INDEX": "gpu"}, "linux", unasked, unasked)


def test_a_driver_is_found(tmp_path: Path) -> None:
    nowhere = str(tmp_path)
    assert not has_nvidia_driver(tmp_path, nowhere)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert has_nvidia_driver(tmp_path, nowhere)
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    assert has_nvidia_driver(tmp_path / "elsewhere", nowhere)


class Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextlib.contextmanager
def serving() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        start_serving(server)
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_index_answers_or_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as address:
        assert answers(f"{address}/whl/cpu") and answers(f"{address}/whl/cpu/")
        assert not answers(f"{address}/whl/gone")
    assert not answers(f"{address}/whl/cpu")
    assert not answers("no address")


def test_what_pip_is_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCH_INDEX", "cpu")
    torch_index.main()
    assert capsys.readouterr().out == f"--extra-index-url {CPU}\n"
    monkeypatch.setenv("TORCH_INDEX", "default")
    torch_index.main()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("TORCH_INDEX", "gpu")
    with pytest.raises(SystemExit, match="error: TORCH_INDEX='gpu'"):
        torch_index.main()
