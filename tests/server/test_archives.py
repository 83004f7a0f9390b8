"""Adapters that a server sends as a tar, and what other machines do with them."""

import io
import json
import os
import socket
import tarfile
from pathlib import Path

import httpx
import pytest
import tinker
import torch
from safetensors.torch import load, load_file

from tests.child import run_forked
from tests.server.data import DATA
from tests.server.serving import KEY, TENANTS, TINY_CHAT, Serving
from tests.server.test_exports import matrices, rest_of
from tests.waiting import until
from tinker_cookbook import weights
from tinker_cookbook.exceptions import WeightsDownloadError

pytestmark = [pytest.mark.server, pytest.mark.filterwarnings("ignore:DEPRECATED")]


@pytest.fixture(scope="module")
def client(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    client = sdk.create_lora_training_client(TINY_CHAT, rank=64, seed=1).result()
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    return client


@pytest.fixture
def elsewhere(server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine: its own empty home, and the server's address alone."""
    home = tmp_path / "another-home"
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(home))
    monkeypatch.setenv("TINKER_BACKEND", "tinker")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    return home


def route(path: str) -> str:
    run_id, checkpoint_id = path.removeprefix("tinker://").split("/", 1)
    return f"/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id}/archive"


def ask(server: Serving, path: str, key: str = KEY) -> httpx.Response:
    return httpx.get(server.url + route(path), headers={"X-API-Key": key})


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_an_address_gives_the_adapter_without_a_key(server: Serving, client: tinker.TrainingClient, kind: str) -> None:
    saved = client.save_state("sent") if kind == "weights" else client.save_weights_for_sampler("sent")
    path = saved.result().path
    answer = ask(server, path)
    assert answer.status_code == 302 and answer.headers["expires"].endswith("GMT")
    response = httpx.get(answer.headers["location"])
    assert response.headers["content-type"] == "application/x-tar"
    assert int(response.headers["content-length"]) == len(response.content)
    with tarfile.open(fileobj=io.BytesIO(response.content)) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # pyright: ignore
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads(files["adapter_config.json"])["r"] == 64
    torch.testing.assert_close(load(files["adapter_model.safetensors"]), matrices(server, path), atol=0, rtol=0)


def test_who_may_have_it(server: Serving, client: tinker.TrainingClient) -> None:
    path = client.save_state("guarded").result().path
    assert ask(server, path, "tml-unknown").status_code == 401
    assert ask(server, path, TENANTS["alice"]).status_code == 404
    address = httpx.URL(ask(server, path).headers["location"])
    assert httpx.get(address.copy_with(params={**address.params, "tenant": "alice"})).status_code == 403
    assert httpx.get(address.copy_with(path=address.path.replace("guarded", "other"))).status_code == 403
    assert httpx.get(address.copy_with(params=None)).status_code == 401
    assert httpx.get(address.copy_with(params=None), headers={"X-API-Key": KEY}).status_code == 200


def test_what_is_gone_is_absent(server: Serving, client: tinker.TrainingClient) -> None:
    path = client.save_state("short").result().path
    address = ask(server, path).headers["location"]
    rest_of(server).delete_checkpoint_from_tinker_path(path).result()
    for answer in (ask(server, path), httpx.get(address)):
        assert answer.status_code == 404 and "does not exist" in answer.json()["detail"]
    brief = client.save_state("brief", ttl_seconds=1).result().path
    until(lambda: ask(server, brief).status_code == 404)


def held_open(server: Serving) -> list[str]:
    """The adapters that the server's process of HTTP has open."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    links = [os.readlink(file) for file in folder.iterdir() if file.exists() or file.is_symlink()]
    return [link for link in links if "adapter_model.safetensors" in link]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not list open files")
def test_a_client_that_leaves_midway_leaves_nothing_open(server: Serving, client: tinker.TrainingClient) -> None:
    path = client.save_state("left").result().path
    address = httpx.URL(ask(server, path).headers["location"])
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET " + address.raw_path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: not held_open(server), lambda: held_open(server))
    assert httpx.get(address).status_code == 200


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_weights_are_downloaded_elsewhere(
    server: Serving, client: tinker.TrainingClient, elsewhere: Path, tmp_path: Path, kind: str
) -> None:
    name = "carried"
    saved = client.save_state(name) if kind == "weights" else client.save_weights_for_sampler(name)
    path = saved.result().path
    before = len(rest_of(server).list_user_checkpoints().result().checkpoints)
    folder = weights.download(tinker_path=path, output_dir=str(tmp_path / "adapter"), base_url=server.url)
    found = load_file(Path(folder) / "adapter_model.safetensors")
    torch.testing.assert_close(found, matrices(server, path), atol=0, rtol=0)
    assert len(rest_of(server).list_user_checkpoints().result().checkpoints) == before
    assert not elsewhere.exists()
    missing = path.replace(name, "never")
    with pytest.raises((WeightsDownloadError, tinker.TinkerError), match="does not exist"):
        weights.download(tinker_path=missing, output_dir=str(tmp_path / "none"), base_url=server.url)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("format", ["adapter", "merged"])
def test_the_recipe_exports_elsewhere(
    server: Serving, client: tinker.TrainingClient, elsewhere: Path, tmp_path: Path, format: str
) -> None:
    path = client.save_weights_for_sampler(f"exported_{format}").result().path
    words = ["-m", "recipes.export", f"model_path={path}", f"output={tmp_path / 'out'}", f"format={format}"]
    done = run_forked([*words, "backend=tinker", f"base_url={server.url}"], env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    file = "adapter_model.safetensors" if format == "adapter" else "model.safetensors"
    assert (tmp_path / "out" / file).is_file() and "base_model" in (tmp_path / "out" / "README.md").read_text()
