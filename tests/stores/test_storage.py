"""Storages keep what is written, as a dict would, and nothing outside their root."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tinker_cookbook.exceptions import ConfigurationError, MissingPackageError
from tinker_cookbook.stores import FsspecStorage, LocalStorage, Storage, storage_from_uri, storage_join
from tinker_cookbook.utils import files

FILES = ("x", "d/x", "d/z.jsonl", "d/e/y", "é ü/%20#")
FOLDERS = ("", "d", "d/e", "é ü", "missing")

actions = st.lists(
    st.tuples(st.sampled_from(("write", "append", "remove")), st.sampled_from(FILES), st.binary(max_size=6)),
    max_size=12,
)


def memory(_: Path) -> Storage:
    return FsspecStorage(fsspec.filesystem("memory"), f"test-{uuid4().hex}")


def folder_by_fsspec(path: Path) -> Storage:
    return FsspecStorage(fsspec.filesystem("file"), str(path))


KINDS: dict[str, Callable[[Path], Storage]] = {"local": LocalStorage, "memory": memory, "file": folder_by_fsspec}


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return KINDS[request.param](tmp_path / "root")


def names(storage: Storage, folder: str) -> list[str]:
    """Without empty folders, which object stores do not have."""
    return [
        name
        for name in storage.list_dir(folder)
        if storage.stat(path := storage_join(folder, name)) is not None or names(storage, path)
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(actions=actions, offset=st.integers(0, 8), length=st.none() | st.integers(0, 8))
@examples(30)
def test_it_is_a_dict(kind: str, actions: list[tuple[str, str, bytes]], offset: int, length: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage, model = KINDS[kind](Path(folder)), dict[str, bytes]()
        for action, path, data in actions:
            if action == "remove":
                storage.remove(path)
                model.pop(path, None)
            else:
                getattr(storage, action)(path, data)
                model[path] = (model.get(path, b"") if action == "append" else b"") + data
        for path in FILES:
            stat = storage.stat(path)
            assert (stat.size if stat else None) == (len(model[path]) if path in model else None)
            assert storage.exists(path) == (path in model)
            if path not in model:
                for read in (storage.read, lambda path: storage.read_range(path, 0)):
                    with pytest.raises(FileNotFoundError):
                        read(path)
                continue
            assert storage.read(path) == model[path]
            assert storage.read_range(path, offset, length) == model[path][offset:][:length]
        for folder_name in FOLDERS:
            inside = [path.removeprefix(f"{folder_name}/") for path in model if path.startswith(f"{folder_name}/")]
            inside = inside if folder_name else list(model)
            assert names(storage, folder_name) == sorted({path.partition("/")[0] for path in inside})


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/hostname", "..", "x\0y"])
def test_no_path_leaves_the_root(storage: Storage, tmp_path: Path, path: str) -> None:
    (tmp_path / "x").write_text("outside")
    calls: list[Callable[[], Any]] = [
        lambda: storage.url(path),
        lambda: storage.read(path),
        lambda: storage.write(path, b"1"),
        lambda: storage.append(path, b"1"),
        lambda: storage.exists(path),
        lambda: storage.stat(path),
        lambda: storage.read_range(path, 0),
        lambda: storage.list_dir(path),
        lambda: storage.remove(path),
        lambda: storage.remove_dir(path),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="must be a path below"):
            call()
    assert (tmp_path / "x").read_text() == "outside"


def test_no_link_leaves_the_root(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    for call in (storage.read, storage.remove, lambda path: storage.write(path, b"1")):
        with pytest.raises(ConfigurationError, match="a link leads out of"):
            call("link/secret")
    assert (tmp_path / "secret").read_text() == "outside"


def test_folders_go_when_they_are_empty(storage: Storage) -> None:
    storage.write("d/x", b"1")
    storage.remove_dir("d")
    assert storage.read("d/x") == b"1", "not one with a file in it"
    storage.remove("d/x")
    storage.remove_dir("d")
    storage.remove_dir("missing")
    assert not storage.exists("d")


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("x", b"before")
    (tmp_path / ".x.0123456789ab.tmp").write_bytes(b"bef")  # of a writer that was killed
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        storage.write("x", b"after")
    assert storage.read("x") == b"before" and storage.list_dir("") == ["x"]


def test_a_folder_that_is_only_looked_at_is_not_made(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "none", mkdir=False)
    assert storage.list_dir("") == [] and not storage.exists("x") and not (tmp_path / "none").exists()


def test_times_are_told_where_they_are_kept(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write("x", b"1")
    stat = storage.stat("x")
    assert stat is not None and stat.mtime is not None and stat.mtime > 1.7e9
    if isinstance(storage, FsspecStorage):
        monkeypatch.setattr(
            type(storage._fs), "modified", lambda *_: (_ for _ in ()).throw(NotImplementedError), raising=True
        )
        without = storage.stat("x")
        assert without is not None and without.mtime is None


class TestUris:
    def test_a_path_and_a_file_uri_are_the_same_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "a b%"
        storage = storage_from_uri(str(folder))
        storage.write("d/x", b"1")
        assert storage.url("d/x") == (folder / "d" / "x").as_uri()
        again = storage_from_uri(folder.as_uri(), mkdir=False)
        assert isinstance(again, LocalStorage) and again.read("d/x") == b"1"

    def test_what_fsspec_knows(self) -> None:
        root = f"memory://test-{uuid4().hex}"
        storage_from_uri(root).write("d/x", b"1")
        assert isinstance(storage_from_uri(root), FsspecStorage)
        assert storage_from_uri(f"{root}/d").read("x") == b"1"
        assert storage_from_uri(root).url("d/x") == f"memory:///{root.removeprefix('memory://')}/d/x"

    def test_what_it_does_not_know(self) -> None:
        with pytest.raises(ConfigurationError, match=r"uri='nosuch://a': .*give a path"):
            storage_from_uri("nosuch://a")

    def test_parts_are_joined(self) -> None:
        assert storage_join("a", "", "b/", "/c/d") == "a/b/c/d" and storage_join() == storage_join("", "") == ""

    def test_a_path_is_as_short_as_it_gets(self, tmp_path: Path) -> None:
        assert storage_join("a/b", "../c") == "a/c" and storage_join("a", "./b") == "a/b"
        storage = LocalStorage(tmp_path)
        storage.write("a/../b//./c", b"1")
        assert storage.list_dir("a/..") == ["b"] and storage.read("b/c") == b"1"

    def test_a_package_that_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(MissingPackageError, match="install the package of s3") as caught:
            storage_from_uri("s3://bucket/runs")
        assert isinstance(caught.value, ImportError)
