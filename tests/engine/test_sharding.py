"""A base model that two processes divide: what each holds, passes that only one of them has, and errors that strike one."""

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.helpers import assert_samples_agree
from tests.engine.sharding_program import MODEL, WORK, new_state, sample, train
from tests.engine.torchrun import ROOT, rank_environments
from tests.waiting import HANG_SECONDS
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import load_model

pytestmark = pytest.mark.distributed
CLOSE = 1e-6


def run_program(folder: Path, returncodes: list[int], *arguments: str) -> list[dict[str, Any]]:
    """What each rank found."""
    results = folder / "results"
    command = [sys.executable, "-m", "tests.engine.sharding_program", str(results), *arguments]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for environment in rank_environments()
    ]
    try:
        errors = [process.communicate(timeout=HANG_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == returncodes, errors
    return [pickle.loads(Path(f"{results}{rank}").read_bytes()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_program(tmp_path_factory.mktemp("sharding"), [0, 3])


def load_whole(name: str) -> BaseModel:
    """Computes through its modules, as a sharded one does: fused projections round differently."""
    model = load_model(name)
    model.decoder = None
    return model


@pytest.fixture(scope="module")
def whole() -> BaseModel:
    return load_whole(MODEL)


def test_each_rank_holds_half_of_the_base_model(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        memory = found[rank]["memory"]
        assert memory["whole"] > 9_000_000
        for when in ("between", "after"):
            assert 0.49 * memory["whole"] < memory[when] < 0.51 * memory["whole"], (rank, when)


def test_a_pass_holds_two_layers_and_what_is_in_none(found: list[dict[str, Any]]) -> None:
    """Beside its half, and some activations of four tokens. The next layer is there twice while it arrives."""
    for rank in range(2):
        memory = found[rank]["memory"]
        most = memory["between"] + memory["rest"] + 3.2 * memory["layer"]
        assert len(memory["during"]) == 5
        assert memory["between"] + memory["rest"] + memory["layer"] < max(memory["during"]) < most, rank


def assert_work_is_that_of(whole: BaseModel, found: list[dict[str, Any]]) -> None:
    for rank, calls in enumerate(WORK):
        for lengths, (loss, gradients) in zip(calls, found[rank]["work"], strict=True):
            expected_loss, expected = train(whole, new_state(whole), lengths)
            assert loss == pytest.approx(expected_loss, rel=CLOSE)
            assert any(gradient.any() for gradient in expected)
            for one, other in zip(gradients, expected, strict=True):
                scale = float(other.abs().max())
                np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=CLOSE * max(1.0, scale))


def test_ranks_with_other_numbers_of_passes_compute_what_one_process_does(
    found: list[dict[str, Any]], whole: BaseModel
) -> None:
    assert_work_is_that_of(whole, found)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h"])
def test_layers_with_a_state_train_and_sample(
    architecture: str, written_model: Callable[[str], str], tmp_path: Path
) -> None:
    path = written_model(architecture)
    found, whole = run_program(tmp_path, [0, 0], path), load_whole(path)
    assert_work_is_that_of(whole, found)
    expected = sample(whole)
    assert [cached for cached, *_ in found[0]["samples"]] == [one.cached_tokens for one in expected]
    assert expected[-1].cached_tokens > 0
    assert_samples_agree([sequence for _, sequence in found[0]["samples"]], [one.sequences[0] for one in expected])


def test_an_error_in_the_middle_of_a_pass_leaves_the_ranks_together(
    found: list[dict[str, Any]], whole: BaseModel
) -> None:
    loss, _ = train(whole, new_state(whole), (20,))
    assert [error for error, _ in (found[rank]["error"] for rank in range(2))] == ["", "in the third layer"]
    assert [found[rank]["error"][1] for rank in range(2)] == pytest.approx([loss, loss], rel=CLOSE)


def test_one_rank_alone_may_compute(found: list[dict[str, Any]]) -> None:
    assert found[1]["metrics"] == {}
    assert np.isfinite(found[0]["metrics"]["loss:sum"])


def test_a_rank_that_cannot_load_its_part_ends_the_loading_of_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["failing_load"] == (
        "ReplicaError: another rank could not load its shard of the base model: see its output"
    )
    assert re.match(r"ModelLoadError: model 'no/such/folder'.*no config\.json", found[1]["failing_load"])


def test_nothing_is_computed_outside_of_turns(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert "only in turns" in found[rank]["outside"]


def test_a_rank_that_dies_in_a_pass_is_an_error_and_no_wait(found: list[dict[str, Any]]) -> None:
    assert found[0]["gone"][0].startswith("gone: ")
    assert found[0]["gone"][1] == found[0]["gone"][0]
