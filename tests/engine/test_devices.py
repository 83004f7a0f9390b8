"""The suite on another device: what the environment may say, what is left out there, and how near numbers must come."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine import architectures, captured, helpers, selection
from tests.engine.devices import Place, PlaceError, here, place_from
from tests.engine.helpers import assert_close, assert_near, assert_repeats, assert_same_tokens, near, tolerance
from tests.waiting import HANG_SECONDS
from tinker_local_backend.environment import default_device, default_dtype

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
ON_GPU, IN_BFLOAT16 = Place(GPU, torch.float32), Place(CPU, torch.bfloat16)


def test_without_the_variables_tests_run_on_the_cpu_in_float32() -> None:
    assert (
        place_from({}) == place_from({"TINKER_TEST_DEVICE": "", "TINKER_TEST_DTYPE": ""}) == Place(CPU, torch.float32)
    )
    assert place_from({"TINKER_TEST_DTYPE": "bfloat16"}) == IN_BFLOAT16


@pytest.mark.parametrize("name", ["meta", "no-such-device", "cuda:1000"])
def test_a_device_that_cannot_compute_is_named_with_the_fix(name: str) -> None:
    with pytest.raises(
        PlaceError, match=rf"TINKER_TEST_DEVICE='{name}'.*cannot compute there.*unset TINKER_TEST_DEVICE"
    ):
        place_from({"TINKER_TEST_DEVICE": name})


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(PlaceError, match="TINKER_TEST_DTYPE must be float32 or bfloat16, got 'float16'"):
        place_from({"TINKER_TEST_DTYPE": "float16"})


def test_float32_that_is_rounded_to_tf32_is_refused() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(PlaceError, match="TF32"):
            place_from({})
        assert place_from({"TINKER_TEST_DTYPE": "bfloat16"}) == IN_BFLOAT16
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_engine_is_where_the_tests_are() -> None:
    assert default_device() == here().device
    assert default_dtype(here().device) == here().dtype


@pytest.mark.parametrize(
    ("place", "runs"), [(Place(CPU, torch.float32), True), (IN_BFLOAT16, True), (ON_GPU, False)], ids=str
)
def test_a_promise_of_the_cpu_runs_there_only(place: Place, runs: bool) -> None:
    assert place.runs({"parametrize", "cpu_promise"}) == runs
    assert place.runs({"parametrize"})


CONFTEST = """
import torch
from tests.engine import selection
from tests.engine.devices import Place
from tests.engine.selection import pytest_collection_modifyitems, pytest_configure, pytest_report_collectionfinish

if {pretend}:
    selection.here = lambda: Place(torch.device("cuda"), torch.float32)
"""

DUMMIES = """
import pytest

def test_anywhere(): pass

@pytest.mark.cpu_promise
def test_bits(): assert False
"""


def run_dummies(folder: Path, pretend: bool, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(pretend=pretend))
    (folder / "test_dummies.py").write_text(DUMMIES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [*command, str(folder)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_SECONDS
    )


def test_every_test_that_samples_runs_captured_or_says_why_not() -> None:
    assert captured.undecided() == []


def test_every_test_with_a_model_runs_over_several_or_says_why_not() -> None:
    assert architectures.undecided() == []


def test_an_architecture_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(architectures.VARIABLE, "lfm2,nonsense")
    with pytest.raises(PlaceError, match="TINKER_TEST_MODELS: nonsense not in"):
        architectures.models_under_test()


def test_make_names_the_architectures_that_the_tests_know() -> None:
    (named,) = re.findall(rf"{architectures.VARIABLE}=(\S+)", (ROOT / "Makefile").read_text())
    assert named.split(",") == [*architectures.MODELS[1:], *architectures.OTHERS]


@pytest.mark.slow
def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    done = run_dummies(tmp_path, pretend=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine tests on cuda in float32; 1 deselected as promises of the CPU (cpu_promise)" in done.stdout
    assert "1 passed, 1 deselected" in done.stdout


def test_a_run_on_a_device_that_is_not_there_ends_with_the_fix(tmp_path: Path) -> None:
    done = run_dummies(tmp_path, pretend=False, TINKER_TEST_DEVICE="meta")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: TINKER_TEST_DEVICE='meta'" in done.stderr and "Traceback" not in done.stderr


def test_under_xdist_the_workers_tell_the_main_process() -> None:
    """Only they collect."""
    worker, main = (SimpleNamespace(stash=pytest.Stash(), workeroutput={}) for _ in range(2))
    worker.stash[selection.DESELECTED] = 7
    selection.pytest_sessionfinish(SimpleNamespace(config=worker))  # pyright: ignore[reportArgumentType]
    selection.pytest_testnodedown(SimpleNamespace(config=main, workeroutput=worker.workeroutput))
    assert "7 deselected" in selection.summary(main)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The helpers as they are in another place."""
    monkeypatch.setattr(helpers, "here", lambda: request.param)
    helpers.tokens_compared.clear()
    return request.param


def fails(assertion, *arguments, **more) -> bool:
    try:
        assertion(*arguments, **more)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("elsewhere", [Place(CPU, torch.float32)], indirect=True)
def test_on_the_cpu_bounds_are_what_they_say(elsewhere: Place) -> None:
    ones = np.ones(1000)
    matrices = {"a": ones}
    assert tolerance(1e-6) == 1e-6 and near(1.0, rel=1e-6) != 1 + 2e-6
    assert fails(assert_near, ones + 2e-5, ones, atol=1e-5)
    assert fails(assert_close, {"a": ones + 2e-5}, matrices, rtol=1e-5)
    assert fails(assert_repeats, {"a": ones + 1e-15}, matrices) and fails(assert_repeats, [1.0], [1.0 + 1e-15])
    assert fails(assert_same_tokens, [[1, 2, 3]], [[1, 3, 3]])


@pytest.mark.parametrize("elsewhere", [ON_GPU, IN_BFLOAT16, Place(GPU, torch.bfloat16)], indirect=True, ids=str)
def test_elsewhere_rounding_is_allowed_and_mistakes_are_not(elsewhere: Place) -> None:
    rng = np.random.default_rng(0)
    logprobs, gradient = rng.normal(-8, 1, 1000), rng.normal(size=(64, 4))
    rounding = (1e-5 if elsewhere.dtype == torch.float32 else 0.02) * rng.normal(size=1000)
    assert_near(logprobs + rounding, logprobs, atol=1e-5)
    assert fails(assert_near, rng.permutation(logprobs), logprobs, atol=1e-5)
    assert fails(assert_near, logprobs[:5] + 1.0, logprobs[:5], atol=1e-4)
    assert_close({"a": gradient + rounding[:256].reshape(64, 4)}, {"a": gradient}, rtol=1e-5)
    assert fails(assert_close, {"a": 2 * gradient}, {"a": gradient}, rtol=1e-5)
    assert fails(assert_close, {"a": np.roll(gradient, 1)}, {"a": gradient}, rtol=1e-5)
    assert fails(assert_repeats, {"a": np.roll(gradient, 1)}, {"a": gradient})
    assert fails(assert_repeats, [[1, 2]], [[1, 3]])


@pytest.mark.parametrize("elsewhere", [ON_GPU, IN_BFLOAT16], indirect=True, ids=str)
def test_elsewhere_a_few_sequences_may_part_to_a_token_beside_the_expected_one(elsewhere: Place) -> None:
    rng = np.random.default_rng(0)
    expected = rng.integers(0, 1500, (40, 8)).tolist()
    parted = [
        [*sequence[:3], sequence[3] + 1, *sequence[:4]] if i < 3 else sequence for i, sequence in enumerate(expected)
    ]
    assert assert_same_tokens(parted, expected) == [i >= 3 for i in range(40)]
    of_another_context = rng.integers(0, 1500, (40, 8)).tolist()
    assert fails(assert_same_tokens, of_another_context, expected)
    helpers.tokens_compared.clear()
    assert fails(assert_same_tokens, of_another_context[:4], expected[:4])
