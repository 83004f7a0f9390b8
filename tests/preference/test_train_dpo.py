"""The DPO loop on the fakes: what it submits, measures, saves, and which policy it measures against."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker
import torch

from tests.fakes import FakeServiceClient, fake_logprob
from tests.killing import forget_checkpoints
from tinker_cookbook import backends
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo import compute_dpo_loss
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator
from tinker_cookbook.runs.reference import KLReferenceConfig
from tinker_cookbook.runs.steps import StepLoop
from tinker_cookbook.supervised import epochs
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.supervised.data import SupervisedDatasetFromList
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder

TINY = str(EXAMPLE_DATA / "tiny_chat")


def datum(tokens: list[int], prompt: int = 2) -> tinker.Datum:
    weights = torch.tensor([0.0] * prompt + [1.0] * (len(tokens) - prompt))
    return datum_from_model_input_weights(tinker.ModelInput.from_ints(tokens), weights)


@chz.chz(typecheck=True)
class PairsBuilder(SupervisedDatasetBuilder):
    """`pairs` pairs that differ, in batches of `batch_size`, and one more to test on."""

    pairs: int = 6
    batch_size: int = 2
    broken: bool = False

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        def to_pair(i: int) -> list[tinker.Datum]:
            pair = [datum([1, 2, 10 + i, 3]), datum([1, 2, 20 + i])]
            return pair[:1] if self.broken else pair

        data = SupervisedDatasetFromList(list(range(self.pairs)), self.batch_size, flatmap_fn=to_pair)
        return data, SupervisedDatasetFromList([99], 1, flatmap_fn=to_pair)


class WhichWeights(SamplingClientEvaluator):
    """Reports which weights it was given."""

    def __init__(self, name: str = "weights") -> None:
        self.name = name

    async def __call__(self, sampling_client: Any) -> dict[str, float]:
        return {f"eval/{self.name}": float(sampling_client.weights)}


def rarely() -> WhichWeights:
    return WhichWeights("rarely")


def make_config(log_path: Path, **changes: Any) -> train_dpo.Config:
    base: dict[str, Any] = {
        "log_path": str(log_path),
        "model_name": TINY,
        "dataset_builder": PairsBuilder(),
        "learning_rate": 0.5,
        "eval_every": 0,
        "save_every": 0,
    }
    return train_dpo.Config(**{**base, **changes})


def rows(log_path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / name).read_text().splitlines()]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    fake = FakeServiceClient()
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


def test_each_step_scores_the_pairs_and_takes_one_update(service: FakeServiceClient, tmp_path: Path) -> None:
    train_dpo.main(make_config(tmp_path, num_epochs=2, lr_schedule="linear"))
    trainer = service.trainers[0]
    assert trainer.weights == 6
    assert [p.loss_fn for p in trainer.passes] == ["custom"] * 6
    assert [len(p.data) for p in trainer.passes] == [4] * 6
    seen = [
        sorted(p.data[i].model_input.to_ints()[2] for p in trainer.passes[e * 3 : e * 3 + 3] for i in (0, 2))
        for e in (0, 1)
    ]
    assert seen == [[10, 11, 12, 13, 14, 15]] * 2  # every pair once per epoch
    assert trainer.adam[0].learning_rate == 0.5 and trainer.adam[3].learning_rate == pytest.approx(0.25)
    # Both are under way before either is waited for.
    calls = [c for c in service.calls if "forward_backward" in c or "optim" in c]
    assert calls[:4] == [
        "submit forward_backward_custom", "submit optim_step", "await forward_backward_custom", "await optim_step"
    ]  # fmt: skip
    written = rows(tmp_path)
    assert [row["step"] for row in written] == list(range(6))
    for row in written:
        assert (row["num_pairs"], row["num_tokens"], row["num_loss_tokens"]) == (2, 10, 6)
        # The reference reads whole sequences, of 4 and 3 tokens; training reads all but the last of each.
        assert (row["tokens/prefill_uncached"], row["tokens/trained"], row["tokens/sampled"]) == (14, 10, 0)
        assert row["optim/grad_norm"] == 1.0 and row["time/total"] >= row["time/step"] > 0
        assert "state_path" not in row
        assert all(isinstance(value, int | float) for value in row.values())
    assert written[-1]["tokens/cumulative/prefill_uncached"] == 6 * 14
    assert [row["epoch"] for row in written] == [0, 0, 0, 1, 1, 1]
    # The names that every loop has.
    assert [row["progress/batch"] for row in written] == list(range(6))
    assert [row["progress/done_frac"] for row in written] == [(i + 1) / 6 for i in range(6)]
    assert [row["optim/lr"] for row in written] == [row["learning_rate"] for row in written]
    assert json.loads((tmp_path / "run_metadata.json").read_text())["recipe"] == "script"  # by default


def test_policy_and_reference_that_agree_have_no_margin(service: FakeServiceClient, tmp_path: Path) -> None:
    """The fakes score alike, so any shift between the two logprob arrays would show."""
    train_dpo.main(make_config(tmp_path))
    for row in rows(tmp_path):
        assert row["dpo_loss"] == pytest.approx(0.693147, abs=1e-6)
        assert row["margin"] == 0 == row["chosen_reward"] == row["rejected_reward"]


def test_held_out_pairs_are_measured_first_and_last(service: FakeServiceClient, tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        eval_every=2,
        evaluator_builders=[WhichWeights],
        infrequent_eval_every=3,
        infrequent_evaluator_builders=[rarely],
        dataset_builder=PairsBuilder(pairs=8),
    )
    train_dpo.main(config)
    written = rows(tmp_path)
    assert [(row["step"], row["eval/weights"]) for row in written if "eval/weights" in row] == [(0, 0), (2, 2), (4, 4)]
    assert [(row["step"], row["eval/rarely"]) for row in written if "eval/rarely" in row] == [(0, 0), (3, 3), (4, 4)]
    tested = [row for row in written if "test/dpo_loss" in row]
    assert [row["step"] for row in tested] == [0, 2, 4]
    expected = -(fake_logprob(109) + fake_logprob(3) + fake_logprob(119)) / 3
    assert tested[0]["test/nll"] == pytest.approx(expected)
    assert {"test/accuracy", "test/margin", "test/chosen_reward", "test/rejected_reward"} <= tested[0].keys()
    assert written[-1]["progress"] == 1.0 and "time/total" in written[-1]
    # The final evaluation has the last step's training metrics beside it.
    repeated = ("dpo_loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "optim/lr")
    assert [written[-1][key] for key in repeated] == [written[-2][key] for key in repeated]


def killed_at(step: int) -> Callable[..., Any]:
    original = StepLoop._submit

    def submit(loop: StepLoop, at: int, *rest: Any) -> None:
        if at == step:
            raise SystemError("killed")
        original(loop, at, *rest)

    return submit


class TestReference:
    def test_it_is_the_base_model_by_default(self, service: FakeServiceClient, tmp_path: Path) -> None:
        train_dpo.main(make_config(tmp_path, save_every=1))
        wanted = {"base_model": TINY, "path": None}
        assert [record["reference"] for record in rows(tmp_path, "checkpoints.jsonl")] == [wanted] * 3

    def test_a_resumed_run_goes_on_with_the_one_it_began_with(
        self, service: FakeServiceClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        service.saved["tinker://other/weights/x"] = 7
        config = make_config(tmp_path, save_every=1, load_checkpoint_path="tinker://other/weights/x", num_epochs=2)
        opened: list[str | None] = []
        create = service.create_sampling_client

        def create_sampling_client(model_path: str | None = None, base_model: str | None = None) -> Any:
            opened.append(model_path)
            return create(model_path, base_model)

        monkeypatch.setattr(service, "create_sampling_client", create_sampling_client)
        for step in (2, 4):
            with monkeypatch.context() as patched:
                patched.setattr(StepLoop, "_submit", killed_at(step))
                with pytest.raises(SystemError):
                    train_dpo.main(config)
        train_dpo.main(config)
        # Three starts, one policy: a copy of the weights that were loaded, made once and before anything was trained.
        (path,) = {*opened}
        assert path is not None and len(opened) == 3
        assert service.saved[path] == 7 and service.ttl[path] is None
        records = rows(tmp_path, "checkpoints.jsonl")
        assert {record["reference"]["path"] for record in records} == {path}
        assert service.saved[records[-1]["state_path"]] == 7 + 6
        assert [row["step"] for row in rows(tmp_path)] == list(range(6))

    def test_a_named_one_is_opened_by_its_path(self, service: FakeServiceClient, tmp_path: Path) -> None:
        path = "tinker://other/sampler_weights/x"
        service.saved[path] = 3
        train_dpo.main(make_config(tmp_path, reference=KLReferenceConfig(base_model=TINY, load_checkpoint_path=path)))
        assert rows(tmp_path, "checkpoints.jsonl")[-1]["reference"] == {"base_model": TINY, "path": path}

    def test_a_base_model_may_be_named_alone(self, service: FakeServiceClient, tmp_path: Path) -> None:
        train_dpo.main(make_config(tmp_path / "a", reference_model_name=TINY))
        reference = rows(tmp_path / "a", "checkpoints.jsonl")[-1]["reference"]
        assert reference == {"base_model": TINY, "path": None}
        with pytest.raises(ConfigurationError, match="reference and reference_model_name are both set"):
            make_config(tmp_path / "b", reference_model_name=TINY, reference=KLReferenceConfig(base_model=TINY))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset_builder": PairsBuilder(broken=True, batch_size=3)}, DataValidationError, "batch 0 has 3 datums"),
        ({"max_steps": 0}, ConfigurationError, "nothing to train on"),
        ({"model_name": "/no/such/model"}, ConfigurationError, "model_name"),
    ],
)
def test_mistakes_are_found_before_a_client_is_made(
    service: FakeServiceClient, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_dpo.main(make_config(tmp_path / "run", **changes))
    assert service.created == [] and not (tmp_path / "run").exists()


def test_a_pair_that_fails_late_leaves_the_good_steps(
    service: FakeServiceClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(epochs, "CHECKED_BATCHES", 1)
    check = train_dpo.check_pairs

    def fails_at_the_last(data: Sequence[tinker.Datum], where: str, context: int | None) -> None:
        if where == "batch 2":
            raise DataValidationError("pair 5 is broken")
        check(data, where, context)

    monkeypatch.setattr(train_dpo, "check_pairs", fails_at_the_last)
    with pytest.raises(DataValidationError, match="pair 5 is broken"):
        train_dpo.main(make_config(tmp_path))
    (record,) = rows(tmp_path, "checkpoints.jsonl")
    assert record["batch"] == 2 and service.saved[record["state_path"]] == 2


def test_runs_can_be_compared_at_equal_tokens(service: FakeServiceClient, tmp_path: Path) -> None:
    train_dpo.main(make_config(tmp_path))
    written = rows(tmp_path)
    trained = [row["num_loss_tokens"] for row in written]
    assert [row["progress/trained_tokens"] for row in written] == [sum(trained[: i + 1]) for i in range(len(written))]
    assert all(row["progress/sampled_tokens"] == 0 and row["progress/seconds"] > 0 for row in written)


def test_an_evaluator_that_raises_leaves_the_good_steps(service: FakeServiceClient, tmp_path: Path) -> None:
    class Fails(SamplingClientEvaluator):
        async def __call__(self, sampling_client: Any) -> dict[str, float]:
            if sampling_client.weights == 2:
                raise ConnectionError("the grader is gone")
            return {}

    with pytest.raises(ConnectionError):
        train_dpo.main(make_config(tmp_path, eval_every=2, evaluator_builders=[Fails]))
    (record,) = rows(tmp_path, "checkpoints.jsonl")
    assert record["batch"] == 2 and service.saved[record["state_path"]] == 2


def test_other_data_on_resume_is_refused(service: FakeServiceClient, tmp_path: Path) -> None:
    train_dpo.main(make_config(tmp_path))
    with pytest.raises(ConfigurationError, match="3 batches per epoch, and the dataset now gives 2"):
        train_dpo.main(make_config(tmp_path, dataset_builder=PairsBuilder(batch_size=3)))


def test_a_finished_run_has_nothing_left_to_do(service: FakeServiceClient, tmp_path: Path) -> None:
    train_dpo.main(make_config(tmp_path, eval_every=2))
    files = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "checkpoints.jsonl")}
    train_dpo.main(make_config(tmp_path, eval_every=2))
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert service.trainers[1].passes == []


def test_fewer_steps_than_begun_end_where_the_run_stands(service: FakeServiceClient, tmp_path: Path) -> None:
    train_dpo.main(make_config(tmp_path, save_every=2))
    forget_checkpoints(tmp_path, after=1)
    train_dpo.main(make_config(tmp_path, save_every=2, max_steps=2))
    assert [record["batch"] for record in rows(tmp_path, "checkpoints.jsonl") if record.get("final")] == [2]


def test_the_loss_is_named_where_scripts_look_for_it() -> None:
    assert train_dpo.compute_dpo_loss is compute_dpo_loss
    assert asyncio.iscoroutinefunction(train_dpo.main_async)
