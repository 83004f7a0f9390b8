"""A tiny model made once per session, and settings under which a benchmark takes a second."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("benchmark-models"))


@pytest.fixture
def quick(models_dir: str, tmp_path: Path) -> dict:
    """Keys of every benchmark: the tiny shape, here, once."""
    return {"threads": 1, "rank": 4, "models_dir": models_dir, "output": str(tmp_path / "results")}


@pytest.fixture
def quick_comparison(quick: dict) -> dict:
    """Keys of the benchmarks that compare: one repetition, no peers, no waiting."""
    return {**quick, "repetitions": 1, "peers": [], "quiet_seconds": 0.0, "reruns": 0, "max_new_tokens": 6}
