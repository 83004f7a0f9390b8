"""Runs with `async_config.inflight`: replies go on with new weights, and records and reports say which drew each token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes import FakeServiceClient, said
from tests.rl.handmade import trajectory, turn
from tests.rl.loop import NumberDatasetBuilder, make_config, rows, run
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.report.rollouts import Words, _turn
from tinker_cookbook.rl import train
from tinker_cookbook.rl.metrics import compute_inflight_metrics
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.stores import rollouts
from tinker_cookbook.stores.rollouts import COLUMNS, FILE_NAME, read_rollouts, rollouts_file


def inflight(**settings: Any) -> train.AsyncConfig:
    return train.AsyncConfig(max_steps_off_policy=2, deterministic=False, inflight=True, **settings)


def test_samplers_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, config, kind in (("on", inflight(), "inflight"), ("off", None, "snapshot")):
        fake = FakeServiceClient()
        monkeypatch.setattr(backends, "create_service_client", lambda *_, fake=fake: fake)
        run(make_config(tmp_path / name, async_config=config))
        assert set(fake.kinds) == {kind}
    assert "async/newer_tokens_frac" not in rows(tmp_path / "off")[0]


@pytest.mark.parametrize(
    "wrong", [{"deterministic": True}, {"max_steps_off_policy": 0}, {"deterministic": True, "max_steps_off_policy": 0}]
)
def test_it_needs_a_run_by_time(wrong: dict[str, Any]) -> None:
    settings = {"max_steps_off_policy": 1, "deterministic": False, "inflight": True, **wrong}
    with pytest.raises(
        ConfigurationError, match=r"async_config\.inflight=True .*add async_config\.deterministic=False"
    ):
        train.AsyncConfig(**settings)


def group(*versions: list[int] | None) -> TrajectoryGroup:
    members = []
    for drawn in versions:
        reply = said([1] * (len(drawn) if drawn else 3))
        reply.weight_versions = drawn
        members.append(trajectory(turn([5, 6], reply)))
    return TrajectoryGroup(members, [0.0] * len(members), [{}] * len(members))


def test_the_share_of_newer_tokens() -> None:
    assert compute_inflight_metrics([group(None, None)]) == {}
    assert compute_inflight_metrics([group([3, 3, 3, 3])]) == {"async/newer_tokens_frac": 0.0}
    metrics = compute_inflight_metrics([group([0, 0, 1, 2]), group(None, [4, 5])])
    assert metrics == {"async/newer_tokens_frac": 3 / 6}


def row(versions: list[int] | None) -> dict[str, Any]:
    lists: dict[str, Any] = {"prompt": np.array([5, 6]), "completion": np.array([1, 2, 3])}
    numbers = dict.fromkeys(("sampled_logprobs", "trainer_logprobs", "advantages"), np.zeros(3))
    values: dict[str, Any] = dict.fromkeys(COLUMNS) | {"group": 0, "member": 0, "turn": 0, "prompt_shared": 0}
    texts = {"tags": "[]", "metrics": "{}", "logs": "{}", "group_metrics": "{}", "info": "{}"}
    drawn = None if versions is None else np.array(versions, dtype=np.int32)
    return values | lists | numbers | texts | {"weight_versions": drawn}


def test_versions_are_recorded_and_shown(tmp_path: Path) -> None:
    about = {"run": {}, "failed_groups": [], "records": []}
    path = tmp_path / FILE_NAME
    path.write_bytes(rollouts_file([row([4, 4, 5]), row(None)], about))
    _, (first, second) = read_rollouts(path)
    assert first["weight_versions"].tolist() == [4, 4, 5] and second["weight_versions"] is None
    words = Words(None)
    assert _turn(first, words, 0)["weights"] == [4, 4, 5] and "weights" not in _turn(second, words, 0)


def test_files_of_earlier_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lack the column."""
    with monkeypatch.context() as patch:
        patch.setattr(rollouts, "COLUMNS", tuple(name for name in COLUMNS if name != "weight_versions"))
        content = rollouts_file([row(None)], {"run": {}, "failed_groups": [], "records": []})
    (tmp_path / FILE_NAME).write_bytes(content)
    _, (only,) = read_rollouts(tmp_path / FILE_NAME)
    assert only["weight_versions"] is None and only["completion"].tolist() == [1, 2, 3]


@pytest.mark.slow
def test_a_run_of_the_engine_changes_weights_while_it_samples(tmp_path: Path) -> None:
    """Long replies of many groups at once: some go on with newer weights. Versions never fall within a reply."""
    config = make_config(
        tmp_path,
        NumberDatasetBuilder(),
        async_config=inflight(loss_fn="ppo"),
        write_records=True,
        max_tokens=64,
        model_name="example_data/tiny_chat",
    )
    run(config)
    versions = [
        turn["weight_versions"]
        for path in sorted(tmp_path.glob(f"*/{FILE_NAME}"))
        for turn in read_rollouts(path)[1]
        if len(turn["completion"])
    ]
    assert versions and all(drawn is not None and (np.diff(drawn) >= 0).all() for drawn in versions)
    assert max(int(drawn[-1]) for drawn in versions) > 0
