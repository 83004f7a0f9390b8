"""The page served: what it answers, what is new of a run, and what it refuses."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import write_run, write_step
from tests.waiting import HANG_SECONDS, start_serving
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.report.serve import Reports, Server
from tinker_cookbook.utils.files import append_jsonl

MANY = "index/0?steps=" + "1," * 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "runs" / "one", {"seed": 0}, [{"step": 0, "a": 1.0}])
    write_step(folder, 0, [[("2 + 2?", "four", 1.0), ("2 + 2?", "no", 0.0)]])
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    with Server(Reports([str(root)]), "title") as server:
        thread = start_serving(server)
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, path: str, host: str | None = None, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=HANG_SECONDS)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    is_json = answer.headers["Content-Type"] == "application/json"
    return answer.status, json.loads(body) if is_json else body.decode()


def test_what_it_answers(server: Server) -> None:
    status, shell = ask(server, "/")
    assert status == 200 and "<title>title</title>" in shell and "four" not in shell
    summary = ask(server, "/api/summary")[1]
    assert [run["label"] for run in summary["runs"]] == ["one"]
    assert summary["runs"][0]["metrics"]["a"] == [1.0]
    assert ask(server, "/api/steps/0") == (200, [0])
    assert ask(server, "/api/index/0?steps=0")[1]["0"]["reward"] == [1.0, 0.0]
    assert "".join(ask(server, "/api/group/0/0/0")[1][0]["turns"][0]["tokens"]) == "four"
    assert ask(server, "/api/group/0/0/7") == (200, None)
    assert ask(server, "/api/search/0?steps=0&text=FOUR")[1] == {"0": [[0, 0]]}


def test_a_row_and_a_run_that_are_new_are_seen(server: Server, root: Path) -> None:
    before = ask(server, "/api/state")[1]
    append_jsonl(root / "one" / "metrics.jsonl", {"step": 1, "a": 2.0})
    assert ask(server, "/api/state")[1] != before
    assert ask(server, "/api/run/0")[1]["metrics"]["a"] == [1.0, 2.0]
    assert ask(server, "/api/state")[1] == ask(server, "/api/state")[1]
    write_step(root / "one", 1, [[("2 + 2?", "five", 1.0), ("2 + 2?", "no", 0.0)]])
    assert ask(server, "/api/steps/0") == (200, [0, 1])
    write_run(root / "two", {"seed": 1}, [])
    assert [run["label"] for run in ask(server, "/api/summary")[1]["runs"]] == ["one", "two"]
    assert ask(server, "/api/ranking") == (200, None)
    for name, value in (("one", 0.5), ("two", 0.75), ("one", 1.0)):  # the last row of a run counts
        append_jsonl(root / name / "metrics.jsonl", {"step": 2, "test/env/all/correct": value})
    for number in range(2):
        assert ask(server, f"/api/run/{number}")[0] == 200
    rows = ask(server, "/api/ranking")[1]["rows"]
    assert [(row["mean"], row["seeds"]) for row in rows] == [(0.875, 2)] and rows[0]["runs"] == [0, 1]


def test_nothing_outside_the_runs_can_be_read(server: Server) -> None:
    for path in (
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/api/group/0/../../secret.txt",
        "/secret.txt",
        "/one/config.json",
        "//etc/passwd",
    ):
        status, body = ask(server, path)
        assert status == 404 and "secret" not in str(body) and "root:" not in str(body), path


@pytest.mark.parametrize(
    "path",
    [
        "/api/run/7",
        "/api/run/-1",
        "/api/run/x",
        "/api/index/0?steps=5",
        "/api/index/0?steps=a",
        "/api/nothing",
        "/api/index/0?steps=" + "1," * 300,
    ],
)
def test_what_is_not_there_is_said(server: Server, path: str) -> None:
    status, body = ask(server, f"/api/{path}")
    assert status == 404 and body and "Traceback" not in body


def test_another_name_of_this_machine_is_refused(server: Server) -> None:
    assert ask(server, "/api/summary", host="evil.example:80")[0] == 404
    assert ask(server, "/api/summary", host="localhost:1")[0] == 200


def test_it_only_reads(server: Server) -> None:
    for method in ("PUT", "DELETE", "OPTIONS"):  # the last is what a browser asks for a page of another site
        assert ask(server, "/api/summary", method=method)[0] == 501
    assert ask(server, "/api/summary", method="POST")[0] == 404


def test_a_damaged_file_is_named_and_the_rest_goes_on(server: Server, root: Path) -> None:
    (root / "one" / "iteration_000000" / "rollouts.parquet").write_bytes(b"PAR1")
    status, body = ask(server, "/api/index/0?steps=0")
    assert status == 500 and "rollouts cannot be read" in body
    assert ask(server, "/api/summary")[0] == 200


def test_a_port_that_is_taken_is_named(server: Server, root: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"port={server.server_port}"):
        Server(Reports([str(root)]), "x", server.server_port)
