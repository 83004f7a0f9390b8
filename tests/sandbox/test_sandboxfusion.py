"""SandboxFusion, against a local server that speaks its documented protocol, and runs the code in a folder of its own."""

import asyncio
import base64
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.running import LIMITS, running
from tests.waiting import start_serving
from tinker_cookbook.exceptions import ConfigurationError, SandboxError
from tinker_cookbook.sandbox import SandboxFusionClient, SandboxLimits, SandboxSession, get_sandbox

ALLOWED = {
    "compile_timeout",
    "run_timeout",
    "memory_limit_MB",
    "code",
    "stdin",
    "language",
    "files",
    "fetch_files",
    "args",
}


def run_code(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of POST /run_code."""
    assert request.keys() <= ALLOWED and isinstance(request["code"], str)
    program = {"python": "python3", "bash": "bash"}[request["language"]]
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request.get("files", {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content, validate=True))
        Path(folder, "code").write_text(request["code"])
        try:
            done = subprocess.run(
                [program, "code"],
                cwd=folder,
                input=request.get("stdin") or "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=request.get("run_timeout", 10),
            )
        except subprocess.TimeoutExpired:
            ran = {
                "status": "TimeLimitExceeded",
                "execution_time": 1.0,
                "return_code": None,
                "stdout": "",
                "stderr": "",
            }
            return {"status": "Failed", "message": "", "compile_result": None, "run_result": ran, "files": {}}
        fetched = [name for name in request.get("fetch_files", []) if Path(folder, name).is_file()]
        files = {name: base64.b64encode(Path(folder, name).read_bytes()).decode() for name in fetched}
    ran = {"status": "Finished", "execution_time": 0.25, "return_code": done.returncode}
    ran |= {"stdout": done.stdout, "stderr": done.stderr}
    status = "Success" if done.returncode == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": ran, "files": files}


@contextmanager
def serving(answer: Any = run_code, code: int = 200) -> Iterator[str]:
    """A server's address of /run_code."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = self.path == "/run_code"
            data = json.dumps(answer(body)).encode() if found else b'{"detail": "Not Found"}'
            self.send_response(code if found else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = start_serving(server)
        try:
            yield f"http://127.0.0.1:{server.server_port}/run_code"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        yield address


def test_a_run(url: str) -> None:
    sandbox = get_sandbox("sandbox_fusion", url)
    sandbox.check()
    result = running(sandbox)("cat a/b -; echo oh >&2; exit 4", {"a/b": "1"}, "2")
    assert (result.stdout, result.stderr, result.exit_code, result.limit) == ("12", "oh\n", 4, None)
    assert result.wall_s == 0.25 and result.workspace is None


def test_a_folder_that_lasts(url: str) -> None:
    async def main() -> None:
        session = SandboxSession(get_sandbox("sandbox_fusion", url), LIMITS, {"a": "1\n"})
        assert (await session.run("echo 2 >> a; echo '$x' > \"b c\"")).workspace
        assert (await session.run("cat a 'b c'")).stdout == "1\n2\n$x\n"

    asyncio.run(main())


def test_time_and_output(url: str) -> None:
    run = running(get_sandbox("sandbox_fusion", url))
    late = run("sleep 100", limits=SandboxLimits(wall_s=0.5))
    assert (late.timed_out, late.limit, late.exit_code) == (True, "wall_s", 137)
    much = run("head -c 100000 /dev/zero | tr '\\0' x")
    assert (much.truncated, much.limit, len(much.stdout)) == (True, "output_kb", 16 << 10)


def test_limits_are_sent() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(request)
        return run_code(request)

    with serving(answer) as address:
        running(get_sandbox("sandbox_fusion", address))("true")
    assert (seen[0]["run_timeout"], seen[0]["memory_limit_MB"], seen[0]["fetch_files"]) == (60.0, 128, [])


def test_tinker_cookbooks_client(url: str) -> None:
    async def main() -> None:
        client = SandboxFusionClient(url, max_concurrency=2)
        passed, answer = await client.run("print(open('d.txt').read())", {"d.txt": "hello"}, timeout=30)
        assert passed and answer["run_result"]["stdout"] == "hello\n"
        passed, answer = await client.run("exit 3", {}, timeout=30, language="bash")
        assert not passed and answer["run_result"]["return_code"] == 3
        await client.close()

    asyncio.run(main())


def test_tinker_cookbooks_client_reports_what_fails() -> None:
    async def main(address: str) -> dict[str, Any]:
        client = SandboxFusionClient(address)
        passed, answer = await client.run("1", {}, timeout=1)
        await client.close()
        assert not passed
        return answer

    with serving(lambda request: {"status": "SandboxError", "message": "no runner"}) as address:
        assert asyncio.run(main(address))["error"] == "no runner"
    assert "does not answer" in asyncio.run(main("http://127.0.0.1:1/run_code"))["error"]


def test_the_environment_names_the_server_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SANDBOX_URL", url)
    get_sandbox("sandbox_fusion").check()
    with pytest.raises(ConfigurationError, match="does not answer"):
        get_sandbox("sandbox_fusion", "http://127.0.0.1:1/run_code").check()


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"sandbox_url='localhost:80': must be http\(s\)://host:port/run_code"):
        get_sandbox("sandbox_fusion", "localhost:80").check()
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:1/run_code does not answer .*; start it \(docker run"):
        get_sandbox("sandbox_fusion", "http://127.0.0.1:1/run_code").check()
    with serving() as address, pytest.raises(ConfigurationError, match="answered 404; give the address of /run_code"):
        get_sandbox("sandbox_fusion", address.removesuffix("/run_code")).check()


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        ({"status": "SandboxError", "message": "no runner"}, 200, "no runner"),
        ({"status": "Success"}, 200, "no run_result"),
        ([], 200, "did not answer with a JSON object"),
        ({}, 503, "answered 503"),
        (
            {"status": "Failed", "run_result": {"stdout": "", "stderr": "bash: not found"}},
            200,
            "did not start the program",
        ),
    ],
)
def test_answers_that_are_none(answer: Any, code: int, message: str) -> None:
    with serving(lambda request: answer, code) as address, pytest.raises(SandboxError, match=message):
        running(get_sandbox("sandbox_fusion", address))("true")
