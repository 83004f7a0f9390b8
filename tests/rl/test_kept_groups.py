"""Groups beside a checkpoint come back as they were, to the last bit, or the error says how to go on without them."""

from pathlib import Path

import pytest
import tinker

from tests.rl.handmade import trajectory, turn
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.rl.kept_groups import Kept, read_kept, write_kept
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.types import Record, RolloutError, TrajectoryGroup
from tinker_cookbook.utils.logtree import Node


def a_group() -> TrajectoryGroup:
    said = TokensWithLogprobs([5, 6], [-0.1, -1 / 3], "length")
    spoken = turn([1, 2], said, 0.1 + 0.2)
    spoken.metrics, spoken.logs = {"correct": 1, "share": 2 / 3}, {"text": "ä <b>", "n": 3}
    page = Node("section", "Turn", attrs={"class": "x"})
    page.text("said", "label")
    page.table([{"a": 1, "b": 0.5}])
    spoken.notes = [page]
    second = trajectory(turn([1], TokensWithLogprobs([9], None, "stop")), turn([1, 9, 4], said))
    return TrajectoryGroup(
        [trajectory(spoken), second],
        [1e-17, -2.5],
        [{"won": 1}, {}],
        rollout_errors=[RolloutError("OSError", "gone")],
        trained_G=[True, False],
        tags=["qa"],
        dataset_index=1,
        records=[Record("baseline", {"member": 0, "deep": {"list": [1, 2.5, None]}})],
        member_info_G=[{"question": "?"}, {}],
        roles_G=["a", "b"],
        notes=[page],
    )


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    failed = FailedGroup([RolloutError("TimeoutError", "late")], ["qa"])
    kept: dict[tuple[int, int], Kept] = {(3, 0): (a_group(), 2, 0.25), (3, 7): (failed, 1, 1.5)}
    file = write_kept(tmp_path, "000002", kept)
    found = read_kept(tmp_path / file)
    assert found == kept and list(found) == list(kept)
    group, _, _ = found[3, 0]
    assert isinstance(group, TrajectoryGroup)
    read = group.trajectories_G[0].transitions[0]
    assert isinstance(read.ob, tinker.ModelInput) and read.ob.to_ints() == [1, 2]
    assert type(read.metrics["correct"]) is int


@pytest.mark.parametrize("content", [None, b"", b"\x1f\x8b", b"not gzip"])
def test_a_damaged_file_is_named_with_the_way_on(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "groups_ahead" / "000002.json.gz"
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataFormatError, match=r"000002\.json\.gz.*checkpoints\.jsonl"):
        read_kept(path)
