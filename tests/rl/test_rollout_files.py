"""Every rollout of a step in one file: what went in comes out, whichever way turns were trained on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import example, given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.fakes import FakeServiceClient, FakeTrainingClient, said
from tests.rl.handmade import trajectory, turn
from tests.rl.loop import NumberDatasetBuilder, make_config, rows, untimed
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.data_processing import assemble_training_data, replace_inputs
from tinker_cookbook.rl.rollout_files import StepRollouts, write_rollouts
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import FailedGroup
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, RolloutError, TrajectoryGroup
from tinker_cookbook.stores.rollouts import FILE_NAME, read_rollouts
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.utils.lazy import torch

Drawn = list[tuple[int, list[int], bool, bool]]
"""Of each turn: ids that come before it (or, where it begins anew, all of its prompt), its reply, masked, begins anew."""
turns_drawn = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(1, 5), max_size=3), st.booleans(), st.booleans()),
    min_size=1,
    max_size=4,
)


def episode(drawn: Drawn) -> Any:
    turns, so_far = [], [9]
    for new, reply, masked, anew in drawn:
        prompt = [8] * new if anew else [*so_far, *[7] * new]
        made = turn(prompt, said(reply))
        if masked:
            made.metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1
        turns.append(made)
        so_far = [*prompt, *reply]
    return trajectory(*turns)


@given(members=st.lists(turns_drawn, min_size=1, max_size=3), drop=st.integers(0, 5))
@example(members=[[(1, [1, 1, 1], True, True), (2, [1], False, True), (1, [1, 1, 1], False, True)]], drop=0)
@examples(60)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, members: list[Drawn], drop: int) -> None:
    """A datum may be missing, since a penalty left it no advantage: the turns of the others keep their own numbers."""
    group = TrajectoryGroup([episode(drawn) for drawn in members], [0.5] * len(members), [{"m": 1}] * len(members))
    advantages = [float(i + 1) for i in range(len(members))]
    data_D, metadata_D = assemble_training_data([group], [torch.tensor(advantages)])
    for d, datum in enumerate(data_D):  # each token an advantage of its own, to tell them apart
        mask = datum.loss_fn_inputs["mask"].to_numpy()
        own = (np.arange(len(mask)) + 100 * d + 1).astype(np.float32) * mask
        data_D[d] = replace_inputs(datum, advantages=own)
    if data_D:
        del data_D[drop % len(data_D)], metadata_D[drop % len(metadata_D)]
    trainer = [datum.loss_fn_inputs["advantages"].to_numpy() / 2 for datum in data_D]
    about, read = written(
        tmp_path_factory.mktemp("rollouts"),
        StepRollouts([group], [3], [advantages], data_D, metadata_D, trainer, {"step": 7}),
    )
    assert about["run"] == {"step": 7} and about["failed_groups"] == []
    wanted = [
        (i, t, made) for i, member in enumerate(group.trajectories_G) for t, made in enumerate(member.transitions)
    ]
    assert [(row["member"], row["turn"]) for row in read] == [(i, t) for i, t, _ in wanted]
    of_member: dict[int, list[float]] = {}
    for row, (i, _, made) in zip(read, wanted, strict=True):
        assert row["prompt"].tolist() == made.ob.to_ints() and row["completion"].tolist() == made.ac.tokens
        assert row["sampled_logprobs"].tolist() == np.array(made.ac.logprobs, np.float32).tolist()
        assert row["masked"] == (PARSE_ERROR_MASKED_METRIC_KEY in made.metrics)
        assert (row["member_advantage"], row["sampling_client_step"], row["group_metrics"]) == (i + 1, 3, {"m": 1})
        if row["advantages"] is not None:
            assert len(row["advantages"]) == len(made.ac.tokens) and not row["masked"]
            assert (row["trainer_logprobs"] == row["advantages"] / 2).all()
            of_member.setdefault(i, []).extend(row["advantages"].tolist())
    trained: dict[int, list[float]] = {}
    for datum, meta in zip(data_D, metadata_D, strict=True):
        own = datum.loss_fn_inputs["advantages"].to_numpy()
        trained.setdefault(meta["traj_idx"], []).extend(own[own != 0].tolist())
    assert {i: values for i, values in of_member.items() if values} == trained


def written(folder: Path, step: StepRollouts) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is read from the file of a step."""
    write_rollouts(TrainingRunStore.in_folder(folder), 7, step)
    return read_rollouts(folder / "iteration_000007" / FILE_NAME)


def test_groups_that_were_given_up_and_media_are_told(tmp_path: Path) -> None:
    image = tinker.types.ImageAssetPointerChunk(location="x", format="png", expected_tokens=3)
    made = turn([1], said([5]))
    made.ob = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1]), image])
    came = TrajectoryGroup([trajectory(made)], [1.0], [{}], tags=["qa"], member_info_G=[{"verdict": "A", "x": "é"}])
    failed = FailedGroup([RolloutError("OSError", "lost")], ["qa"])
    about, (row,) = written(tmp_path, StepRollouts([failed, came], [1, 2], [[0.0]]))
    assert about["failed_groups"] == [{"group": 0, "tags": ["qa"], "errors": [["OSError", "lost"]]}]
    assert row["group"] == 1 and row["prompt"].tolist() == [1, -1, -1, -1] and row["advantages"] is None
    assert row["verdict"] == "A" and row["info"] == {"verdict": "A", "x": "é"} and row["tags"] == ["qa"]


def test_a_step_whose_every_group_was_given_up(tmp_path: Path) -> None:
    failed = FailedGroup([RolloutError("OSError", "lost")], ["qa"])
    about, turns = written(tmp_path, StepRollouts([failed, failed], [0, 0], run={"step": 0}))
    assert turns == [] and [group["group"] for group in about["failed_groups"]] == [0, 1]


@pytest.mark.parametrize("content", [b"", b"PAR1 no", None])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / FILE_NAME
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataFormatError, match=FILE_NAME):
        read_rollouts(path)


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=2)},
    "ahead": {"async_config": train.AsyncConfig(max_steps_off_policy=2)},
}


class TestInARun:
    @pytest.mark.parametrize("mode", MODES)
    def test_every_rollout_of_every_step(self, service: FakeServiceClient, tmp_path: Path, mode: str) -> None:
        data = NumberDatasetBuilder(batches=3, groups=5)
        run = make_config(tmp_path / "run", data, write_records=True, num_groups_to_log=2, save_every=2, **MODES[mode])
        asyncio.run(train.main(run))
        for row in rows(tmp_path / "run"):
            folder = tmp_path / "run" / f"iteration_{row['step']:06d}"
            about, turns = read_rollouts(folder / FILE_NAME)
            assert about["run"]["step"] == row["step"] and about["run"]["temperature"] == 1.0
            assert len(turns) == row["env/all/total_turns"] == 20
            assert sum(len(turn["completion"]) for turn in turns) == row["env/all/total_ac_tokens"]
            trained = [turn for turn in turns if turn["advantages"] is not None]
            assert sum(len(turn["advantages"]) for turn in trained) == row["advantages/nonzero_count"]
            assert all((turn["trainer_logprobs"] == turn["sampled_logprobs"]).all() for turn in trained)
            assert {turn["sampling_client_step"] for turn in turns} <= set(range(row["step"] + 1))
            record = json.loads((tmp_path / "run" / f"training_step_{row['step'] + 1:04d}.json").read_text())
            assert record["num_datums"] == row["train/num_datums"] > len(record["training_data"]) > 0
            assert {datum["metadata"]["group_idx"] for datum in record["training_data"]} <= {0, 1}
        quiet = make_config(tmp_path / "quiet", data, num_groups_to_log=2, save_every=2, **MODES[mode])
        asyncio.run(train.main(quiet))
        assert untimed(tmp_path / "quiet") == untimed(tmp_path / "run"), "records change no metric"
        assert not list((tmp_path / "quiet").rglob(FILE_NAME))

    def test_what_was_sampled_is_kept_when_the_update_fails(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> Any:
            raise ConnectionError("the trainer is gone")

        monkeypatch.setattr(FakeTrainingClient, "forward_backward", fails)
        with pytest.raises(ConnectionError):
            asyncio.run(train.main(make_config(tmp_path, write_records=True)))
        _, turns = read_rollouts(tmp_path / "iteration_000000" / FILE_NAME)
        assert len(turns) == 12 and all(turn["trainer_logprobs"] is None for turn in turns)
        assert any(turn["advantages"] is not None for turn in turns)

    def test_an_error_of_the_writer_ends_the_run(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tinker_cookbook.rl.records.write_rollouts", full)
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(train.main(make_config(tmp_path, write_records=True, save_every=1)))
        assert not any(record["name"] == "000001" for record in rows(tmp_path, "checkpoints.jsonl"))

    def test_groups_given_up_are_in_the_file(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.rl.loop import NumberEnv

        step = NumberEnv.step

        async def some_fail(self: NumberEnv, action: list[int], *, extra: Any = None) -> Any:
            if self.prompt.to_ints()[:2] == [0, 1]:
                raise OSError("lost")
            return await step(self, action, extra=extra)

        monkeypatch.setattr(NumberEnv, "step", some_fail)
        config = make_config(tmp_path, write_records=True, rollout_error_tolerance=RetryOnFailure(max_retries=0))
        asyncio.run(train.main(config))
        about, turns = read_rollouts(tmp_path / "iteration_000000" / FILE_NAME)
        assert [group["group"] for group in about["failed_groups"]] == [0]
        assert sorted({turn["group"] for turn in turns}) == [1, 2]
        trained = {turn["group"] for turn in turns if turn["advantages"] is not None}
        assert trained == {1, 2}
