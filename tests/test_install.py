"""The project where it was not made: a wheel, an environment of its own, and commands in another folder.

`make test-install` downloads what the wheel asks for and runs every recipe. `make test-install PACKAGES=present`, which CI calls,
borrows the packages of the environment that the tests run in, and runs one command of each kind.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.recipe_table import RECIPES
from tests.waiting import HANG_SECONDS
from tools.torch_index import choose

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[1]
PRESENT = os.environ.get("TINKER_TEST_PACKAGES") == "present"
SHIPPED = ("example_data", "configs")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(words: Sequence[str], cwd: Path, typed: str = "", **env: str) -> str:
    """What a command prints, which must not fail. Of this process's variables it gets what pip and the network need."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER_", "PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=kept | env,
        input=typed,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=6 * HANG_SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-4000:]}"
    return done.stdout


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@dataclass(frozen=True)
class Built:
    """What was built."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    venv.create(folder / "builder", with_pip=True)
    python = str(folder / "builder" / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", *PYPROJECT["build-system"]["requires"]], folder)

    def build(kind: str, tree: Path, into: str) -> Path:
        code = f"from setuptools import build_meta; print('made', build_meta.build_{kind}({str(folder / into)!r}))"
        (folder / into).mkdir()
        found = re.search(r"^made (\S+)$", run([python, "-c", code], tree), re.MULTILINE)
        assert found is not None
        return folder / into / found[1]

    sdist = build("sdist", source, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(sdist, build("wheel", source, "wheel"), build("wheel", unpacked, "wheel_of_sdist"))


@dataclass(frozen=True)
class Place:
    """An environment with the wheel, and a folder far from this checkout."""

    python: Path
    folder: Path

    def run(self, *words: str, typed: str = "") -> str:
        path = os.pathsep.join([str(self.python.parent), os.environ["PATH"]])
        own = {"HOME": str(self.folder), "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        own["TINKER_LOCAL_HOME"] = str(self.folder / "home")
        return run([str(self.python.parent / words[0]), *words[1:]], self.folder, typed, **own)


@pytest.fixture(scope="module")
def place(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=True)
    away = folder / "away"
    away.mkdir()
    python = folder / "env" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if PRESENT:
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        borrowed = [entry for entry in sys.path if entry.endswith("site-packages")]
        (packages / "borrowed.pth").write_text("\n".join(borrowed))
        run([*pip, "--no-deps", "--no-index", str(built.wheel)], away)
    else:
        constraints = str(ROOT / "constraints.txt")
        index, _ = choose(os.environ)
        where = ["--extra-index-url", index] if index is not None else []
        run([*pip, "-c", constraints, *where, "torch"], away)
        run([*pip, "-c", constraints, str(built.wheel)], away)
    yield Place(python, away)
    shutil.rmtree(folder)  # gigabytes, where everything was downloaded


def content(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist() if not entry.is_dir()}


def test_the_source_distribution_is_the_whole_project(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked()) - held == set()
    assert content(built.wheel_of_sdist) == content(built.wheel)


def test_the_wheel_has_the_commands_the_data_and_no_tools(built: Built) -> None:
    names = content(built.wheel).keys()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"recipes", "tinker_cookbook", "tinker_local_backend", "tinker_local_data"}
    shipped = {f"tinker_local_data/{name}" for name in tracked() if name.startswith(SHIPPED)}
    assert len(shipped) > 50 and {name for name in names if name.startswith("tinker_local_data/")} == shipped
    code = {name for name in tracked() if name.startswith(("recipes/", "tinker_cookbook/", "tinker_local_backend/"))}
    assert code - names == set()


def test_it_is_the_installed_one_that_runs(place: Place) -> None:
    code = (
        "import importlib.util as u, recipes, tinker_cookbook, tinker_local_backend\n"
        "print(*(m.__file__ for m in (recipes, tinker_cookbook, tinker_local_backend)), sep='\\n')\n"
        "assert not any(map(u.find_spec, ('benchmarks', 'tools', 'tests', 'example_data')))"
    )
    environment = place.python.parents[1]
    printed = place.run("python", "-c", code).splitlines()
    assert len(printed) == 3 and all(Path(line).is_relative_to(environment) for line in printed)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("tinker-recipes", "  single_turn "),
        (
            "tinker-recipes rl_basic max_steps=1 groups_per_batch=4 num_test=4 lora_rank=4 on_zero_advantages=skip",
            "correct",
        ),
        (
            "python -m recipes.sl_basic dataset=example_data/conversations.jsonl model_name=example_data/tiny_chat max_steps=1 "
            "lora_rank=4",
            "nll",
        ),
        (
            "python -m recipes.run_experiment configs/mixture.toml max_steps=1 num_rollouts=16 num_test=4 lora_rank=4 "
            "on_zero_advantages=skip",
            "Files: outputs/mixture",
        ),
        ("python -m tinker_local_backend.check_logprobs max_tokens=8", "tiny_chat"),
    ],
    ids=["list", "console_command", "shipped_data", "shipped_config", "engine"],
)
def test_a_command_runs_in_another_folder(place: Place, command: str, shown: str) -> None:
    assert shown in place.run(*command.split())


@pytest.mark.skipif(PRESENT, reason="takes minutes: with PACKAGES=downloaded")
def test_every_recipe_runs_in_another_folder(place: Place) -> None:
    sl_basic = place.folder / "recipes.sl_basic"
    for recipe in RECIPES:
        if recipe.needs:
            continue
        words = recipe.command(place.folder / recipe.module, sl_basic, small=True)
        place.run("python", *words[1:], typed=recipe.stdin)
        assert [name for name in recipe.files if not (place.folder / recipe.module / name).exists()] == [], (
            recipe.module
        )
