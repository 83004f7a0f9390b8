"""The tar of a checkpoint's adapter: whole whatever happens to the checkpoint, and never a part that looks whole."""

import asyncio
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_checkpoints import folder, train
from tinker_local_backend import CheckpointError, ServiceClient, TrainingClient
from tinker_local_backend.storage import tar_stream
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.storage.tar_stream import TarStream

NAMES = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_stream, "CHUNK_BYTES", 1000)


@pytest.fixture
def own_home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def client(own_home: Path, tied_model: str) -> Iterator[TrainingClient]:
    with ServiceClient(home=own_home) as service:
        client = service.create_lora_training_client(tied_model, rank=2, seed=0).result()
        train(client, range(1))
        yield client


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: file.read() for name, file in members.items() if file is not None}


def read(checkpoint: Path) -> dict[str, bytes]:
    return {name: (checkpoint / name).read_bytes() for name in NAMES}


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_it_has_the_adapter_alone_in_small_pieces(own_home: Path, client: TrainingClient, kind: str) -> None:
    saved = client.save_state("x") if kind == "weights" else client.save_weights_for_sampler("x")
    path = saved.result().path
    with TarStream(own_home, CheckpointPath.parse(path)) as stream:
        pieces = list(stream.chunks())
        assert stream.expires_at is None
    archive = b"".join(pieces)
    assert len(archive) == stream.size and len(archive) % tarfile.RECORDSIZE == 0
    assert contents(archive) == read(folder(own_home, path))
    assert max(len(piece) for piece in pieces[:-1]) <= 1000 + 2 * tarfile.BLOCKSIZE
    assert not (own_home / "archives").exists()


@pytest.mark.parametrize("happens", ["deleted", "overwritten"])
def test_what_is_being_sent_stays_what_it_was(own_home: Path, client: TrainingClient, happens: str) -> None:
    path = client.save_state("x").result().path
    before = read(folder(own_home, path))
    with TarStream(own_home, CheckpointPath.parse(path)) as stream:
        chunks = stream.chunks()
        begun = next(chunks)
        if happens == "deleted":
            ServiceClient(home=own_home).create_rest_client().delete_checkpoint_from_tinker_path(path).result()
        else:
            train(client, range(1))
            client.save_state("x", overwrite=True).result()
            assert read(folder(own_home, path)) != before
        assert contents(begun + b"".join(chunks)) == before


def test_a_checkpoint_that_changes_while_it_is_opened_is_refused(
    own_home: Path, client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = client.save_state("x").result().path
    files = tar_stream.adapter_files

    def overwritten_meanwhile(checkpoint: Path) -> dict[str, Path]:
        found = files(checkpoint)
        client.save_state("x", overwrite=True).result()
        return found

    monkeypatch.setattr(tar_stream, "adapter_files", overwritten_meanwhile)
    with pytest.raises(CheckpointError, match="was overwritten while it was read"):
        TarStream(own_home, CheckpointPath.parse(path))


def test_links_and_what_is_not_there_are_refused(own_home: Path, client: TrainingClient, tmp_path: Path) -> None:
    path = client.save_state("x").result().path
    weights = folder(own_home, path) / "adapter_model.safetensors"
    secret = tmp_path / "secret"
    secret.write_text("s")
    weights.unlink()
    weights.symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read"):
        TarStream(own_home, CheckpointPath.parse(path))
    with pytest.raises(CheckpointError, match="does not exist"):
        TarStream(own_home, CheckpointPath.parse(path.replace("/x", "/y")))


class Wire:
    """An ASGI connection whose client leaves after so many pieces; None: never."""

    def __init__(self, stays: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._stays, self._left = stays, asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if self._stays is not None and len(self.sent) > self._stays:
            self._left.set()
            await asyncio.sleep(0)

    async def receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def answered(stream: TarStream, wire: Wire) -> None:
    pytest.importorskip("starlette", reason="the extra `server` is not installed")
    from tinker_local_backend.server.archives import ArchiveResponse

    asyncio.run(ArchiveResponse(stream, "x.tar")({"type": "http"}, wire.receive, wire.send))


def test_the_response_is_as_long_as_it_states(own_home: Path, client: TrainingClient) -> None:
    path = client.save_state("x").result().path
    wire, stream = Wire(), TarStream(own_home, CheckpointPath.parse(path))
    answered(stream, wire)
    headers = dict(wire.sent[0]["headers"])
    assert int(headers[b"content-length"]) == len(wire.body) and headers[b"content-type"] == b"application/x-tar"
    assert contents(wire.body) == read(folder(own_home, path)) and not wire.sent[-1].get("more_body")
    with pytest.raises(ValueError, match="closed"):
        list(stream.chunks())


def test_a_client_that_leaves_ends_the_reading(own_home: Path, client: TrainingClient) -> None:
    path = client.save_state("x").result().path
    wire, stream = Wire(stays=2), TarStream(own_home, CheckpointPath.parse(path))
    answered(stream, wire)
    assert 0 < len(wire.body) < stream.size / 2
    with pytest.raises(ValueError, match="closed"):
        list(stream.chunks())


def test_a_file_that_becomes_shorter_breaks_the_response(own_home: Path, client: TrainingClient) -> None:
    path = client.save_state("x").result().path
    wire, stream = Wire(), TarStream(own_home, CheckpointPath.parse(path))
    os.truncate(folder(own_home, path) / "adapter_model.safetensors", 500)
    with pytest.raises(CheckpointError, match="became shorter"):
        answered(stream, wire)
    assert wire.sent[-1].get("more_body"), "no end was sent"
