"""What the SDK's RestClient lists and manages over the server."""

import warnings
from datetime import UTC, datetime, timedelta

import pytest
import tinker

from tests.server.serving import KEY, TINY_CHAT, Serving
from tests.waiting import until


@pytest.fixture(scope="module")
def rest(server: Serving) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


@pytest.fixture(scope="module")
def trained(server: Serving) -> tinker.TrainingClient:
    """A run with a checkpoint of each kind, in a session of its own."""
    service = tinker.ServiceClient(
        user_metadata={"who": "me"}, display_name="of the tests", base_url=server.url, api_key=KEY
    )
    client = service.create_lora_training_client(TINY_CHAT, rank=4, seed=9, user_metadata={"run": "x"}).result()
    client.save_state("first", user_metadata={"step": "0"}).result()
    client.save_weights_for_sampler("kept", ttl_seconds=7200).result()
    client.service = service  # pyright: ignore[reportAttributeAccessIssue]
    return client


def test_runs(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    path = f"tinker://{trained.model_id}/weights/first"
    run = rest.get_training_run(trained.model_id).result()
    assert (run.base_model, run.is_lora, run.lora_rank, run.user_metadata) == (TINY_CHAT, True, 4, {"run": "x"})
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == path
    assert run.last_sampler_checkpoint is not None
    assert rest.get_training_run_by_tinker_path(path).result() == run
    listed = rest.list_training_runs(limit=1, offset=0).result()
    assert listed.cursor.total_count >= len(listed.training_runs) == 1
    assert trained.model_id in [r.training_run_id for r in rest.list_training_runs(limit=1000).result().training_runs]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp, info.is_lora) == (TINY_CHAT, 4, True, True)


def test_checkpoints(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    found = {c.checkpoint_id: c for c in rest.list_checkpoints(trained.model_id).result().checkpoints}
    assert found.keys() >= {"weights/first", "sampler_weights/kept"}
    assert found["weights/first"].user_metadata == {"run": "x", "step": "0"}
    assert found["weights/first"].expires_at is None
    expires = found["sampler_weights/kept"].expires_at
    assert expires is not None and abs(expires - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=5)
    everywhere = rest.list_user_checkpoints(limit=1000).result()
    assert found["weights/first"].tinker_path in [c.tinker_path for c in everywhere.checkpoints]
    assert everywhere.cursor is not None and everywhere.cursor.total_count == len(everywhere.checkpoints)


def test_publish_and_ttl(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    path = f"tinker://{trained.model_id}/weights/first"

    def look() -> tinker.types.Checkpoint:
        return next(c for c in rest.list_checkpoints(trained.model_id).result().checkpoints if c.tinker_path == path)

    rest.publish_checkpoint_from_tinker_path(path).result()
    assert look().public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not look().public
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert look().expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert look().expires_at is None


def test_deletion(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    paths = [trained.save_state(name).result().path for name in ("one", "two")]
    rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    rest.delete_checkpoint(trained.model_id, "weights/two").result()
    left = [c.tinker_path for c in rest.list_checkpoints(trained.model_id).result().checkpoints]
    assert not set(paths) & set(left)
    with pytest.raises(tinker.NotFoundError, match="does not exist"):
        rest.delete_checkpoint_from_tinker_path(paths[0]).result()
    with pytest.raises(tinker.BadRequestError, match="two parts"):
        rest.delete_checkpoint(trained.model_id, "two").result()


def test_a_checkpoint_with_a_ttl_expires(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    path = trained.save_state("brief", ttl_seconds=1).result().path
    until(lambda: path not in [c.tinker_path for c in rest.list_checkpoints(trained.model_id).result().checkpoints])


def test_copies(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    source = f"tinker://{trained.model_id}/weights/first"
    copied = rest.copy_weights(source, destination_project_id="mine", ttl_seconds=3600).result()
    assert copied != source and copied.endswith("/weights/first")
    assert rest.get_weights_info_by_tinker_path(copied).result().lora_rank == 4


def test_sessions(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    session_id = trained.model_id.split(":")[0]
    assert session_id in rest.list_sessions(limit=1000).result().sessions
    sampler = trained.save_weights_and_get_sampling_client().result()
    session = rest.get_session(session_id).result()
    assert (session.training_run_ids, session.display_name) == ([trained.model_id], "of the tests")
    assert session.user_metadata == {"who": "me"}
    (sampler_id,) = session.sampler_ids
    assert rest.get_sampler(sampler_id).result().base_model == TINY_CHAT == sampler.get_base_model()
    assert rest.get_server_capabilities().result().supported_models[0].model_name == TINY_CHAT


def test_coroutines_of_older_scripts(server: Serving, trained: tinker.TrainingClient) -> None:
    import asyncio

    async def main() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
            client = await service.create_lora_training_client_async(TINY_CHAT, rank=2)
            sampler = await client.save_weights_and_get_sampling_client_async()
            prompt, params = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=2)
            assert len((await sampler.sample_async(prompt, 1, params)).sequences) == 1
            assert (await (await client.save_state_async("by_coroutine"))).path

    asyncio.run(main())
