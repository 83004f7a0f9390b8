"""Checkpoints: going on from one is as if nothing had happened, and a checkpoint is whole or not there."""

import json
import os
from pathlib import Path

import pytest
import tinker
from safetensors.torch import save_file as real_save_file

from tests.engine.helpers import (
    STEP,
    assert_repeats,
    assert_same,
    cross_entropy_datum,
    gradients,
    make_training_client,
    params,
    prompt,
    random_tokens,
    weights,
)
from tinker_local_backend import CheckpointError, RequestError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.storage import checkpoints


def train(client: TrainingClient, steps: range) -> None:
    for step in steps:
        client.forward_backward([cross_entropy_datum(8, step)], "cross_entropy")
        client.optim_step(STEP).result()


def sampled(client: SamplingClient) -> list:
    sequences = client.sample(prompt(random_tokens(7, 0)), 2, params(seed=0)).result().sequences
    return [(s.tokens, s.logprobs) for s in sequences]


def folder(home: Path, path: str) -> Path:
    return home / "runs" / path.removeprefix("tinker://")


def clients_kind(client: TrainingClient, kind: str, home: Path) -> Path:
    return home / "runs" / client.model_id / kind


def test_two_steps_a_restart_and_two_steps_are_four_steps(service: ServiceClient, home: Path, tied_model: str) -> None:
    through = make_training_client(service, tied_model)
    train(through, range(4))
    first = make_training_client(service, tied_model)
    train(first, range(2))
    path = first.save_state("half").result().path
    with ServiceClient(home=home) as other:
        second = other.create_training_client_from_state_with_optimizer(path).result()
        assert_same(weights(second), weights(first))
        train(second, range(2, 4))
        assert_repeats(weights(second), weights(through))
    train(first, range(2, 3))
    first.load_state_with_optimizer(path).result()
    train(first, range(2, 4))
    assert_repeats(weights(first), weights(through))


def test_without_the_optimizer_its_moments_start_anew(service: ServiceClient, tied_model: str) -> None:
    client = make_training_client(service, tied_model)
    train(client, range(2))
    path = client.save_state("half").result().path
    start = weights(client)
    train(client, range(2, 3))
    with_moments = weights(client)
    results = []
    for load in ("load_state", "create_training_client_from_state"):
        if load == "load_state":
            other = client
            client.load_state(path).result()
        else:
            other = service.create_training_client_from_state(path).result()
        assert_same(weights(other), start)
        train(other, range(2, 3))
        results.append(weights(other))
    assert_repeats(*results)
    with pytest.raises(AssertionError):
        assert_repeats(results[0], with_moments)


def test_a_state_saved_before_the_first_step_can_be_gone_on_from(service: ServiceClient, tied_model: str) -> None:
    client = make_training_client(service, tied_model)
    path = client.save_state("start").result().path
    train(client, range(2))
    other = service.create_training_client_from_state_with_optimizer(path).result()
    train(other, range(2))
    assert_repeats(weights(other), weights(client))


def test_loading_drops_gradients_and_saving_keeps_them(service: ServiceClient, tied_model: str) -> None:
    client = make_training_client(service, tied_model)
    client.forward_backward([cross_entropy_datum(8, 0)], "cross_entropy").result()
    before = gradients(client)
    path = client.save_state("x").result().path
    assert_same(gradients(client), before)
    client.load_state(path).result()
    with pytest.raises(RequestError, match="without gradients"):
        client.optim_step(STEP).result()


def test_saved_weights_sample_like_the_client_that_saved_them(
    service: ServiceClient, home: Path, training: TrainingClient, sampler: SamplingClient
) -> None:
    path = training.save_weights_for_sampler("first").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/first"
    assert not (folder(home, path) / "optimizer.safetensors").exists()
    expected = sampled(sampler)
    train(training, range(1))
    assert_repeats(sampled(service.create_sampling_client(path).result()), expected)
    assert_repeats(sampled(service.create_sampling_client(model_path=path).result()), expected)
    with ServiceClient(home=home) as other:
        assert_repeats(sampled(other.create_sampling_client(path).result()), expected)


def test_a_named_snapshot_is_also_on_disk(service: ServiceClient, training: TrainingClient) -> None:
    snapshot = training.save_weights_and_get_sampling_client("named").result()
    path = f"tinker://{training.model_id}/sampler_weights/named"
    assert_repeats(sampled(service.create_sampling_client(path).result()), sampled(snapshot))


def test_a_training_state_can_be_sampled_from(
    service: ServiceClient, training: TrainingClient, sampler: SamplingClient
) -> None:
    path = training.save_state("full").result().path
    assert_repeats(sampled(service.create_sampling_client(path).result()), sampled(sampler))


def test_weights_saved_for_sampling_hold_no_optimizer(training: TrainingClient) -> None:
    path = training.save_weights_for_sampler("light").result().path
    before = weights(training)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        training.load_state_with_optimizer(path).result()
    assert_same(weights(training), before)
    training.load_state(path).result()


def test_a_name_is_taken_until_overwrite_says_otherwise(
    service: ServiceClient, home: Path, training: TrainingClient
) -> None:
    path = training.save_state("best").result().path
    old = weights(training)
    train(training, range(1))
    with pytest.raises(RequestError, match="exists; choose another name or pass overwrite=True"):
        training.save_state("best").result()
    assert_same(weights(service.create_training_client_from_state(path).result()), old)
    assert training.save_state("best", overwrite=True).result().path == path
    assert_same(weights(service.create_training_client_from_state(path).result()), weights(training))
    training.save_weights_for_sampler("best").result()
    assert [p.name for p in clients_kind(training, "weights", home).iterdir()] == ["best"]


def test_an_expired_checkpoint_is_gone(
    service: ServiceClient, home: Path, training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = training.save_state("brief", ttl_seconds=3600).result().path
    kept = training.save_state("kept").result().path
    service.create_training_client_from_state(path).result()
    now = checkpoints.time.time()
    monkeypatch.setattr(checkpoints.time, "time", lambda: now + 3601)
    for load in (service.create_training_client_from_state, service.create_sampling_client):
        with pytest.raises(CheckpointError, match="expired"):
            load(path)
    with pytest.raises(CheckpointError, match="expired"):
        training.load_state(path).result()
    training.save_state("next").result()
    assert not folder(home, path).exists()
    training.load_state(kept).result()
    training.save_state("brief").result()


@pytest.mark.parametrize("ttl", [0, -5, 10**30])
def test_a_ttl_must_be_positive(training: TrainingClient, ttl: int) -> None:
    with pytest.raises(RequestError, match=rf"ttl_seconds must be positive and at most \d+ .*, or None, got {ttl}"):
        training.save_state("x", ttl_seconds=ttl).result()


def test_user_metadata_is_kept(service: ServiceClient, home: Path, tied_model: str) -> None:
    client = service.create_lora_training_client(tied_model, rank=2, user_metadata={"who": "me", "what": "a"}).result()
    path = client.save_state("x", user_metadata={"what": "b"}).result().path
    info = json.loads((folder(home, path) / "checkpoint.json").read_text())
    assert info["user_metadata"] == {"who": "me", "what": "b"}


def test_a_missing_checkpoint_is_named(service: ServiceClient, training: TrainingClient) -> None:
    path = f"tinker://{training.model_id}/weights/nothing"
    for load in (service.create_training_client_from_state, service.create_sampling_client):
        with pytest.raises(CheckpointError, match=r"weights/nothing does not exist under .* TINKER_LOCAL_HOME"):
            load(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        training.load_state(path).result()


@pytest.mark.parametrize("name", ["../x", "..", ".hidden", "a/b", "", "x\n", "/etc/passwd", "-rf", "a\\b", "ü"])
def test_a_name_cannot_leave_its_folder(training: TrainingClient, home: Path, name: str) -> None:
    for save in (
        training.save_state,
        training.save_weights_for_sampler,
        training.save_weights_and_get_sampling_client,
    ):
        with pytest.raises(RequestError, match="checkpoint name"):
            save(name)
    assert not clients_kind(training, "weights", home).exists()


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../..",
        "tinker://../weights/x",
        "tinker://run/weights/..",
        "tinker://run/../x",
        "tinker://run/weights/../../x",
        "tinker://run/other/x",
        "tinker://run/weights/x/y",
        "tinker://run/weights",
        "tinker:run/weights/x",
        "/run/weights/x",
        "file://run/weights/x",
        "",
    ],
)
def test_a_path_cannot_leave_the_home(service: ServiceClient, training: TrainingClient, path: str) -> None:
    loads = (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
        service.create_sampling_client,
        training.load_state,
        training.load_state_with_optimizer,
    )
    for load in loads:
        with pytest.raises(RequestError):
            load(path)


def test_an_interrupted_save_leaves_nothing(
    home: Path, training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(training, range(1))
    old = training.save_state("there").result().path
    content = {f.name: f.read_bytes() for f in folder(home, old).iterdir()}

    def fail(tensors: dict, file: Path, **kwargs) -> None:
        real_save_file(tensors, file, **kwargs)
        if Path(file).name == "optimizer.safetensors":
            raise OSError("no space left on device")

    monkeypatch.setattr(checkpoints, "save_file", fail)
    for name, overwrite in (("new", False), ("there", True)):
        with pytest.raises(OSError, match="no space left"):
            training.save_state(name, overwrite=overwrite).result()
    assert [p.name for p in clients_kind(training, "weights", home).iterdir()] == ["there"]
    assert {f.name: f.read_bytes() for f in folder(home, old).iterdir()} == content
    monkeypatch.undo()
    training.save_state("new").result()


def test_an_overwrite_that_fails_at_its_last_step_keeps_the_old_checkpoint(
    home: Path, training: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = training.save_state("there").result().path
    where, real_replace = folder(home, path), os.replace
    content = {f.name: f.read_bytes() for f in where.iterdir()}

    def fail(source: Path, target: Path) -> None:
        if Path(target) == where and Path(source).parent == where.parent:
            raise OSError("input/output error")
        real_replace(source, target)

    monkeypatch.setattr(checkpoints.os, "replace", fail)
    train(training, range(1))
    with pytest.raises(OSError, match="input/output error"):
        training.save_state("there", overwrite=True).result()
    assert [p.name for p in where.parent.iterdir()] == ["there"]
    assert {f.name: f.read_bytes() for f in where.iterdir()} == content


def test_types_of_results_are_the_sdks(training: TrainingClient) -> None:
    assert isinstance(training.save_state("a").result(), tinker.types.SaveWeightsResponse)
    assert isinstance(training.save_weights_for_sampler("a").result(), tinker.types.SaveWeightsForSamplerResponse)


def test_gradients_that_wait_for_a_step_are_saved_with_the_state(service: ServiceClient, tied_model: str) -> None:
    """Whoever goes on takes the step that the other one would have taken; without the optimizer they are left out."""
    first = make_training_client(service, tied_model)
    first.forward_backward([cross_entropy_datum(random_tokens(12, 1))], "cross_entropy").result()
    path = first.save_state("between").result().path
    second = service.create_training_client_from_state_with_optimizer(path).result()
    steps = [client.optim_step(STEP).result().metrics for client in (first, second)]
    assert steps[0] == steps[1]
    without = service.create_training_client_from_state(path).result()
    with pytest.raises(RequestError, match="optim_step without gradients"):
        without.optim_step(STEP).result()
    clean = first.save_state("after").result().path
    with pytest.raises(RequestError, match="optim_step without gradients"):
        service.create_training_client_from_state_with_optimizer(clean).result().optim_step(STEP).result()
