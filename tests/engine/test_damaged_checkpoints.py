"""A checkpoint that is damaged, or is another model's, is refused before anything changes."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.helpers import assert_same, cross_entropy_datum, gradients, make_training_client, weights
from tests.engine.test_checkpoints import folder, train
from tinker_local_backend import CheckpointError, ModelLoadError, ServiceClient, TrainingClient


@pytest.fixture
def saved(training: TrainingClient, home: Path) -> tuple[str, Path]:
    """A complete training state: its path and its folder."""
    train(training, range(1))
    path = training.save_state("good").result().path
    return path, folder(home, path)


def refused(service: ServiceClient, training: TrainingClient, path: str, match: str) -> None:
    """Loading `path` in any way raises CheckpointError and leaves weights, moments and gradients alone."""
    training.forward_backward([cross_entropy_datum(6, 0)], "cross_entropy").result()
    before, accumulated, optimizer = weights(training), gradients(training), training._run.state.optimizer
    with pytest.raises(CheckpointError, match=match):
        training.load_state_with_optimizer(path).result()
    with pytest.raises(CheckpointError, match=match):
        service.create_training_client_from_state_with_optimizer(path).result()
    assert_same(weights(training), before)
    assert_same(gradients(training), accumulated)
    assert training._run.state.optimizer is optimizer


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("length", [0, 5, 0.5])
def test_a_truncated_file_is_named(
    service: ServiceClient, training: TrainingClient, saved: tuple[str, Path], name: str, length: float
) -> None:
    path, where = saved
    content = (where / name).read_bytes()
    (where / name).write_bytes(content[: int(length * len(content)) if 0 < length < 1 else int(length)])
    refused(service, training, path, f"{name} is damaged")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"spec": 1}'])
def test_a_damaged_description_is_named(
    service: ServiceClient, training: TrainingClient, saved: tuple[str, Path], text: str
) -> None:
    path, where = saved
    (where / "checkpoint.json").write_text(text)
    refused(service, training, path, r"checkpoint\.json is damaged")


def test_a_damaged_checkpoint_does_not_keep_others_from_being_saved(
    training: TrainingClient, saved: tuple[str, Path]
) -> None:
    (saved[1] / "checkpoint.json").write_text("{")
    training.save_state("another").result()


def test_a_missing_file_is_named(service: ServiceClient, training: TrainingClient, saved: tuple[str, Path]) -> None:
    path, where = saved
    (where / "adapter_model.safetensors").unlink()
    refused(service, training, path, r"lacks adapter_model\.safetensors")


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 3},
        {"train_mlp": False},
        {"train_unembed": False},
    ],
    ids=str,
)
def test_an_adapter_of_another_shape_is_refused(
    service: ServiceClient, training: TrainingClient, tied_model: str, other: dict
) -> None:
    foreign = make_training_client(service, tied_model, **other)
    train(foreign, range(1))
    path = foreign.save_state("foreign").result().path
    before = weights(training)
    for load in (training.load_state, training.load_state_with_optimizer):
        with pytest.raises(CheckpointError):
            load(path).result()
    assert_same(weights(training), before)
    train(training, range(1))


def test_a_checkpoint_that_lacks_a_matrix_of_its_base_model_is_refused(
    service: ServiceClient, training: TrainingClient, saved: tuple[str, Path]
) -> None:
    path, where = saved
    tensors = load_file(where / "adapter_model.safetensors")
    tensors.pop(sorted(tensors)[3])
    save_file(tensors, where / "adapter_model.safetensors", metadata={"format": "pt"})
    refused(service, training, path, "does not fit the base model")
    with pytest.raises(CheckpointError, match="does not fit the base model"):
        service.create_sampling_client(path).result()


@pytest.mark.parametrize("fault", ["shape", "missing moment", "missing matrix", "unknown matrix", "other steps"])
def test_optimizer_state_that_does_not_fit_is_refused(
    service: ServiceClient, training: TrainingClient, saved: tuple[str, Path], fault: str
) -> None:
    path, where = saved
    tensors = load_file(where / "optimizer.safetensors")
    name = next(key for key in sorted(tensors) if key.endswith(".exp_avg"))
    if fault == "shape":
        tensors[name] = tensors[name][:1].contiguous()
    elif fault == "missing moment":
        del tensors[name]
    elif fault == "missing matrix":
        for key in ("exp_avg", "exp_avg_sq", "step"):
            del tensors[name.replace("exp_avg", key)]
    elif fault == "other steps":  # of one matrix: all take each step together
        tensors[name.replace("exp_avg", "step")] += 1
    else:
        tensors["other.exp_avg"] = tensors[name].clone()
    save_file(tensors, where / "optimizer.safetensors")
    refused(service, training, path, "optimizer")


def test_a_checkpoint_with_another_alpha_is_refused(training: TrainingClient, saved: tuple[str, Path]) -> None:
    """The same matrices under another scale are another function."""
    path, where = saved
    info = json.loads((where / "checkpoint.json").read_text())
    info["spec"]["alpha"] = 64.0
    (where / "checkpoint.json").write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match="alpha"):
        training.load_state(path).result()


def test_a_checkpoint_whose_base_model_is_gone_says_so(
    service: ServiceClient, training: TrainingClient, saved: tuple[str, Path]
) -> None:
    path, where = saved
    info = json.loads((where / "checkpoint.json").read_text())
    (where / "checkpoint.json").write_text(json.dumps({**info, "base_model": str(where / "nowhere")}))
    for load in (service.create_training_client_from_state, service.create_sampling_client):
        with pytest.raises(ModelLoadError, match="nowhere"):
            load(path).result()


def test_a_deleted_checkpoint_is_missing(service: ServiceClient, training: TrainingClient, saved: tuple[str, Path]):
    path, where = saved
    shutil.rmtree(where)
    with pytest.raises(CheckpointError, match="does not exist"):
        service.create_training_client_from_state(path)
    training.save_state("good").result()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_inside_the_numbers_is_noticed(
    service: ServiceClient, training: TrainingClient, saved: tuple[str, Path], name: str
) -> None:
    path, where = saved
    content = bytearray((where / name).read_bytes())
    content[-5] ^= 1
    (where / name).write_bytes(content)
    refused(service, training, path, rf"{name} is damaged \(its checksum differs")
