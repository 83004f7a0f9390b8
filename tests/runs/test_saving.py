"""Checkpoints are listed when they are safe, and what cannot be listed is refused before anything is saved."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.checkpoints import get_last_checkpoint, load_checkpoints_file, save_checkpoint


class FakeTrainingClient:
    """Saves like the SDK's client: a call submits, awaiting its result completes. Records the order of events."""

    def __init__(self, log_path: Path, fail: bool = False) -> None:
        self.log_path = log_path
        self.fail = fail
        self.events: list[str] = []

    def _save(self, kind: str, name: str, ttl_seconds: int | None) -> Any:
        self.events.append(f"submit {kind} {name} {ttl_seconds}")

        async def wait() -> SimpleNamespace:
            assert load_checkpoints_file(self.log_path) == []
            if self.fail:
                raise RuntimeError("no disk")
            self.events.append(f"saved {kind}")
            return SimpleNamespace(path=f"tinker://r/{kind}/{name}")

        return wait()

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Any:
        return self._save("weights", name, ttl_seconds)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Any:
        return self._save("sampler_weights", name, ttl_seconds)


class TestSaveCheckpoint:
    def test_both_are_submitted_then_saved_then_recorded(self, tmp_path: Path) -> None:
        client = FakeTrainingClient(tmp_path)
        paths = asyncio.run(
            save_checkpoint(
                client, "000003", tmp_path, {"batch": 3, "epoch": 0, "seen": 7}, kind="both", ttl_seconds=60
            )
        )
        assert paths == {
            "state_path": "tinker://r/weights/000003",
            "sampler_path": "tinker://r/sampler_weights/000003",
        }
        assert client.events == [
            "submit weights 000003 60",
            "submit sampler_weights 000003 60",
            "saved weights",
            "saved sampler_weights",
        ]
        record = get_last_checkpoint(tmp_path)
        assert record is not None
        assert record.to_dict() == {"name": "000003", "batch": 3, "epoch": 0, "seen": 7, **paths}

    def test_a_failed_save_leaves_no_line(self, tmp_path: Path) -> None:
        client = FakeTrainingClient(tmp_path, fail=True)
        with pytest.raises(RuntimeError, match="no disk"):
            asyncio.run(save_checkpoint(client, "a", tmp_path, {"batch": 1}))
        assert load_checkpoints_file(tmp_path) == []

    @pytest.mark.parametrize("state", [{}, {"batch": 1, "state_path": "x"}, {"batch": 1, "name": "b"}])
    def test_a_wrong_loop_state_is_refused_before_saving(self, tmp_path: Path, state: dict[str, Any]) -> None:
        client = FakeTrainingClient(tmp_path)
        with pytest.raises(CheckpointError):
            asyncio.run(save_checkpoint(client, "a", tmp_path, state))
        assert client.events == []

    def test_an_unknown_kind_is_refused(self, tmp_path: Path) -> None:
        kind: Any = "all"
        with pytest.raises(ConfigurationError, match="kind='all'"):
            asyncio.run(save_checkpoint(FakeTrainingClient(tmp_path), "a", tmp_path, {"batch": 1}, kind))
