"""A full disk fails the save, says so, and harms nothing: neither what was saved before, nor the client, nor the engine."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.helpers import assert_same, make_training_client, weights
from tests.engine.test_checkpoints import folder, train
from tinker_local_backend import CheckpointError, RequestError, RestClient, ServiceClient, TrainingClient
from tinker_local_backend.merge import merge_adapter
from tinker_local_backend.storage.files import CheckpointWriteError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def own(small_disk: Path) -> Iterator[ServiceClient]:
    with ServiceClient(home=small_disk) as service:
        yield service


def fill(disk: Path, leave: int = 0) -> None:
    """Take all room on the disk but `leave` bytes, rounded down to blocks."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            file.truncate(file.tell() - leave)


def contents(where: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in where.iterdir()}


@pytest.fixture
def client(own: ServiceClient, tied_model: str) -> TrainingClient:
    client = make_training_client(own, tied_model, rank=4)
    train(client, range(1))
    return client


def test_a_save_that_does_not_fit_leaves_nothing(own: ServiceClient, client: TrainingClient, small_disk: Path) -> None:
    path = client.save_state("there").result().path
    before, matrices = contents(folder(small_disk, path)), weights(client)
    train(client, range(1, 2))
    fill(small_disk, leave=sum(map(len, before.values())) // 2)  # the adapter still fits, the optimizer does not
    for name, overwrite in (("there", True), ("new", False)):
        with pytest.raises(CheckpointError, match=rf"weights/{name} could not be written: .*No space left on device"):
            client.save_state(name, overwrite=overwrite).result()
    assert [p.name for p in folder(small_disk, path).parent.iterdir()] == ["there"]
    assert contents(folder(small_disk, path)) == before
    train(client, range(2, 3))
    assert_same(weights(own.create_training_client_from_state_with_optimizer(path).result()), matrices)
    client.save_weights_and_get_sampling_client().result()


def test_a_disk_without_any_room(own: ServiceClient, client: TrainingClient, small_disk: Path, tied_model: str) -> None:
    path = client.save_state("there").result().path
    fill(small_disk)
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(CheckpointWriteError, match="No space left on device"):
            save("new").result()
    assert [p.name for p in folder(small_disk, path).parent.iterdir()] == ["there"]
    train(client, range(1, 2))
    with pytest.raises(RequestError, match=r"cannot be written to.*No space left on device"):
        own.create_lora_training_client(tied_model, rank=1).result()
    rest = RestClient(small_disk)
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        rest.copy_weights(path).result()
    assert [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints] == [path]
    assert not [f for f in (small_disk / "archives").rglob("*") if f.is_file()]
    rest.delete_checkpoint_from_tinker_path(path).result()  # which is how to make room
    client.save_state("there").result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints[0].checkpoint_id == "weights/there"


@pytest.mark.parametrize("room", [50_000, 500_000], ids=["weights", "tokenizer"])
def test_a_merge_that_does_not_fit_leaves_nothing(
    service: ServiceClient, home: Path, small_disk: Path, tied_model: str, room: int
) -> None:
    """The weights take about 450 kB, the tokenizer 90."""
    client = make_training_client(service, tied_model)
    path = client.save_weights_for_sampler("x").result().path
    fill(small_disk, leave=room + 4096)
    with pytest.raises(CheckpointWriteError, match=r"merged model .* could not be written: .*No space left on device"):
        merge_adapter(path, small_disk / "merged", home=home)
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


def test_a_folder_that_cannot_be_written_is_named(service: ServiceClient, home: Path, tied_model: str) -> None:
    """Also where no file system can be mounted: a file stands where the folder should be."""
    client = make_training_client(service, tied_model)
    (home / "runs").mkdir(exist_ok=True)
    (home / "runs" / client.model_id).write_text("in the way")
    with pytest.raises(CheckpointWriteError, match=f"{client.model_id}.*could not be written.*Nothing was left behind"):
        client.save_state("x").result()
    train(client, range(1))
    (home / "runs" / client.model_id).unlink()
    client.save_state("x").result()
