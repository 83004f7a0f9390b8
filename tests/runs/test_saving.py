"""Checkpoints are listed when they are safe, and what cannot be listed is refused before anything is saved."""

import asyncio
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.checkpoints import (
    get_last_checkpoint,
    load_checkpoints_file,
    save_checkpoint,
    save_checkpoint_async,
)

Save = Callable[..., dict[str, str]]


class Future:
    """Done when it is awaited, or when its result is asked for."""

    def __init__(self, finish: Callable[[], SimpleNamespace]) -> None:
        self.result = finish

    def __await__(self) -> Generator[Any, None, SimpleNamespace]:
        yield from asyncio.sleep(0).__await__()
        return self.result()


def save_and_await(*args: Any, **kwargs: Any) -> dict[str, str]:
    return asyncio.run(save_checkpoint_async(*args, **kwargs))


@pytest.fixture(params=[save_checkpoint, save_and_await], ids=["blocking", "async"])
def save(request: pytest.FixtureRequest) -> Save:
    return request.param


class FakeTrainingClient:
    """Saves like the SDK's client: a call submits, awaiting its result completes. Records the order of events."""

    def __init__(self, log_path: Path, fail: bool = False) -> None:
        self.log_path = log_path
        self.fail = fail
        self.events: list[str] = []

    def _save(self, kind: str, name: str, ttl_seconds: int | None) -> Any:
        self.events.append(f"submit {kind} {name} {ttl_seconds}")

        def finish() -> SimpleNamespace:
            assert load_checkpoints_file(self.log_path) == []
            if self.fail:
                raise RuntimeError("no disk")
            self.events.append(f"saved {kind}")
            return SimpleNamespace(path=f"tinker://r/{kind}/{name}")

        return Future(finish)

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Any:
        return self._save("weights", name, ttl_seconds)

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Any:
        return self._save("sampler_weights", name, ttl_seconds)


class TestSaveCheckpoint:
    def test_both_are_submitted_then_saved_then_recorded(self, save: Save, tmp_path: Path) -> None:
        client = FakeTrainingClient(tmp_path)
        paths = save(client, "000003", tmp_path, {"batch": 3, "epoch": 0, "seen": 7}, kind="both", ttl_seconds=60)
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

    def test_a_failed_save_leaves_no_line(self, save: Save, tmp_path: Path) -> None:
        client = FakeTrainingClient(tmp_path, fail=True)
        with pytest.raises(RuntimeError, match="no disk"):
            save(client, "a", tmp_path, {"batch": 1})
        assert load_checkpoints_file(tmp_path) == []

    @pytest.mark.parametrize("state", [{"batch": 1, "state_path": "x"}, {"batch": 1, "name": "b"}])
    def test_a_wrong_loop_state_is_refused_before_saving(
        self, save: Save, tmp_path: Path, state: dict[str, Any]
    ) -> None:
        client = FakeTrainingClient(tmp_path)
        with pytest.raises(CheckpointError):
            save(client, "a", tmp_path, state)
        assert client.events == []

    def test_an_unknown_kind_is_refused(self, save: Save, tmp_path: Path) -> None:
        kind: Any = "all"
        with pytest.raises(ConfigurationError, match="kind='all'"):
            save(FakeTrainingClient(tmp_path), "a", tmp_path, {"batch": 1}, kind)
