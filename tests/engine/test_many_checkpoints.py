"""What a save and a listing cost does not grow with what was saved before, and what rows remember of folders is never wrong."""

import json
import logging
import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.file_operations import file_operations
from tests.engine.test_checkpoints import folder
from tinker_local_backend import RestClient, ServiceClient, TrainingClient
from tinker_local_backend.storage.database import REGISTRY_FILE

FEW, MANY = 4, 24


@pytest.fixture
def own_home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def client(own_home: Path, tied_model: str) -> Iterator[TrainingClient]:
    with ServiceClient(home=own_home) as service:
        yield service.create_lora_training_client(tied_model, rank=1, seed=0, train_mlp=False).result()


def age(path: Path) -> None:
    """Let a folder have last changed a minute ago."""
    long_ago = time.time() - 60
    os.utime(path, (long_ago, long_ago))


def fill(client: TrainingClient, home: Path, upto: int) -> None:
    """Checkpoints 0 .. upto - 1, of some age: copies of one that was really saved."""
    first = folder(home, client.save_state("n0", overwrite=True).result().path)
    for i in range(1, upto):
        if not (other := first.parent / f"n{i}").exists():
            shutil.copytree(first, other)
        age(other)
    age(first)


def counted(action: Callable[[], object]) -> Counter[str]:
    action()  # what is only there the first time
    with file_operations() as counts:
        action()
    return counts


def names(rest: RestClient, run_id: str) -> list[str]:
    return sorted(c.checkpoint_id.partition("/")[2] for c in rest.list_checkpoints(run_id).result().checkpoints)


def test_a_save_does_as_much_with_many_checkpoints_as_with_few(client: TrainingClient, own_home: Path) -> None:
    counts = []
    for size in (FEW, MANY):
        fill(client, own_home, size)
        overwriting = counted(lambda: client.save_state("same", ttl_seconds=1000, overwrite=True).result())
        for_sampling = counted(lambda: client.save_weights_for_sampler(f"s{time.time_ns()}").result())
        counts.append((overwriting, for_sampling))
    assert counts[0] == counts[1]
    assert counts[0][1]["open"] > 5, "something was counted"


@pytest.mark.parametrize("which", ["of a run", "of all runs", "of runs"])
def test_a_listing_opens_no_file_of_a_checkpoint_that_it_knows(
    client: TrainingClient, own_home: Path, which: str
) -> None:
    rest = RestClient(own_home)
    calls = {
        "of a run": lambda: rest.list_checkpoints(client.model_id).result(),
        "of all runs": lambda: rest.list_user_checkpoints().result(),
        "of runs": lambda: rest.list_training_runs().result(),
    }
    counts = []
    for size in (FEW, MANY):
        fill(client, own_home, size)
        counts.append(counted(calls[which]))
    assert counts[1]["stat"] - counts[0]["stat"] == MANY - FEW, "one look at each folder"
    assert {**counts[0], "stat": 0} == {**counts[1], "stat": 0}


def test_what_changes_is_seen_at_once(client: TrainingClient, own_home: Path) -> None:
    """By whatever way it changes, and whether or not the change is old enough to be remembered."""
    rest = RestClient(own_home)
    fill(client, own_home, 3)
    run = client.model_id
    place = own_home / "runs" / run / "weights"
    assert names(rest, run) == ["n0", "n1", "n2"]

    def entry(name: str):
        (found,) = [c for c in rest.list_checkpoints(run).result().checkpoints if c.checkpoint_id == f"weights/{name}"]
        return found

    before = entry("n1")
    rest.publish_checkpoint_from_tinker_path(before.tinker_path).result()
    assert entry("n1").public and not before.public
    age(place / "n1")
    assert entry("n1").public
    rest.set_checkpoint_ttl_from_tinker_path(before.tinker_path, 1000).result()
    assert entry("n1").expires_at is not None
    (place / "n2" / "more").write_bytes(b"x" * 1000)
    assert entry("n2").size_bytes == (before.size_bytes or 0) + 1000
    client.save_state("n0", overwrite=True, user_metadata={"which": "second"}).result()
    assert entry("n0").user_metadata == {"which": "second"}
    shutil.rmtree(place / "n2")
    shutil.copytree(place / "n0", place / "n3")
    assert names(rest, run) == ["n0", "n1", "n3"]
    (place / "n3" / "checkpoint.json").unlink()
    assert names(rest, run) == ["n0", "n1"]
    assert rest.get_training_run(run).result().corrupted


def test_an_expired_checkpoint_goes_with_the_next_save(
    client: TrainingClient, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose ttl was set by somebody else, and not one whose ttl was taken back or prolonged."""
    rest = RestClient(own_home)
    ttls = {"long": 1000, "short": 10, "taken back": 10, "prolonged": 10, "later": None}
    paths = {name: client.save_state(name.replace(" ", "-"), ttl).result().path for name, ttl in ttls.items()}
    rest.set_checkpoint_ttl_from_tinker_path(paths["taken back"], None).result()
    rest.set_checkpoint_ttl_from_tinker_path(paths["later"], 10).result()
    rest.set_checkpoint_ttl_from_tinker_path(paths["prolonged"], 1000).result()
    now = time.time()
    place = folder(own_home, paths["long"]).parent
    monkeypatch.setattr(time, "time", lambda: now + 20)
    for name in ("next", "and-next"):
        client.save_state(name).result()
    kept = ["and-next", "long", "next", "prolonged", "taken-back"]
    assert sorted(p.name for p in place.iterdir()) == kept
    shutil.copytree(place / "long", place / "copied")
    info = json.loads((place / "long" / "checkpoint.json").read_text())
    (place / "copied" / "checkpoint.json").write_text(json.dumps({**info, "expires_at": now + 19}))
    client.save_state("last").result()
    assert (place / "copied").exists()
    assert names(rest, client.model_id) == sorted([*kept, "last"])  # found by whoever lists
    assert not (place / "copied").exists()


def test_a_home_without_a_database_is_listed_and_remembered(client: TrainingClient, own_home: Path) -> None:
    fill(client, own_home, FEW)
    for file in own_home.glob(f"{REGISTRY_FILE}*"):
        file.unlink()
    rest = RestClient(own_home)
    expected = names(rest, client.model_id)
    assert len(expected) == FEW
    known = counted(lambda: rest.list_checkpoints(client.model_id).result())
    with file_operations() as counts:
        assert names(rest, client.model_id) == expected
    assert counts == known


@pytest.mark.parametrize("info", ["", "{", "{}", '{"spec": 1}', "null"])
def test_a_row_that_makes_no_sense_is_read_from_the_folder(
    client: TrainingClient, own_home: Path, info: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, own_home, 2)
    rest = RestClient(own_home)
    assert names(rest, client.model_id) == ["n0", "n1"]
    connection = sqlite3.connect(own_home / REGISTRY_FILE)
    with connection:
        changed = connection.execute("UPDATE checkpoint_states SET info = ?", (info,)).rowcount
    connection.close()
    assert changed == 2
    with caplog.at_level(logging.WARNING):
        assert names(rest, client.model_id) == ["n0", "n1"]
    assert not caplog.records
