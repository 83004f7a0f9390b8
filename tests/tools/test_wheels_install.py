"""Wheels through pip: downloaded into a folder with a manifest, installed without a network, and what is said on trouble.

pip sees a folder of wheels that are written here. The tests marked `network` use the real index.
"""

import base64
import hashlib
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tools.wheels.__main__ as command
from tools.wheels import folder, needs
from tools.wheels.needs import Target, WheelsError

TARGET = Target("3.12", "manylinux_2_28_x86_64")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
HERE = Target(RUNNING, TARGET.platform)
# What the made-up project needs: names that no environment of a test run can have.
CONFIG, SDK, DATA = "made_up_config", "made_up_sdk", "made_up_data"


def make_wheel(
    where: Path,
    name: str,
    version: str = "1.0",
    tag: str = "py3-none-any",
    requires: tuple[str, ...] = (),
    code: str = "",
) -> Path:
    """A wheel with one module of that name."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.9\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    path = where / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for its only index."""
    path = tmp_path / "shelf"
    path.mkdir()
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(path),
        "CONFIG_FILE": "/dev/null",
        "EXTRA_INDEX_URL": "",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that needs three packages that no image has, and torch."""
    monkeypatch.setattr(command, "IMPORTED", (CONFIG, SDK, DATA))
    path = tmp_path / "project"
    path.mkdir()
    dependencies = json.dumps([CONFIG, SDK, DATA, "torch>=2.10"])
    text = f"[project]\nrequires-python = '>=3.11'\ndependencies = {dependencies}\n"
    (path / "pyproject.toml").write_text(text + "optional-dependencies = {fast = ['made-up-kernels']}\n")
    (path / "constraints.txt").write_text(f"{CONFIG}==1.0\n")
    return path


def stock(shelf: Path) -> None:
    """Put on the shelf what the project needs, and a newer version of one package than it pins."""
    for name in (CONFIG, DATA):
        make_wheel(shelf, name)
    make_wheel(shelf, CONFIG, "2.0")
    make_wheel(shelf, SDK, requires=("helper>=1",))
    make_wheel(shelf, "helper", tag="cp312-cp312-manylinux_2_17_x86_64")


@pytest.mark.slow
def test_list_shows_sizes_and_writes_nothing(shelf: Path, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock(shelf)
    before = sorted(project.parent.rglob("*"))
    assert command.main(["list"], project) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [tuple(line.split()[:2]) for line in lines[:-1]]
    assert listed == [("helper", "1.0"), ("made-up-config", "1.0"), ("made-up-data", "1.0"), ("made-up-sdk", "1.0")]
    assert lines[-1] == "4 wheels, 0.0 MB, for Python 3.12 on manylinux_2_28_x86_64"
    assert sorted(project.parent.rglob("*")) == before


@pytest.mark.slow
def test_a_downloaded_folder_holds_a_manifest_and_replaces_its_predecessor(shelf: Path, project: Path) -> None:
    stock(shelf)
    have, dest = project / "have.txt", project / "wheels"
    have.write_text(f"torch==2.11.0\nhelper==1.3\n{DATA}==1.0\n")
    assert command.main(["download", str(dest), f"--have={have}"], project) == 0
    config, sdk = f"{CONFIG}-1.0-py3-none-any.whl", f"{SDK}-1.0-py3-none-any.whl"
    assert {path.name for path in dest.iterdir()} == {config, sdk, "wheels.json"}
    manifest = folder.read_folder(dest)
    assert (manifest.python, manifest.platform, manifest.extras) == ("3.12", "manylinux_2_28_x86_64", ())
    content = (dest / config).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert manifest.wheels[0] == folder.Entry("made-up-config", "1.0", config, len(content), digest)
    assert manifest.size == sum(path.stat().st_size for path in dest.glob("*.whl"))

    have.write_text(have.read_text() + f"{CONFIG}\n")
    assert command.main(["download", str(dest), f"--have={have}"], project) == 0
    assert {path.name for path in dest.iterdir()} == {sdk, "wheels.json"}
    assert {path.name for path in project.iterdir()} == {"constraints.txt", "have.txt", "pyproject.toml", "wheels"}


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(WheelsError, match="holds something else; name a new or an empty folder"):
        folder.write_folder(tmp_path, [], TARGET, [])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(WheelsError, match="holds something else"):
        folder.write_folder(tmp_path / "thesis.tex", [], TARGET, [])


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    wheel = folder.read_wheel(make_wheel(tmp_path, "chz"))
    dest = tmp_path / "wheels"
    folder.write_folder(dest, [wheel], TARGET, [])
    copied = dest / wheel.path.name
    copied.write_bytes(copied.read_bytes()[:-1])
    with pytest.raises(WheelsError, match=r"chz-1.0-py3-none-any.whl is not what was downloaded"):
        folder.read_folder(dest)
    copied.unlink()
    with pytest.raises(WheelsError, match=r"chz-1.0-py3-none-any.whl is missing"):
        folder.read_folder(dest)
    (dest / folder.MANIFEST).unlink()
    with pytest.raises(WheelsError, match=r"no wheels\.json here"):
        folder.read_folder(dest)


@pytest.mark.slow
def test_a_missing_wheel_is_named_with_who_needs_it(shelf: Path, tmp_path: Path) -> None:
    make_wheel(shelf, "helper", tag="cp310-cp310-manylinux_2_17_x86_64")
    make_wheel(shelf, "helper", tag="cp312-cp312-manylinux_2_31_x86_64")
    with pytest.raises(WheelsError) as error:
        folder.Index(TARGET, tmp_path).find("helper>=1", "made-up-sdk 1.0")
    assert "no wheel of helper>=1, which made-up-sdk 1.0 needs, for Python 3.12 on manylinux_2_28_x86_64" in str(
        error.value
    )
    assert "No matching distribution" in str(error.value)
    assert "--platform" in str(error.value)
    found = folder.Index(Target("3.12", "manylinux_2_31_x86_64"), tmp_path).find("helper>=1", "made-up-sdk 1.0")
    assert found.path.name == "helper-1.0-cp312-cp312-manylinux_2_31_x86_64.whl"


def test_trouble_in_a_download_leaves_no_folder(shelf: Path, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["download", str(project / "wheels")], project) == 1
    assert f"no wheel of {CONFIG.replace('_', '-')}" in capsys.readouterr().err
    assert not (project / "wheels").exists()


BACKEND = """\
import base64, pathlib
def build_wheel(directory, *_):
    pathlib.Path(directory, {name!r}).write_bytes(base64.b64decode({wheel!r}))
    return {name!r}
"""


def make_source(where: Path, wheel: Path) -> None:
    """A source archive that builds to `wheel`, in place of it."""
    files = {
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "backend.py": BACKEND.format(name=wheel.name, wheel=base64.b64encode(wheel.read_bytes()).decode()),
        "PKG-INFO": "Metadata-Version: 2.1\nName: helper\nVersion: 1.0\n",
    }
    with tarfile.open(where / "helper-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"helper-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    wheel.unlink()


@pytest.mark.slow
def test_a_package_published_as_source_is_built_if_it_runs_anywhere(shelf: Path, tmp_path: Path) -> None:
    make_source(shelf, make_wheel(tmp_path, "helper", code="PURE = True"))
    wheel = folder.Index(TARGET, tmp_path).find("helper>=1", "tinker 1.0")
    assert wheel.path.name == "helper-1.0-py3-none-any.whl"
    assert wheel.name == "helper"


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["cp312-abi3-linux_x86_64", "py312-none-any"])
def test_a_package_whose_source_builds_for_this_machine_alone_is_refused(shelf: Path, tmp_path: Path, tag: str) -> None:
    make_source(shelf, make_wheel(tmp_path, "helper", tag=tag))
    with pytest.raises(
        WheelsError, match=rf"helper>=1, which made-up-sdk 1.0 needs.* its source builds to helper-1.0-{tag}"
    ):
        folder.Index(Target("3.12", "manylinux_2_28_aarch64"), tmp_path).find("helper>=1", "made-up-sdk 1.0")


# ---- on the target


def write_wheels(where: Path, *paths: Path, extras: tuple[str, ...] = ()) -> Path:
    """A folder as `download` writes it, for the Python that runs."""
    folder.write_folder(where, [folder.read_wheel(path) for path in paths], HERE, extras)
    return where


@pytest.mark.slow
def test_install_unpacks_checks_and_prints_the_path(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [make_wheel(tmp_path, name, requires=("helper>=1",)) for name in (CONFIG, SDK)]
    paths += [make_wheel(tmp_path, DATA, code="import helper"), make_wheel(tmp_path, "helper", code="READY = True")]
    site = tmp_path / "site"
    assert command.main(["install", str(write_wheels(tmp_path / "wheels", *paths)), f"--target={site}"], project) == 0
    said = capsys.readouterr()
    assert f"  export PYTHONPATH={site}:{project}\n" in said.out
    assert said.err == ""
    assert (site / "helper.py").read_text() == "READY = True"

    fewer = write_wheels(tmp_path / "fewer", paths[0])
    folder.install_folder(fewer, folder.read_folder(fewer), site)  # over its own work, of which nothing stays
    assert [path.name for path in site.glob("*.py")] == [f"{CONFIG}.py"]


@pytest.mark.slow
def test_install_names_what_is_still_missing(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [make_wheel(tmp_path, name, requires=("never-there>=3",)) for name in (CONFIG, DATA)]
    paths.append(make_wheel(tmp_path, SDK, code="raise RuntimeError('no such driver')"))
    wheels = write_wheels(tmp_path / "wheels", *paths, extras=("fast",))
    assert command.main(["install", str(wheels), f"--target={tmp_path / 'site'}"], project) == 1
    said = capsys.readouterr()
    assert "export PYTHONPATH=" in said.out
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert any("pyproject.toml needs made-up-kernels, but made-up-kernels is not installed" in line for line in errors)
    assert any("made-up-config 1.0 needs never-there>=3" in line and "--have" in line for line in errors)
    assert any(f"`import {SDK}` fails" in line and "no such driver" in line for line in errors)
    assert len(errors) == 4


def test_a_wheel_that_pip_refuses_is_named(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_wheel(tmp_path, CONFIG, tag="cp310-cp310-win_amd64")
    wheels = write_wheels(tmp_path / "wheels", path)
    assert command.main(["install", str(wheels), f"--target={tmp_path / 'site'}"], project) == 1
    assert f"{path.name} is not a supported wheel on this platform" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_another_python_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_folder(tmp_path / "wheels", [], Target("3.99", TARGET.platform), [])
    assert command.main(["install", str(tmp_path / "wheels"), f"--target={tmp_path / 'site'}"]) == 1
    error = capsys.readouterr().err
    assert f"are for Python 3.99, and this is {RUNNING}" in error
    assert f"--python {RUNNING}" in error
    assert not (tmp_path / "site").exists()


def test_a_missing_have_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", f"--have={tmp_path / 'none.txt'}"]) == 1
    assert "none.txt: no such file" in capsys.readouterr().err


@pytest.mark.network
def test_the_real_wheels_are_small_and_for_the_target(tmp_path: Path) -> None:
    assert command.main(["download", str(tmp_path / "wheels"), "--python=3.12"]) == 0
    manifest = folder.read_folder(tmp_path / "wheels")
    assert manifest.size < 40e6
    names = {entry.name for entry in manifest.wheels}
    assert {*command.IMPORTED, "pydantic-core", "orjson"} <= names
    assert not any(map(needs.never_carried, names))
    compiled = [entry.file for entry in manifest.wheels if not entry.file.endswith("-any.whl")]
    assert all(("-cp312-cp312-" in name or "-abi3-" in name) and "manylinux" in name for name in compiled), compiled


@pytest.mark.network
def test_the_real_wheels_work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.main(["download", str(tmp_path / "wheels"), f"--python={RUNNING}"]) == 0
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert command.main(["install", str(tmp_path / "wheels"), f"--target={tmp_path / 'site'}"]) == 0
