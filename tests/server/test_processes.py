"""A server that starts, ends, is killed and comes back."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import tinker

from tests.child import python_path
from tests.server.data import DATA, assert_same_output
from tests.server.serving import KEY, TINY_CHAT, Serving, Wire
from tests.waiting import HANG_SECONDS

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytestmark = pytest.mark.server


def children(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tinker_local_backend.server", *arguments]
    env = {**os.environ, "PYTHONPATH": python_path(), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)


def test_a_restarted_server_has_every_checkpoint_and_refuses_clients_of_the_old_one(tmp_path: Path) -> None:
    with Serving(tmp_path / "home") as first:
        (engine,) = children(first.process)
        client = (
            tinker.ServiceClient(base_url=first.url, api_key=KEY)
            .create_lora_training_client(TINY_CHAT, rank=4, seed=1)
            .result()
        )
        client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        path = client.save_state("kept").result().path
        before = client.forward(DATA, "cross_entropy").result()
        sampler = client.save_weights_and_get_sampling_client().result()
        first.stop(signal.SIGKILL)
        engine.wait(HANG_SECONDS)  # nobody is left behind
    port = int(first.url.rsplit(":", 1)[1])
    with Serving(tmp_path / "home", port=port) as second:
        assert second.url == first.url
        with pytest.raises(tinker.NotFoundError, match="continue from a saved checkpoint"):
            client.forward(DATA, "cross_entropy").result()
        with pytest.raises(tinker.NotFoundError, match="the server was restarted"):
            sampler.sample(tinker.ModelInput.from_ints([1, 2]), 1, tinker.SamplingParams(max_tokens=2)).result()
        service = tinker.ServiceClient(base_url=second.url, api_key=KEY)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert_same_output(resumed.forward(DATA, "cross_entropy").result(), before)
        runs = tinker.RestClient(base_url=second.url, api_key=KEY).list_training_runs().result().training_runs
        assert {run.training_run_id for run in runs} == {client.model_id, resumed.model_id}


def test_a_server_that_is_stopped_ends_what_it_began(tmp_path: Path) -> None:
    with Serving(tmp_path / "home", shutdown_seconds=3600.0) as serving:
        wire = Wire(serving.url)
        session = wire.session()
        _, running = wire.sample(wire.sampler(session), max_tokens=600)
        serving.process.send_signal(signal.SIGTERM)
        while (answer := wire.post("/create_session"))[0] != 503:
            assert answer[0] == 200  # the signal has not arrived yet
        assert "shutting down" in answer[1]["detail"]
        assert isinstance(wire.result(running), bytes)
        assert serving.process.wait(HANG_SECONDS) == 0
        assert "Traceback" not in "".join(serving.lines)


def test_what_does_not_end_in_time_is_failed(tmp_path: Path) -> None:
    with Serving(tmp_path / "home", shutdown_seconds=0.0) as serving:
        wire = Wire(serving.url)
        session = wire.session()
        model = wire.model(session)
        _, held = wire.optim_step(model, 5)
        serving.process.send_signal(signal.SIGINT)
        answer = wire.result(held)
        assert "shut down before this request" in answer["error"] and answer["category"] == "server"
        assert serving.process.wait(HANG_SECONDS) == 0


def test_the_death_of_the_engine_is_told_and_ends_the_server(tmp_path: Path) -> None:
    with Serving(tmp_path / "home") as serving:
        wire = Wire(serving.url)
        _, running = wire.sample(wire.sampler(wire.session()), max_tokens=900)
        (engine,) = children(serving.process)
        engine.kill()
        assert "the engine's process has ended" in wire.result(running)["error"]
        assert serving.process.wait(HANG_SECONDS) == 1
        assert "the engine's process ended by itself" in "".join(serving.lines)


def test_what_prevents_a_start_is_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        ([f"model={TINY_CHAT}", "host=0.0.0.0"], "there are no API keys"),
        ([f"model={TINY_CHAT}", "silent_seconds=5"], "silent_seconds must be greater than 10, got 5.0"),
        ([f"model={TINY_CHAT}", "host=127.0.0.1", "port=1"], "cannot bind host='127.0.0.1' port=1"),
    ):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = run(*(argument.replace("port=1", f"port={port}") for argument in arguments))
            message = message.replace("port=1", f"port={port}")
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    done = run(f"model={tmp_path}", "port=0")
    assert done.returncode == 2 and str(tmp_path) in done.stderr


def test_tls(tmp_path: Path) -> None:
    """A client that trusts the certificate is served over https."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    with Serving(tmp_path / "home", tls_certfile=cert, tls_keyfile=key) as serving:
        import ssl

        import httpx

        assert serving.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"{serving.url}/health", verify=context).json() == {"status": "ok"}


def libraries(process: psutil.Process) -> set[str]:
    """The names of the files that a process has in memory."""
    return {Path(one.path).name for one in process.memory_maps()}


def test_the_process_of_http_has_no_torch_and_the_engine_s_has(tmp_path: Path) -> None:
    """Also after it has written a chat's prompt and read the reply, with a tokenizer of transformers."""
    with Serving(tmp_path / "home") as serving:
        (engine,) = children(serving.process)
        body = {"model": TINY_CHAT, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"{serving.url}/v1/chat/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=HANG_SECONDS).status_code == 200
        assert any(name.startswith("libtorch") for name in libraries(engine))
        assert not any(name.startswith("libtorch") for name in libraries(psutil.Process(serving.process.pid)))
        assert "PyTorch was not found" not in "".join(serving.lines)
