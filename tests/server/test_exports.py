"""Weights that leave a server by its own addresses, and what else the SDK's clients ask of one."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load, load_file
from tinker.types import SessionSearchRequest

from tests.server.serving import KEY, TENANTS, TINY_CHAT, Serving, Wire
from tinker_cookbook.weights import download

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore:DEPRECATED", "ignore:RestClient.search_sessions is experimental"),
]


@pytest.fixture(scope="module")
def client(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    return sdk.create_lora_training_client(TINY_CHAT, rank=2, seed=1).result()


def rest_of(server: Serving, key: str = KEY) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=key)


def matrices(server: Serving, path: str) -> dict[str, torch.Tensor]:
    """The checkpoint's, from the server's own folder."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    return load_file(server.tenant_home("tester") / "runs" / run_id / kind / name / "adapter_model.safetensors")


def test_an_export_is_downloaded_without_a_key(server: Serving, client: tinker.TrainingClient) -> None:
    path = client.save_weights_external("plain").result().path
    urls = rest_of(server).get_external_weights_urls(path).result().urls
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(url.startswith(f"{server.url}/api/v1/files/") for url in urls.values())
    fetched = {name: httpx.get(url).raise_for_status().content for name, url in urls.items()}
    assert json.loads(fetched["adapter_config.json"])["r"] == 2
    torch.testing.assert_close(load(fetched["adapter_model.safetensors"]), matrices(server, path), atol=0, rtol=0)


def test_an_address_is_good_for_its_file_alone(server: Serving, client: tinker.TrainingClient) -> None:
    path = client.save_weights_external("guarded").result().path
    url = httpx.URL(rest_of(server).get_external_weights_urls(path).result().urls["adapter_config.json"])
    fields = dict(url.params)
    for changed in ({"tenant": "alice"}, {"expires": "9999999999"}, {"signature": "0" * 64}, {"signature": "é"}):
        response = httpx.get(url.copy_with(params={**fields, **changed}))
        assert response.status_code == 403 and "signature" in response.json()["detail"]
    other = url.copy_with(path=url.path.replace("adapter_config.json", "checkpoint.json"))
    assert httpx.get(other).status_code == 403
    listing = url.copy_with(path="/api/v1/training_runs")
    assert httpx.get(listing).status_code == 401, "a signature stands for a file, not for a key"
    assert httpx.get(url.copy_with(params=None)).status_code == 401
    # With a key, files are found in the home of its tenant alone.
    assert httpx.get(url.copy_with(params=None), headers={"X-API-Key": KEY}).status_code == 200
    assert httpx.get(url.copy_with(params=None), headers={"X-API-Key": TENANTS["alice"]}).status_code == 404
    secret = url.copy_with(params=None, path=url.path.replace("adapter_config.json", "checkpoint.json"))
    assert httpx.get(secret, headers={"X-API-Key": KEY}).status_code == 404


def test_old_addresses_are_refused() -> None:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    from tinker_local_backend.server import signed_urls

    signer, path = signed_urls.SignedUrls(), f"{signed_urls.PREFIX}run/name/file"
    assert signer.tenant(path, signer.query(path, "alice")) == "alice" and signer.tenant(path, "") is None
    assert signer.tenant("/api/v1/training_runs", signer.query(path, "alice")) is None
    old = signed_urls.SignedUrls()
    with pytest.raises(Exception, match="wrong"):
        signer.tenant(path, old.query(path, "alice"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signed_urls, "SECONDS", -1)
        query = signer.query(path, "alice")
    with pytest.raises(Exception, match="expired"):
        signer.tenant(path, query)


def test_an_encrypted_export_is_for_its_recipients(server: Serving, client: tinker.TrainingClient) -> None:
    pyrage = pytest.importorskip("pyrage", reason="the extra `download` is not installed")
    identity, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]
    path = client.save_weights_external("sealed", age_encryption_recipients=recipients).result().path
    plain = client.save_weights_external("opened").result().path
    urls = rest_of(server).get_external_weights_urls(path).result().urls
    assert sorted(urls) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    sealed = httpx.get(urls["adapter_model.safetensors.age"]).raise_for_status().content
    opened = load(pyrage.decrypt(sealed, [identity]))
    torch.testing.assert_close(opened, matrices(server, plain), atol=0, rtol=0)
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [other])
    with pytest.raises(tinker.RequestFailedError, match=r"age_encryption_recipients\[0\]='age1nonsense'"):
        client.save_weights_external("never", age_encryption_recipients=["age1nonsense"]).result()


async def no_archive(rest: tinker.RestClient, model_path: str) -> tuple[None, str]:
    return None, "HTTP 404: no such route"


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
def test_weights_are_downloaded_to_another_machine(
    server: Serving, client: tinker.TrainingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """By the unmodified SDK, from a server without archives: training checkpoints through an encrypted export, which is gone
    afterwards."""
    pytest.importorskip("pyrage", reason="the extra `download` is not installed")
    monkeypatch.setenv("TINKER_BACKEND", "tinker")
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setattr("tinker_cookbook.weights.archive_address", no_archive)
    training = kind == "weights"
    saved = client.save_state("portable", overwrite=True) if training else client.save_weights_external("portable")
    path = saved.result().path
    before = len(rest_of(server).list_user_checkpoints().result().checkpoints)
    folder = download(tinker_path=path, output_dir=str(tmp_path / "adapter"), base_url=server.url)
    found = load_file(Path(folder) / "adapter_model.safetensors")
    torch.testing.assert_close(found, matrices(server, path), atol=0, rtol=0)
    assert len(rest_of(server).list_user_checkpoints().result().checkpoints) == before


def test_errors_are_those_of_the_sdk(server: Serving, client: tinker.TrainingClient) -> None:
    rest = rest_of(server)
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run("none").result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("none").result()
    path = client.save_state("published").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.ConflictError):
        rest.publish_checkpoint_from_tinker_path(path).result()


def test_sessions_are_searched(server: Serving) -> None:
    named = tinker.ServiceClient(base_url=server.url, api_key=KEY, display_name="Nightly sweep")
    named.create_lora_training_client(TINY_CHAT, rank=2).result()
    found = rest_of(server).search_sessions(SessionSearchRequest(display_name="sweep")).result().sessions
    assert [session.display_name for session in found] == ["Nightly sweep"]
    others = rest_of(server, TENANTS["bob"]).search_sessions(SessionSearchRequest()).result().sessions
    assert "Nightly sweep" not in {session.display_name for session in others}
    named.close("success").result()


def _weighted(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * advantages).sum()
    return loss, {"custom/loss:sum": loss}


def test_a_traced_loss_runs_in_the_client(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_lora_training_client(TINY_CHAT, rank=2, seed=3).result()
    handle = sdk.create_custom_loss(_weighted, {"logprobs": 1, "advantages": 1}).result()
    assert handle.loss_id is None
    arrays: dict[str, Any] = {
        "target_tokens": np.array([6, 7, 8]),
        "advantages": np.array([1.0, 0.5, -2.0], dtype=np.float32),
    }
    inputs = {name: tinker.TensorData.from_numpy(array) for name, array in arrays.items()}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)
    output = client.forward_backward_custom([datum], handle).result()
    logprobs = (
        client.forward(
            [
                tinker.Datum(
                    model_input=datum.model_input,
                    loss_fn_inputs={"target_tokens": inputs["target_tokens"], "weights": inputs["advantages"]},
                )
            ],
            "cross_entropy",
        )
        .result()
        .loss_fn_outputs[0]["logprobs"]
    )
    expected = -float((np.array(logprobs.data) * arrays["advantages"]).sum())
    assert output.metrics["custom/loss:sum"] == pytest.approx(expected, rel=1e-4)
    client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()


def test_inflight_samplers_follow_the_published_weights(sdk: tinker.ServiceClient, server: Serving) -> None:
    client = sdk.create_lora_training_client(TINY_CHAT, rank=4, seed=5).result()
    first = client.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=8, temperature=0.0)

    def tokens(sampler: tinker.SamplingClient) -> list[int]:
        return sampler.sample(prompt, 1, params).result().sequences[0].tokens

    before = tokens(first)
    targets = tinker.TensorData.from_numpy(np.array([6, 7, 42]))
    weights = tinker.TensorData.from_numpy(np.ones(3, dtype=np.float32))
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets, "weights": weights})
    for _ in range(10):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    assert tokens(first) == before, "nothing is published yet"
    second = client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert tokens(first) == tokens(second) != before


def test_hosted_names_with_a_context(sdk: tinker.ServiceClient) -> None:
    sampler = sdk.create_sampling_client(base_model=f"{TINY_CHAT}:peft:64").result()
    params = tinker.SamplingParams(max_tokens=2, seed=1)
    assert len(sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, params).result().sequences[0].tokens) == 2
    with pytest.raises(tinker.TinkerError, match="context of 131072 tokens"):
        sdk.create_lora_training_client(f"{TINY_CHAT}:peft:131072").result()


def test_the_wire_refuses_too_many_recipients(server: Serving) -> None:
    wire = Wire(server.url)
    model = wire.model(wire.session())
    status, reply = wire.post(
        "/save_weights_external", model_id=model, seq_id=1, path="x", age_encryption_recipients=["age1"] * 11
    )
    assert status == 422 and "age_encryption_recipients" in reply["detail"]
