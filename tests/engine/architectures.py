"""Which of the engine's tests run over several architectures, and over which ones.

    TINKER_TEST_MODELS=nemotron_h,lfm2 python -m pytest tests/engine          # `make test-models` names those in OTHERS

A test that uses `tied_model`, directly or through other fixtures, runs once for each of `models_under_test`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.architecture_configs import ARCHITECTURES
from tests.engine.devices import PlaceError, here

FOLDER = Path(__file__).parent
VARIABLE = "TINKER_TEST_MODELS"
FIXTURE = "tied_model"

DENSE = "qwen3"
MODELS = (DENSE, "qwen3_5_text")
"""In `make test`: attention alone, and a gated delta rule between layers of attention."""

OTHERS = ("nemotron_h", "lfm2", "kimi_linear", "deepseek_v3")
"""In `make test-models`: Mamba 2 and experts, short convolution, KDA with latent attention, latent attention alone."""

EVERY_MODEL = frozenset(
    {
        "test_checkpoints",
        "test_continuous_batching",
        "test_golden_losses",
        "test_inflight",
        "test_isolation",
        "test_kv_budget",
        "test_lockstep",
        "test_losses",
        "test_merge",
        "test_origins",
        "test_out_of_memory",
        "test_packing",
        "test_peft",
        "test_prefix_reuse",
        "test_prompt_scores",
        "test_randomness",
        "test_sampling",
        "test_shares",
        "test_snapshots",
        "test_turns",
    }
)
"""What a state of a sequence may change: sampling, training, resuming, fairness, memory."""

ONE_MODEL: dict[str, str] = {}
"""Files with a model, and single tests of files of EVERY_MODEL, for which one architecture is enough, with the reason."""

_USES_A_MODEL = re.compile(r"\b(tied_model|base_sampler|(training|sampler|reference): )")


def models_under_test() -> tuple[str, ...]:
    """Names of architectures. Raises PlaceError if the environment names one that there is not."""
    names = tuple(filter(None, os.environ.get(VARIABLE, "").split(",")))
    unknown = sorted(set(names) - ARCHITECTURES.keys())
    if unknown:
        raise PlaceError(f"{VARIABLE}: {', '.join(unknown)} not in benchmarks/architecture_configs.py")
    return names or ((DENSE,) if here().captured else MODELS)  # layers with a state are decoded by the reference


def runs_every_model(file: str, test: str) -> bool:
    return file in EVERY_MODEL and f"{file}::{test}" not in ONE_MODEL


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A hook of this folder: run a test that uses `tied_model` once for each architecture."""
    path = metafunc.definition.path
    if FIXTURE in metafunc.fixturenames and runs_every_model(path.stem, metafunc.function.__name__):
        metafunc.parametrize(FIXTURE, models_under_test(), indirect=True, scope="session")


def runs_chosen(item: pytest.Item) -> bool:
    """Whether a test is to run: if the environment names architectures, those over them alone."""
    return VARIABLE not in os.environ or FIXTURE in getattr(getattr(item, "callspec", None), "params", {})


def undecided() -> list[str]:
    """Files that use a model and are in neither table, or in both; names in a table that are no file, or no test of one."""
    files = {path.stem: path.read_text() for path in FOLDER.glob("test_*.py")}
    using = {name for name, text in files.items() if _USES_A_MODEL.search(text)}
    listed: Sequence[str] = [*EVERY_MODEL, *(name for name in ONE_MODEL if "::" not in name)]
    tests = [name.split("::") for name in ONE_MODEL if "::" in name]
    unknown = {
        "::".join(name) for name in tests if name[0] not in EVERY_MODEL or f"def {name[1]}(" not in files[name[0]]
    }
    wrong = (using - set(listed)) | (set(listed) - files.keys()) | unknown
    return sorted(wrong | {name for name in listed if listed.count(name) > 1})
