"""The clients as the SDK's are: errors of its classes, arguments and methods of its clients, losses that it traces."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker.types import CustomLossInputRank, OwnSearchOwner, SessionSearchRequest

from tests.waiting import HANG_SECONDS
from tinker_local_backend import errors
from tinker_local_backend.rest_client import RestClient
from tinker_local_backend.sampling_client import SamplingClient
from tinker_local_backend.service_client import ServiceClient
from tinker_local_backend.shipped import TINY_CHAT
from tinker_local_backend.training_client import TrainingClient

MODEL = str(TINY_CHAT)


@pytest.fixture
def service(tmp_path: Path) -> Any:
    with ServiceClient(home=tmp_path, display_name="First nightly run", user_metadata={"of": "tests"}) as client:
        yield client


@pytest.mark.parametrize(
    ("kind", "sdk", "status"),
    [
        (errors.LocalBackendError, tinker.TinkerError, 400),
        (errors.RequestError, tinker.BadRequestError, 400),
        (errors.ModelLoadError, tinker.BadRequestError, 400),
        (errors.NotFoundError, tinker.NotFoundError, 404),
        (errors.ConflictError, tinker.ConflictError, 409),
        (errors.CheckpointError, tinker.NotFoundError, 404),
        (errors.SamplingError, tinker.TinkerError, 400),
    ],
)
def test_errors_are_the_sdks_too(kind: type[errors.LocalBackendError], sdk: type[Exception], status: int) -> None:
    with pytest.raises(sdk, match="rank=0") as caught:
        raise kind("rank=0 is wrong", remote="for others")
    error = caught.value
    assert isinstance(error, kind) and type(error).__name__ == kind.__name__
    assert error.status_code == status and str(error) == error.message == "rank=0 is wrong"
    if isinstance(error, tinker.APIStatusError):
        assert error.response.status_code == status and error.body == error.response.json() == {"detail": str(error)}
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(again, kind) and isinstance(again, sdk)
        assert again.args == error.args and again.remote == "for others"


def test_errors_keep_what_they_know_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(errors.NonFiniteError("the loss is not finite", [3, 5])))
    assert isinstance(error, tinker.BadRequestError) and isinstance(error, ValueError)
    assert isinstance(error, errors.NonFiniteError) and error.datums == (3, 5)


def test_errors_do_not_import_the_sdk() -> None:
    code = "import sys, tinker_local_backend.errors as e; e.RequestError('x'); print('tinker' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert child.stdout.strip() == "False", child.stderr


def test_what_does_not_exist_is_the_sdks_not_found_error(service: ServiceClient) -> None:
    rest = service.create_rest_client()
    for call in (
        lambda: rest.get_training_run("none"),
        lambda: rest.get_session("none"),
        lambda: service.create_sampling_client("tinker://none/weights/none"),
        lambda: rest.delete_checkpoint_from_tinker_path("tinker://none/weights/none").result(),
    ):
        with pytest.raises(tinker.NotFoundError, match="none"):
            call()


def test_publishing_twice_is_a_conflict(service: ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=2).result()
    path, rest = client.save_state("first").result().path, service.create_rest_client()
    rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.ConflictError, match="already published"):
        rest.publish_checkpoint_from_tinker_path(path)
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()


def test_unknown_arguments_warn(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="ignores unknown arguments: retries"):
        ServiceClient(home=tmp_path, retries=3).close()
    RestClient(tmp_path, base_url="https://example.org", api_key="tml-none")  # as the SDK's, without effect


def test_a_closed_service_client_cannot_be_entered(tmp_path: Path) -> None:
    client = ServiceClient(home=tmp_path)
    client.close()
    with pytest.raises(RuntimeError, match="closed"), client:
        pass


def test_futures_of_clients_pass_for_clients(service: ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=2)
    assert isinstance(training, TrainingClient) and isinstance(training, tinker.APIFuture)
    sampling = training.save_weights_and_get_sampling_client()
    assert isinstance(sampling, SamplingClient) and not isinstance(sampling, TrainingClient)
    assert isinstance(service.create_sampling_client(base_model=MODEL), SamplingClient)
    assert sampling.get_base_model() == MODEL


def test_hosted_names_with_a_context(service: ServiceClient) -> None:
    client = service.create_lora_training_client(f"{MODEL}:peft:64", rank=2).result()
    assert client.get_info().model_name == MODEL
    path = client.save_state("first").result().path
    assert service.create_sampling_client(path, f"{MODEL}:peft:64").result().get_base_model() == MODEL
    with pytest.raises(tinker.BadRequestError, match="context of 131072 tokens"):
        service.create_sampling_client(base_model=f"{MODEL}:peft:131072").result()
    with pytest.raises(tinker.BadRequestError, match="context of 131072 tokens"):
        service.create_lora_training_client(f"{MODEL}:peft:131072").result()


def test_two_names_of_the_optimizers_parameters(service: ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=2).result()
    step = tinker.AdamParams(learning_rate=0.1)
    with pytest.raises(ValueError, match="optim_params and adam_params"):
        client.optim_step(step, adam_params=step)


def test_addresses_of_reports(service: ServiceClient, tmp_path: Path) -> None:
    client = service.create_lora_training_client(MODEL, rank=2).result()
    assert client.get_console_url() == (tmp_path / "runs" / client.model_id).as_uri()
    logged = service.create_lora_training_client(MODEL, rank=2, user_metadata={"log_path": str(tmp_path / "log")})
    assert logged.get_console_url() == (tmp_path / "log" / "report.html").as_uri()
    assert service.get_console_url() == (tmp_path / "runs").as_uri()
    assert [client.get_telemetry(), service.get_telemetry(), service.create_rest_client().get_telemetry()] == [None] * 3


def test_sessions_are_searched(service: ServiceClient, tmp_path: Path) -> None:
    client = service.create_lora_training_client(MODEL, rank=2).result()
    client.save_state("first").result()
    for i in range(3):
        with ServiceClient(home=tmp_path, display_name=f"Later {i}") as later:
            later.create_rest_client()
    rest = RestClient(tmp_path)

    def names(**filters: Any) -> list[str | None]:
        return [
            session.display_name for session in rest.search_sessions(SessionSearchRequest(**filters)).result().sessions
        ]

    everything = names()
    assert everything == ["Later 2", "Later 1", "Later 0", "First nightly run"]
    assert names(display_name="nightly FIRST") == ["First nightly run"] and names(display_name="first later") == []
    assert names(user_metadata={"of": "tests"}) == ["First nightly run"] and names(user_metadata={"of": "x"}) == []
    assert names(session_id=service.session_id) == ["First nightly run"]
    assert names(owner=OwnSearchOwner()) == everything
    (found,) = rest.search_sessions(SessionSearchRequest(session_id=service.session_id)).result().sessions
    assert found.checkpoints_count == 1 and (found.checkpoint_storage_bytes or 0) > 0

    pages, request = [], SessionSearchRequest(limit=3)
    while True:
        page = rest.search_sessions(request).result()
        pages.append([session.display_name for session in page.sessions])
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert pages == [everything[:3], everything[3:]]
    with pytest.raises(tinker.BadRequestError, match="project_ids"):
        names(project_ids=["one"])
    assert rest.whoami().result().user_urn == "urn:tinker-local:user:local"


def _datum(advantages: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=[6, 7, 8], dtype="int64", shape=[3]),
            "advantages": tinker.TensorData(data=advantages, dtype="float32", shape=[3]),
        },
    )


def _weighted(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * advantages).sum()
    return loss, {"custom/loss:sum": loss, "custom/least:mean": logprobs.min()}


RANKS: dict[str, CustomLossInputRank] = {"logprobs": 1, "advantages": 1}


def test_a_traced_loss_is_the_sum_over_its_data(service: ServiceClient) -> None:
    data = [_datum([1.0, 0.0, -2.0]), _datum([0.5, 3.0, 0.25])]
    traced = service.create_lora_training_client(MODEL, rank=2, seed=1).result()
    handle = service.create_custom_loss(_weighted, RANKS).result()
    output = traced.forward_backward_custom(data, handle).result()

    def by_hand(datums: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [
            -(lp * torch.tensor(datum.loss_fn_inputs["advantages"].data)).sum()
            for datum, lp in zip(datums, logprobs, strict=True)
        ]
        return torch.stack(losses).sum(), {"least": float(sum(lp.detach().min() for lp in logprobs)) / 2}

    plain = service.create_lora_training_client(MODEL, rank=2, seed=1).result()
    expected = plain.forward_backward_custom(data, by_hand).result()
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    assert output.metrics["custom/loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    assert output.metrics["custom/least:mean"] == pytest.approx(expected.metrics["least"], rel=1e-6)
    step = tinker.AdamParams(learning_rate=0.1)
    norms = [client.optim_step(step).result().metrics or {} for client in (traced, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0]["grad_norm"] > 0


def test_losses_that_are_refused(service: ServiceClient, tmp_path: Path) -> None:
    def branches(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (logprobs.sum() if logprobs.sum() > 0 else logprobs.mean()), {}

    with pytest.raises(tinker.BadRequestError, match="cannot be traced"):
        service.create_custom_loss(branches, {"logprobs": 1})
    with pytest.raises(tinker.BadRequestError, match="input_ranks"):
        service.create_custom_loss(_weighted, {"logprobs": 1})
    client = service.create_lora_training_client(MODEL, rank=2).result()
    handle = service.create_custom_loss(_weighted, {"logprobs": 1, "advantages": 2}).result()
    with pytest.raises(tinker.BadRequestError, match="rank 1"):
        client.forward_backward_custom([_datum([1.0, 1.0, 1.0])], handle)
    with ServiceClient(home=tmp_path) as other:
        foreign = other.create_custom_loss(_weighted, RANKS).result()
    with pytest.raises(tinker.BadRequestError, match="another ServiceClient"):
        client.forward_backward_custom([_datum([1.0, 1.0, 1.0])], foreign)
