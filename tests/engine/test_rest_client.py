"""RestClient: what was saved is listed, described, kept, expired and deleted, and nothing else is touched."""

import asyncio
import inspect
import json
import tarfile
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tinker
from safetensors.numpy import load
from tinker import types

from tests.engine.helpers import assert_repeats, assert_same, make_training_client, weights
from tests.engine.test_checkpoints import folder, sampled, train
from tinker_local_backend import CheckpointError, RequestError, RestClient, ServiceClient, TrainingClient, hosted_only
from tinker_local_backend.storage import catalog
from tinker_local_backend.storage.checkpoints import PEFT_PREFIX
from tinker_local_backend.storage.database import REGISTRY_FILE


@pytest.fixture
def own_home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def own(own_home: Path) -> Iterator[ServiceClient]:
    """A service with a home of its own, so that listings hold what the test saved."""
    with ServiceClient(home=own_home, user_metadata={"team": "a"}, display_name="night shift") as service:
        yield service


@pytest.fixture
def rest(own: ServiceClient) -> RestClient:
    return own.create_rest_client()


@pytest.fixture
def client(own: ServiceClient, tied_model: str) -> TrainingClient:
    return own.create_lora_training_client(tied_model, rank=2, seed=0, user_metadata={"who": "me"}).result()


def paths(rest: RestClient, client: TrainingClient) -> list[str]:
    return [c.tinker_path for c in rest.list_checkpoints(client.model_id).result().checkpoints]


def test_a_run_is_known_from_its_creation(rest: RestClient, client: TrainingClient, tied_model: str) -> None:
    run = rest.get_training_run(client.model_id).result()
    assert isinstance(run, types.TrainingRun)
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (client.model_id, tied_model, True, 2)
    assert run.user_metadata == {"who": "me"} and not run.corrupted
    assert run.last_checkpoint is None and run.last_sampler_checkpoint is None
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


def test_a_list_after_a_save_shows_it(rest: RestClient, client: TrainingClient, own_home: Path) -> None:
    created = rest.get_training_run(client.model_id).result().last_request_time
    state = client.save_state("one", user_metadata={"step": "1"}).result().path
    sampler = client.save_weights_for_sampler("one", ttl_seconds=3600).result().path
    first, second = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (first.checkpoint_id, first.checkpoint_type, first.tinker_path) == ("weights/one", "training", state)
    assert (second.checkpoint_id, second.checkpoint_type, second.tinker_path) == (
        "sampler_weights/one",
        "sampler",
        sampler,
    )
    assert first.user_metadata == {"who": "me", "step": "1"} and second.user_metadata == {"who": "me"}
    assert first.size_bytes == sum(f.stat().st_size for f in folder(own_home, state).iterdir())
    assert first.expires_at is None and second.expires_at is not None
    assert (second.expires_at - second.time).total_seconds() == pytest.approx(3600)
    assert not first.public
    run = rest.get_training_run_by_tinker_path(sampler).result()
    assert (run.last_checkpoint, run.last_sampler_checkpoint) == (first, second)
    assert created < run.last_request_time <= datetime.now(UTC)


def test_ids_that_the_sdk_makes_of_paths_are_understood(rest: RestClient, client: TrainingClient) -> None:
    path = client.save_state("one").result().path
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed.checkpoint_id == rest.list_checkpoints(client.model_id).result().checkpoints[0].checkpoint_id
    rest.delete_checkpoint(parsed.training_run_id, parsed.checkpoint_id).result()
    assert paths(rest, client) == []


def test_pages(own: ServiceClient, rest: RestClient, tied_model: str) -> None:
    clients = [own.create_lora_training_client(tied_model, rank=1).result() for _ in range(3)]
    saved = [c.save_state(name).result().path for name in ("a", "b") for c in clients]
    newest_first = [c.model_id for c in reversed(clients)]
    pages = [rest.list_training_runs(limit=2, offset=offset).result() for offset in (0, 2, 4)]
    assert [[r.training_run_id for r in page.training_runs] for page in pages] == [
        newest_first[:2],
        newest_first[2:],
        [],
    ]
    assert pages[1].cursor == types.Cursor(limit=2, offset=2, total_count=3)
    listed = rest.list_user_checkpoints(limit=4, offset=1).result()
    assert [c.tinker_path for c in listed.checkpoints] == saved[::-1][1:5]
    assert listed.cursor == types.Cursor(limit=4, offset=1, total_count=6)
    for page in ({"limit": -1}, {"offset": -1}):
        for method in (rest.list_training_runs, rest.list_user_checkpoints, rest.list_sessions):
            with pytest.raises(RequestError, match="must be an integer >= 0"):
                method(**page)  # pyright: ignore


def test_weights_info(own: ServiceClient, rest: RestClient, tied_model: str) -> None:
    client = own.create_lora_training_client(tied_model, rank=3, train_mlp=False).result()
    info = rest.get_weights_info_by_tinker_path(client.save_state("x").result().path).result()
    assert isinstance(info, types.WeightsInfoResponse)
    assert (info.base_model, info.lora_rank) == (tied_model, 3)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)


def test_deleting_takes_one_checkpoint_and_its_archive(
    own: ServiceClient, rest: RestClient, client: TrainingClient, own_home: Path
) -> None:
    kept, gone = client.save_state("kept").result().path, client.save_state("gone").result().path
    archive = Path(rest.get_checkpoint_archive_url_from_tinker_path(gone).result().url.removeprefix("file://"))
    rest.delete_checkpoint_from_tinker_path(gone).result()
    assert paths(rest, client) == [kept]
    assert [p.name for p in folder(own_home, gone).parent.iterdir()] == ["kept"] and not archive.exists()
    with pytest.raises(CheckpointError, match="weights/gone does not exist"):
        own.create_sampling_client(gone)
    with pytest.raises(CheckpointError, match="does not exist"):
        rest.delete_checkpoint_from_tinker_path(gone).result()
    client.save_state("gone").result()
    with pytest.raises(
        RequestError, match=r"weights/<name> or sampler_weights/<name> or external_weights/<name>, got 'kept'"
    ):
        rest.delete_checkpoint(client.model_id, "kept")


def test_an_export_is_the_adapter_as_it_was(own: ServiceClient, rest: RestClient, client: TrainingClient) -> None:
    train(client, range(2))
    before = weights(client)
    exported = client.save_weights_external("out", ttl_seconds=3600).result()
    train(client, range(2, 3))
    assert exported.path == f"tinker://{client.model_id}/external_weights/out"
    answer = rest.get_external_weights_urls(exported.path).result()
    assert set(answer.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    assert 0 < (answer.expires - datetime.now(UTC)).total_seconds() <= 3600
    with urllib.request.urlopen(answer.urls["adapter_model.safetensors"]) as file:
        saved = load(file.read())
    assert_same(saved, {PEFT_PREFIX + name: array for name, array in before.items()})
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type) for c in listed] == [("external_weights/out", "external")]
    rest.delete_checkpoint(client.model_id, "external_weights/out").result()
    with pytest.raises(CheckpointError, match="does not exist"):
        rest.get_external_weights_urls(exported.path).result()
    state = client.save_state("state").result().path
    with pytest.raises(RequestError, match="save_weights_external returned"):
        rest.get_external_weights_urls(state).result()
    with pytest.raises(RequestError, match="age_encryption_recipients"):
        client.save_weights_external("secret", age_encryption_recipients=["age1"])


def test_a_run_without_checkpoints_stays_listed(rest: RestClient, client: TrainingClient) -> None:
    path = client.save_state("only").result().path
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [r.training_run_id for r in rest.list_training_runs().result().training_runs] == [client.model_id]


def test_a_ttl_can_be_set_extended_and_taken_away(
    own: ServiceClient, rest: RestClient, client: TrainingClient, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {name: client.save_state(name, ttl_seconds=100).result().path for name in ("same", "longer", "forever")}
    saved["shorter"] = client.save_state("shorter").result().path
    for name, ttl in (("longer", 1000), ("forever", None), ("shorter", 50)):
        rest.set_checkpoint_ttl_from_tinker_path(saved[name], ttl).result()
    now = catalog.time.time()
    expiries = {c.tinker_path: c.expires_at for c in rest.list_checkpoints(client.model_id).result().checkpoints}
    assert expiries[saved["forever"]] is None
    longer = expiries[saved["longer"]]
    assert longer is not None and longer.timestamp() == pytest.approx(now + 1000, abs=30)

    monkeypatch.setattr(catalog.time, "time", lambda: now + 200)
    for name in ("same", "shorter"):
        with pytest.raises(CheckpointError, match="expired"):
            rest.set_checkpoint_ttl_from_tinker_path(saved[name], None).result()
        with pytest.raises(CheckpointError, match="expired"):
            own.create_sampling_client(saved[name])
    own.create_sampling_client(saved["longer"]).result()
    assert paths(rest, client) == [saved["longer"], saved["forever"]]
    assert sorted(p.name for p in folder(own_home, saved["same"]).parent.iterdir()) == ["forever", "longer"]
    for ttl in (0, -1, float("nan"), True):
        with pytest.raises(RequestError, match="ttl_seconds must be positive"):
            rest.set_checkpoint_ttl_from_tinker_path(saved["longer"], ttl).result()  # pyright: ignore


def test_an_overwrite_begins_a_new_checkpoint(rest: RestClient, client: TrainingClient) -> None:
    path = client.save_state("x", ttl_seconds=100, user_metadata={"old": "1"}).result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 50).result()
    client.save_state("x", overwrite=True).result()
    (entry,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert entry.expires_at is None and not entry.public and entry.user_metadata == {"who": "me"}


def test_publishing_is_a_mark(rest: RestClient, client: TrainingClient) -> None:
    path = client.save_state("x").result().path
    for method, public in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        method(path).result()
        assert rest.list_user_checkpoints().result().checkpoints[0].public == public
        with pytest.raises(CheckpointError, match="does not exist"):
            method(path + "y").result()


def test_a_copy_is_a_run_of_its_own(
    own: ServiceClient, rest: RestClient, client: TrainingClient, own_home: Path
) -> None:
    train(client, range(1))
    path = client.save_state("x", ttl_seconds=100).result().path
    copied = rest.copy_weights(path).result()
    again = own.copy_weights(path, ttl_seconds=500).result()
    assert len({path, copied, again}) == 3 and copied.endswith("/weights/x")
    rest.delete_checkpoint_from_tinker_path(path).result()
    other = own.create_training_client_from_state_with_optimizer(copied).result()
    assert_same(weights(other), weights(client))
    run = rest.get_training_run_by_tinker_path(copied).result()
    assert run.user_metadata == {"who": "me"}
    assert run.last_checkpoint is not None and run.last_checkpoint.expires_at is None
    assert run.training_run_id in rest.get_session(own.session_id).result().training_run_ids
    for refused in ({"destination_project_id": "p"}, {"weights_access_token": "t"}):
        with pytest.raises(RequestError, match="hosted service"):
            rest.copy_weights(copied, **refused)  # pyright: ignore
    with pytest.raises(CheckpointError, match="does not exist"):
        rest.copy_weights(path).result()


def test_an_archive_holds_the_checkpoints_files(
    rest: RestClient, client: TrainingClient, own_home: Path, tmp_path: Path
) -> None:
    path = client.save_weights_for_sampler("x", ttl_seconds=100).result().path
    answer = rest.get_checkpoint_archive_url(client.model_id, "sampler_weights/x").result()
    assert answer.url.startswith("file://") and answer.expires is not None
    local, _ = urllib.request.urlretrieve(answer.url, tmp_path / "download.tar.gz")
    with tarfile.open(local) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    expected = {f.name: f.read_bytes() for f in folder(own_home, path).iterdir()}
    assert {f.name: f.read_bytes() for f in (tmp_path / "unpacked").iterdir()} == expected
    rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    (only,) = [f for f in (own_home / "archives").rglob("*") if f.is_file()]
    assert only.as_uri() == answer.url


def test_sessions(
    own: ServiceClient, rest: RestClient, client: TrainingClient, own_home: Path, tied_model: str
) -> None:
    second = own.create_lora_training_client(tied_model, rank=1).result()
    with ServiceClient(home=own_home) as other:
        third = other.create_lora_training_client(tied_model, rank=1).result()
        assert rest.list_sessions().result().sessions == [other.session_id, own.session_id]
        assert rest.list_sessions(limit=1, offset=1).result().sessions == [own.session_id]
        assert rest.get_session(other.session_id).result().training_run_ids == [third.model_id]
    session = rest.get_session(own.session_id).result()
    assert session.training_run_ids == [client.model_id, second.model_id]
    assert (session.user_metadata, session.display_name) == ({"team": "a"}, "night shift")
    with pytest.raises(RequestError, match="no session 'x'"):
        rest.get_session("x").result()


def test_capabilities_name_what_is_loaded_and_what_is_shipped(
    own: ServiceClient, rest: RestClient, tied_model: str
) -> None:
    assert tied_model not in [m.model_name for m in own.get_server_capabilities().supported_models]
    own.create_sampling_client(base_model=tied_model).result()
    first, *shipped = own.get_server_capabilities().supported_models
    assert (first.model_name, first.max_context_length, first.trainable, first.sampleable) == (
        tied_model,
        256,
        True,
        True,
    )
    assert [Path(m.model_name or "").name for m in shipped] == ["tiny_chat"]
    assert rest.get_server_capabilities().result() == own.get_server_capabilities()
    assert RestClient().get_server_capabilities().result().supported_models == shipped


def test_it_works_without_a_service_client_and_after_one_closed(
    own: ServiceClient, rest: RestClient, client: TrainingClient, own_home: Path
) -> None:
    path = client.save_state("x").result().path
    own.close("success", detail="done").result()
    for each in (rest, RestClient(own_home)):
        assert paths(each, client) == [path]


def test_a_home_that_does_not_exist_is_empty_and_stays_so(tmp_path: Path) -> None:
    rest = RestClient(tmp_path / "nowhere")
    assert rest.list_training_runs().result().training_runs == []
    assert rest.list_user_checkpoints().result().checkpoints == []
    assert rest.list_sessions().result().sessions == []
    with pytest.raises(RequestError, match=r"no training run 'x' under .*nowhere"):
        rest.get_training_run("x").result()
    assert not (tmp_path / "nowhere").exists()


def test_every_way_to_wait_gives_the_same(rest: RestClient, client: TrainingClient) -> None:
    async def main() -> None:
        path = (await client.save_state("x")).path
        answers = [
            await rest.list_checkpoints(client.model_id),
            await rest.list_checkpoints(client.model_id).result_async(),
            await rest.list_checkpoints_async(training_run_id=client.model_id),
            rest.list_checkpoints(client.model_id).result(),
        ]
        assert all(answer == answers[0] for answer in answers) and len(answers[0].checkpoints) == 1
        assert (await rest.get_checkpoint_archive_url_from_tinker_path(path)).url.endswith("x.tar.gz")
        await rest.delete_checkpoint_from_tinker_path_async(path)
        assert (await rest.list_checkpoints(client.model_id)).checkpoints == []
        with pytest.raises(CheckpointError, match="does not exist"):
            await rest.delete_checkpoint_from_tinker_path_async(path)

    asyncio.run(main())


def test_every_public_method_of_the_sdks_is_there_or_refused_by_name(rest: RestClient) -> None:
    ours = {name for name, _ in inspect.getmembers(RestClient, inspect.isfunction)}
    for name, method in inspect.getmembers(tinker.RestClient, inspect.isfunction):
        if name.startswith("_") or name == "get_telemetry":
            continue
        base = name.removesuffix("_async")
        if base in hosted_only.REST_CALLS:
            assert base not in ours
            with pytest.raises(RequestError, match=f"{base} has no meaning with the local engine: .+"):
                getattr(rest, name)()
        else:
            assert callable(getattr(rest, name))
            if base == name:
                theirs = [(p.name, p.default, p.kind) for p in inspect.signature(method).parameters.values()]
                found = inspect.signature(getattr(RestClient, name)).parameters.values()
                assert [(p.name, p.default, p.kind) for p in found] == theirs, name
    for name in ("no_such_method", "no_such_method_async", "_private_async"):
        assert not hasattr(rest, name)
    with pytest.raises(RequestError, match="project_id"):
        rest.list_training_runs(project_id="p")


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, ["a"], "a"], ids=str)
def test_user_metadata_must_be_strings(own: ServiceClient, client: TrainingClient, tied_model: str, metadata) -> None:
    with pytest.raises(RequestError, match="user_metadata must map strings to strings"):
        own.create_lora_training_client(tied_model, user_metadata=metadata)
    with pytest.raises(RequestError, match="user_metadata must map strings to strings"):
        client.save_state("x", user_metadata=metadata).result()
    with pytest.raises(RequestError, match="user_metadata must map strings to strings"):
        ServiceClient(user_metadata=metadata)


def test_a_training_client_makes_sampling_clients(service: ServiceClient, tied_model: str) -> None:
    client = make_training_client(service, tied_model)
    path = client.save_weights_for_sampler("x").result().path
    expected = sampled(client.save_weights_and_get_sampling_client().result())
    assert_repeats(sampled(client.create_sampling_client(path).result()), expected)
    assert_repeats(sampled(asyncio.run(client.create_sampling_client_async(model_path=path))), expected)
    with pytest.raises(RequestError, match=r"optimizer=.*dimuon"):
        service.create_lora_training_client(tied_model, optimizer=types.DimuonOptimizerConfig())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"spec": 1}', "null"])
def test_a_damaged_checkpoint_hides_no_other_and_can_be_deleted(
    rest: RestClient, client: TrainingClient, own_home: Path, text: str
) -> None:
    good, bad = client.save_state("good").result().path, client.save_state("bad").result().path
    (folder(own_home, bad) / "checkpoint.json").write_text(text)
    assert paths(rest, client) == [good]
    run = rest.get_training_run(client.model_id).result()
    assert run.corrupted and run.last_checkpoint is not None and run.last_checkpoint.tinker_path == good
    for method in (rest.get_weights_info_by_tinker_path, rest.copy_weights, rest.publish_checkpoint_from_tinker_path):
        with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
            method(bad).result()
    rest.delete_checkpoint_from_tinker_path(bad).result()
    assert not rest.get_training_run(client.model_id).result().corrupted


def test_an_expiry_of_an_earlier_version_that_cannot_be_read_expires_nothing(
    rest: RestClient, client: TrainingClient, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = client.save_state("x", ttl_seconds=1000).result().path
    for file in own_home.glob(f"{REGISTRY_FILE}*"):
        file.unlink()
    (folder(own_home, path) / "expires_at.json").write_text(json.dumps({"expires_at": "soon"}))
    now = catalog.time.time()
    monkeypatch.setattr(catalog.time, "time", lambda: now + 2000)
    assert paths(rest, client) == [path]
