"""The SDK over the server: every method of its clients, answered or refused by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import tinker
from tinker.types import DimuonOptimizerConfig, SessionSearchRequest

from tests.server.data import DATA
from tests.server.frameworks.calls import Call, rows, table
from tests.server.serving import KEY, TINY_CHAT, Serving

PROMPT = tinker.ModelInput.from_ints([5, 6, 7])
PARAMS = tinker.SamplingParams(max_tokens=2, seed=1)
BILLING = "nothing is billed here"


@dataclass
class Clients:
    """The clients of one session, and names that were not used yet."""

    service: tinker.ServiceClient
    rest: tinker.RestClient
    admin: tinker.AdminClient
    trainer: tinker.TrainingClient
    sampler: tinker.SamplingClient
    state: str
    """a training checkpoint"""
    weights: str
    """a sampler checkpoint"""
    used: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        self.used.append(f"name-{len(self.used)}")
        return self.used[-1]

    @property
    def run_id(self) -> str:
        return self.trainer.model_id

    @property
    def session_id(self) -> str:
        return self.run_id.split(":")[0]

    def saved(self) -> str:
        return self.trainer.save_state(self.name).result().path

    def loaded(self) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(TINY_CHAT, rank=2).result()


def listed(clients: Clients, path: str) -> bool:
    entries = clients.rest.list_checkpoints(clients.run_id).result().checkpoints
    return path in [entry.tinker_path for entry in entries]


def deleted(clients: Clients, delete: Callable[[str], Any]) -> None:
    path = clients.saved()
    assert listed(clients, path)
    delete(path).result()
    assert not listed(clients, path)


def entry_after(clients: Clients, change: Callable[[str], Any]) -> tinker.types.Checkpoint:
    path = clients.saved()
    change(path).result()
    entries = clients.rest.list_checkpoints(clients.run_id).result().checkpoints
    return next(entry for entry in entries if entry.tinker_path == path)


def unpublished(clients: Clients, path: str) -> Any:
    clients.rest.publish_checkpoint_from_tinker_path(path).result()
    return clients.rest.unpublish_checkpoint_from_tinker_path(path)


def custom(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return sum((each**2).sum() for each in logprobs), {"n": float(len(logprobs))}


def weighted(logprobs: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
    return -(logprobs * advantages).sum(), {}


def stepped(clients: Clients) -> None:
    clients.trainer.forward_backward(DATA, "cross_entropy")
    clients.trainer.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()


def is_true(ask: Callable[[Clients], object]) -> Call:
    """A call that works where what it returns is true."""

    def check(clients: Clients) -> None:
        assert ask(clients)

    return Call(check)


def sampled(sampler: tinker.SamplingClient) -> bool:
    return len(sampler.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens) == 2


def downloaded(clients: Clients) -> bool:
    path = clients.trainer.save_weights_external(clients.name).result().path
    urls = clients.rest.get_external_weights_urls(path).result().urls
    return all(httpx.get(url).status_code == 200 for url in urls.values())


def closed(clients: Clients) -> bool:
    other = tinker.ServiceClient(base_url=str(clients.service._base_url), api_key=KEY)
    model_id = other.create_lora_training_client(TINY_CHAT, rank=2).result().model_id
    other.close("success").result()
    return model_id in clients.rest.get_session(model_id.split(":")[0]).result().training_run_ids


CALLS = {
    "ServiceClient.get_server_capabilities": is_true(lambda c: c.service.get_server_capabilities().supported_models),
    "ServiceClient.create_lora_training_client": is_true(lambda c: c.loaded().get_info().lora_rank == 2),
    "ServiceClient.create_lora_training_client(optimizer=DimuonOptimizerConfig())": Call(
        lambda c: c.service.create_lora_training_client(TINY_CHAT, optimizer=DimuonOptimizerConfig()).result(), "dimuon"
    ),
    "ServiceClient.create_training_client_from_state": is_true(
        lambda c: c.service.create_training_client_from_state(c.state).result().get_info().lora_rank == 2
    ),
    "ServiceClient.create_training_client_from_state_with_optimizer": is_true(
        lambda c: c.service.create_training_client_from_state_with_optimizer(c.state).result().get_info().is_lora
    ),
    "ServiceClient.create_sampling_client": is_true(
        lambda c: sampled(c.service.create_sampling_client(model_path=c.weights).result())
    ),
    "ServiceClient.create_rest_client": is_true(lambda c: c.service.create_rest_client().list_sessions().result()),
    "ServiceClient.create_custom_loss": is_true(
        lambda c: c.service.create_custom_loss(weighted, {"logprobs": 1, "advantages": 1}).result()
    ),
    "ServiceClient.copy_weights": Call(lambda c: c.service.copy_weights(c.state).result(), "TINKER_PROJECT_ID"),
    "ServiceClient.get_console_url": is_true(lambda c: c.session_id in c.service.get_console_url()),
    "ServiceClient.close": is_true(closed),
    "TrainingClient.get_info": is_true(lambda c: c.trainer.get_info().model_data.model_name == TINY_CHAT),
    "TrainingClient.get_tokenizer": is_true(lambda c: c.trainer.get_tokenizer().encode("One")),
    "TrainingClient.get_console_url": is_true(lambda c: c.run_id in c.trainer.get_console_url()),
    "TrainingClient.forward": is_true(
        lambda c: len(c.trainer.forward(DATA, "cross_entropy").result().loss_fn_outputs) == 3
    ),
    "TrainingClient.forward_backward": is_true(
        lambda c: c.trainer.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]
    ),
    "TrainingClient.forward_backward_custom": is_true(
        lambda c: c.trainer.forward_backward_custom(DATA, custom).result().metrics["n"] == 3
    ),
    "TrainingClient.optim_step": Call(stepped),
    "TrainingClient.save_state": is_true(lambda c: listed(c, c.saved())),
    "TrainingClient.load_state": is_true(lambda c: c.loaded().load_state(c.state).result().path == c.state),
    "TrainingClient.load_state_with_optimizer": is_true(
        lambda c: c.loaded().load_state_with_optimizer(c.state).result().path == c.state
    ),
    "TrainingClient.save_weights_for_sampler": is_true(
        lambda c: listed(c, c.trainer.save_weights_for_sampler(c.name).result().path)
    ),
    "TrainingClient.save_weights_external": is_true(downloaded),
    "TrainingClient.save_weights_and_get_sampling_client": is_true(
        lambda c: sampled(c.trainer.save_weights_and_get_sampling_client().result())
    ),
    'TrainingClient.save_weights_and_get_sampling_client(kind="inflight")': is_true(
        lambda c: sampled(c.trainer.save_weights_and_get_sampling_client(kind="inflight").result())
    ),
    "TrainingClient.create_sampling_client": is_true(
        lambda c: sampled(c.trainer.create_sampling_client(c.weights).result())
    ),
    "SamplingClient.sample": is_true(lambda c: sampled(c.sampler)),
    "SamplingClient.compute_logprobs": is_true(lambda c: len(c.sampler.compute_logprobs(PROMPT).result()) == 3),
    "SamplingClient.get_tokenizer": is_true(lambda c: c.sampler.get_tokenizer().encode("One")),
    "SamplingClient.get_base_model": is_true(lambda c: c.sampler.get_base_model() == TINY_CHAT),
    "SamplingClient.create": is_true(
        lambda c: sampled(tinker.SamplingClient.create(c.service.holder, base_model=TINY_CHAT).result())
    ),
    "SamplingClient.get_sampler_handle": is_true(lambda c: c.sampler.get_sampler_handle()),
    "SamplingClient.from_sampler_handle": is_true(
        lambda c: sampled(tinker.SamplingClient.from_sampler_handle(c.sampler.get_sampler_handle(), api_key=KEY))
    ),
    "RestClient.get_server_capabilities": is_true(lambda c: c.rest.get_server_capabilities().result().supported_models),
    "RestClient.list_training_runs": is_true(lambda c: c.rest.list_training_runs().result().training_runs),
    "RestClient.get_training_run": is_true(lambda c: c.rest.get_training_run(c.run_id).result().is_lora),
    "RestClient.get_training_run_by_tinker_path": is_true(
        lambda c: c.rest.get_training_run_by_tinker_path(c.state).result().training_run_id == c.run_id
    ),
    "RestClient.get_weights_info_by_tinker_path": is_true(
        lambda c: c.rest.get_weights_info_by_tinker_path(c.state).result().lora_rank == 2
    ),
    "RestClient.list_checkpoints": is_true(lambda c: listed(c, c.state)),
    "RestClient.list_user_checkpoints": is_true(lambda c: c.rest.list_user_checkpoints().result().checkpoints),
    "RestClient.get_external_weights_urls": is_true(downloaded),
    "RestClient.copy_weights": is_true(
        lambda c: c.rest.copy_weights(c.state, destination_project_id="any").result().startswith("tinker://")
    ),
    "RestClient.delete_checkpoint": Call(
        lambda c: deleted(c, lambda path: c.rest.delete_checkpoint(*path.removeprefix("tinker://").split("/", 1)))
    ),
    "RestClient.delete_checkpoint_from_tinker_path": Call(
        lambda c: deleted(c, c.rest.delete_checkpoint_from_tinker_path)
    ),
    "RestClient.publish_checkpoint_from_tinker_path": is_true(
        lambda c: entry_after(c, c.rest.publish_checkpoint_from_tinker_path).public
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path": is_true(
        lambda c: not entry_after(c, lambda path: unpublished(c, path)).public
    ),
    "RestClient.set_checkpoint_ttl_from_tinker_path": is_true(
        lambda c: entry_after(c, lambda path: c.rest.set_checkpoint_ttl_from_tinker_path(path, 3600)).expires_at
    ),
    "RestClient.list_sessions": is_true(lambda c: c.session_id in c.rest.list_sessions(limit=1000).result().sessions),
    "RestClient.get_session": is_true(lambda c: c.run_id in c.rest.get_session(c.session_id).result().training_run_ids),
    "RestClient.search_sessions": is_true(
        lambda c: c.rest.search_sessions(SessionSearchRequest(session_id=c.session_id)).result().sessions
    ),
    "RestClient.get_sampler": is_true(
        lambda c: (
            c.rest.get_sampler(c.rest.get_session(c.session_id).result().sampler_ids[0]).result().base_model
            == TINY_CHAT
        )
    ),
    "RestClient.whoami": Call(lambda c: c.rest.whoami().result(), "whoami requires JWT auth"),
    "RestClient.assign_session_project": Call(
        lambda c: c.rest.assign_session_project(c.session_id, "any").result(), "there are no projects here"
    ),
    "RestClient.export_session_trace": Call(
        lambda c: c.rest.export_session_trace(c.session_id).result(), "no trace of requests is kept here"
    ),
    "RestClient.get_audit_log": Call(lambda c: c.rest.get_audit_log().result(), "no log of requests is kept here"),
    "RestClient.get_billing_usage": Call(
        lambda c: c.rest.get_billing_usage("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z").result(), BILLING
    ),
    "RestClient.get_current_checkpoint_storage_usage": Call(
        lambda c: c.rest.get_current_checkpoint_storage_usage().result(), BILLING
    ),
    "AdminClient.get_audit_log": Call(lambda c: c.admin.get_audit_log().result(), "no log of requests is kept here"),
    "AdminClient.get_billing_usage": Call(
        lambda c: c.admin.get_billing_usage("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z").result(), BILLING
    ),
    "AdminClient.get_current_checkpoint_storage_usage": Call(
        lambda c: c.admin.get_current_checkpoint_storage_usage().result(), BILLING
    ),
}
NO_CALLS = {"get_telemetry", "holder", "on_queue_state_change"}
"""Methods that ask no server."""
CLASSES = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient)


@pytest.fixture(scope="module")
def clients(server: Serving) -> Iterator[Clients]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("TINKER_API_KEY", KEY)
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        trainer = service.create_lora_training_client(TINY_CHAT, rank=2, seed=1).result()
        trainer.forward_backward(DATA, "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        state = trainer.save_state("state").result().path
        weights = trainer.save_weights_for_sampler("weights").result().path
        sampler = service.create_sampling_client(model_path=weights).result()
        rest, admin = (kind(base_url=server.url, api_key=KEY) for kind in (tinker.RestClient, tinker.AdminClient))
        yield Clients(service, rest, admin, trainer, sampler, state, weights)  # pyright: ignore[reportArgumentType]
        service.close("success").result()


def test_every_method_has_a_row() -> None:
    methods = {
        f"{kind.__name__}.{name}"
        for kind in CLASSES
        for name, _ in inspect.getmembers(kind)
        if not name.startswith("_") and not name.endswith("_async") and name not in NO_CALLS
    }
    assert {name.partition("(")[0] for name in CALLS} == methods


def test_the_page_lists_them() -> None:
    assert rows("The SDK") == table(CALLS)


@pytest.mark.server
@pytest.mark.parametrize("name", CALLS)
def test_call(clients: Clients, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK's, of what it will drop
        CALLS[name].check(clients)
    assert sampled(clients.sampler), "the session still works"
