"""When a run is saved, what is deleted, where a resumed run starts, and that its reference policy stays the same."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeServiceClient, FakeTrainingClient
from tests.rl.loop import TINY, rows
from tinker_cookbook import backends
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.runs.checkpoints import load_checkpoints_file
from tinker_cookbook.runs.config import RunConfig
from tinker_cookbook.runs.manager import CheckpointManager
from tinker_cookbook.runs.reference import KLReferenceConfig, open_reference
from tinker_cookbook.runs.session import Session, open_session
from tinker_cookbook.stores.checkpoint_record import CheckpointRecord
from tinker_cookbook.utils.misc_utils import timed


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    fake = FakeServiceClient()
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


def make_config(log_path: Path, **changes: Any) -> RunConfig:
    return RunConfig(log_path=str(log_path), model_name=TINY, recipe_name="test", learning_rate=1e-4, **changes)


async def train_for(session: Session, start: int, end: int, tokens: int = 0) -> None:
    """Steps as a loop does them: update, row, checkpoint."""
    for step in range(start, end):
        await session.training_client.optim_step(None)  # pyright: ignore[reportArgumentType]
        session.run.logger.log_metrics({"n": step}, step=step)
        await session.checkpoints.maybe_save(step + 1, {"batch": step + 1}, tokens)


def train(config: RunConfig, end: int, tokens: int = 0) -> None:
    async def main() -> None:
        async with open_session(config) as session:
            start = session.start_step()
            session.rewind(start, end)
            await train_for(session, start, end, tokens)

    asyncio.run(main())


class TestCadence:
    def test_by_batches(self, service: FakeServiceClient, tmp_path: Path) -> None:
        train(make_config(tmp_path, save_every=2), 5)
        assert service.saved == {
            f"tinker://run0/{kind}/{step:06d}": step for step in (2, 4) for kind in ("weights", "sampler_weights")
        }
        assert [record.batch for record in load_checkpoints_file(tmp_path)] == [2, 4]

    def test_by_tokens_counted_over_a_resume(self, service: FakeServiceClient, tmp_path: Path) -> None:
        config = make_config(tmp_path, save_every=0, save_every_tokens=25)
        train(config, 4, tokens=10)
        assert rows(tmp_path, "checkpoints.jsonl")[-1]["elapsed_tokens"] == 30
        train(config, 9, tokens=10)
        records = load_checkpoints_file(tmp_path)
        assert [(record.batch, record.get("elapsed_tokens")) for record in records] == [(3, 30), (6, 60), (9, 90)]

    def test_by_seconds(self, service: FakeServiceClient, tmp_path: Path) -> None:
        now = 0.0
        client = FakeTrainingClient(service, "run0")
        manager = CheckpointManager(client, service, tmp_path, save_every_seconds=10, clock=lambda: now)
        due = []
        for step, now in ((1, 9.0), (2, 10.0), (3, 12.0), (4, 19.9), (5, 20.0)):  # noqa: B007
            if manager.should_save(step):
                due.append(step)
                asyncio.run(manager.maybe_save(step, {"batch": step}))
        assert due == [2, 5]

    def test_nothing_is_saved_before_the_first_step(self, service: FakeServiceClient, tmp_path: Path) -> None:
        manager = CheckpointManager(
            FakeTrainingClient(service, "r"), service, tmp_path, save_every=1, rolling_save_every=1
        )
        asyncio.run(manager.maybe_save(0, {"batch": 0}))
        asyncio.run(manager.save_stopped(0, {"batch": 0}))
        assert not service.saved and not (tmp_path / "checkpoints.jsonl").exists()


class TestRolling:
    config: dict[str, Any] = {"save_every": 3, "rolling_save_every": 1}  # noqa: RUF012

    def test_each_replaces_the_one_before_and_gives_way_to_a_periodic_one(
        self, service: FakeServiceClient, tmp_path: Path
    ) -> None:
        train(make_config(tmp_path, **self.config, rolling_ttl_seconds=60), 5)
        states = sorted(path for path in service.saved if "/weights/" in path)
        assert states == ["tinker://run0/weights/000003", "tinker://run0/weights/000005-rolling"]
        assert service.ttl["tinker://run0/weights/000005-rolling"] == 60
        assert "tinker://run0/sampler_weights/000005-rolling" not in service.saved
        assert [r.batch for r in load_checkpoints_file(tmp_path) if r.get("rolling")] == [1, 2, 4, 5]

    def test_the_final_checkpoint_takes_its_place(self, service: FakeServiceClient, tmp_path: Path) -> None:
        async def main() -> None:
            async with open_session(make_config(tmp_path, save_every=0, rolling_save_every=1)) as session:
                await train_for(session, 0, 2)
                await session.checkpoints.save_final({"batch": 2})

        asyncio.run(main())
        assert set(service.saved) == {"tinker://run0/weights/final", "tinker://run0/sampler_weights/final"}
        assert service.ttl["tinker://run0/weights/final"] is None
        assert load_checkpoints_file(tmp_path)[-1].final

    def test_a_resumed_run_deletes_the_one_it_went_on_from(self, service: FakeServiceClient, tmp_path: Path) -> None:
        config = make_config(tmp_path, save_every=0, rolling_save_every=1)
        train(config, 2)
        train(config, 3)
        assert list(service.saved) == ["tinker://run1/weights/000003-rolling"]

    def test_a_deletion_that_fails_does_not_end_the_run(
        self, service: FakeServiceClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        manager = CheckpointManager(FakeTrainingClient(service, "r"), service, tmp_path, rolling_save_every=1)
        asyncio.run(manager.maybe_save(1, {"batch": 1}))
        service.saved.clear()
        asyncio.run(manager.maybe_save(2, {"batch": 2}))
        assert "could not be deleted" in caplog.text


class TestAsyncSaves:
    def test_the_weights_are_those_of_the_step_and_the_record_follows(
        self, service: FakeServiceClient, tmp_path: Path
    ) -> None:
        config = make_config(tmp_path, save_every=2, async_periodic_saves=True)
        train(config, 5)
        assert service.saved["tinker://run0/weights/000002"] == 2 and service.saved["tinker://run0/weights/000004"] == 4
        assert [record.batch for record in load_checkpoints_file(tmp_path)] == [2, 4]
        # The step after a save is submitted before the save is waited for.
        calls = service.calls
        assert calls.index("submit save_state") < calls.index("await save_state")
        between = calls[calls.index("submit save_state") : calls.index("await save_state")]
        assert "submit optim_step" in between or "submit save_weights_for_sampler" in between


class TestResume:
    def test_an_expired_checkpoint_gives_way_to_the_one_before(
        self, service: FakeServiceClient, tmp_path: Path
    ) -> None:
        config = make_config(tmp_path, save_every=2)
        train(config, 5)
        del service.saved["tinker://run0/weights/000004"]
        train(config, 6)
        assert service.created[-1] == ("state with optimizer", "tinker://run0/weights/000002")
        assert [row["step"] for row in rows(tmp_path)] == list(range(6))
        assert service.trainers[1].weights == 6

    def test_when_all_are_gone_the_run_says_so(self, service: FakeServiceClient, tmp_path: Path) -> None:
        config = make_config(tmp_path, save_every=2)
        train(config, 5)
        service.saved.clear()
        with pytest.raises(CheckpointError, match="none of its 2 checkpoints"):
            train(config, 6)
        assert [row["step"] for row in rows(tmp_path)] == list(range(5))

    def test_another_error_is_not_taken_for_a_missing_checkpoint(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_config(tmp_path, save_every=2)
        train(config, 5)

        def unreachable(*args: Any, **kwargs: Any) -> Any:
            raise ConnectionError("no route")

        monkeypatch.setattr(FakeServiceClient, "create_training_client_from_state_with_optimizer", unreachable)
        with pytest.raises(ConnectionError):
            train(config, 6)

    def test_weights_of_another_base_model_are_refused(self, service: FakeServiceClient, tmp_path: Path) -> None:
        service.saved["tinker://other/weights/x"] = 7
        service.base_model = "Qwen/Qwen3-8B"
        with pytest.raises(ConfigurationError, match="is a checkpoint of 'Qwen/Qwen3-8B'"):
            train(make_config(tmp_path, load_checkpoint_path="tinker://other/weights/x"), 1)
        assert service.created == []

    def test_epochs_count(self, service: FakeServiceClient, tmp_path: Path) -> None:
        nothing: Any = None
        record = CheckpointRecord("a", batch=3, epoch=2)
        session = Session(make_config(tmp_path), nothing, service, nothing, record, nothing, nothing, nothing)
        assert session.start_step(10) == 23 and session.start_step() == 3


class TestAddress:
    """Where a run's report is, said by the training client."""

    def test_the_local_engine_names_the_report(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)

        async def main() -> str:
            async with open_session(make_config(Path("run"), lora_rank=2, backend="local")) as session:
                await session.checkpoints.save_final({"batch": 1})
                client: Any = session.training_client
                return client.get_console_url()

        report = (tmp_path / "run" / "report.html").as_uri()
        assert [asyncio.run(main()), asyncio.run(main())] == [report, report], "a resumed run has the same address"

    @pytest.mark.parametrize("backend", ["local", "tinker"])
    def test_a_server_is_not_told_of_folders(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
    ) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-for-tests")
        config = make_config(tmp_path / "run", save_every=1, backend=backend)
        train(config, 1)
        train(config, 2)
        train(make_config(tmp_path / "next", load_checkpoint_path="tinker://run0/weights/000001", backend=backend), 1)
        places = [(metadata or {}).get("log_path") for metadata in service.user_metadata]
        names = ("run", "run", "next")
        assert places == [str(tmp_path / name) if backend == "local" else None for name in names]
        assert all((metadata or {})["recipe"] == "test" for metadata in service.user_metadata)


class TestReference:
    def reference(self, config: RunConfig, named: KLReferenceConfig | None = None, steps: int = 3) -> tuple[int, Any]:
        """The weights of the reference, and what the run's last record says of it."""

        async def main() -> tuple[int, Any]:
            async with open_session(config) as session:
                client: Any = await open_reference(session, named)
                start = session.start_step()
                await train_for(session, start, start + steps)
                return client.weights, session.checkpoints.loop_state["reference"]

        return asyncio.run(main())

    def test_a_new_adapters_reference_is_the_base_model(self, service: FakeServiceClient, tmp_path: Path) -> None:
        config = make_config(tmp_path, save_every=2)
        assert self.reference(config) == (0, {"base_model": TINY, "path": None})
        # After a resume the policy has moved, the reference has not.
        assert self.reference(config)[0] == 0

    def test_loaded_weights_are_kept_for_good_and_found_again(self, service: FakeServiceClient, tmp_path: Path) -> None:
        service.saved["tinker://other/weights/x"] = 7
        config = make_config(tmp_path, save_every=2, load_checkpoint_path="tinker://other/weights/x")
        weights, recorded = self.reference(config)
        assert weights == 7 and recorded == {"base_model": TINY, "path": "tinker://run0/sampler_weights/reference"}
        assert service.ttl[recorded["path"]] is None
        assert rows(tmp_path, "checkpoints.jsonl")[-1]["reference"] == recorded
        assert self.reference(config) == (7, recorded)
        assert sum("reference" in path for path in service.saved) == 1

    def test_a_named_one(self, service: FakeServiceClient, tmp_path: Path) -> None:
        service.saved["tinker://other/sampler_weights/x"] = 9
        named = KLReferenceConfig(base_model=TINY, load_checkpoint_path="tinker://other/sampler_weights/x")
        config = make_config(tmp_path, save_every=2)
        path_alone = KLReferenceConfig(load_checkpoint_path="tinker://other/sampler_weights/x")
        assert self.reference(config, path_alone) == self.reference(config, named)
        assert self.reference(config, named)[0] == 9
        link = tmp_path / "link"
        link.symlink_to(TINY)
        same = KLReferenceConfig(base_model=str(link), load_checkpoint_path="tinker://other/sampler_weights/x")
        assert self.reference(config, same)[0] == 9
        with pytest.raises(ConfigurationError, match="leave the reference as it was"):
            self.reference(config, KLReferenceConfig(base_model=TINY))

    def test_a_run_that_had_none_cannot_get_its_start_back(self, service: FakeServiceClient, tmp_path: Path) -> None:
        service.saved["tinker://other/weights/x"] = 7
        config = make_config(tmp_path, save_every=2, load_checkpoint_path="tinker://other/weights/x")
        train(config, 3)
        with pytest.raises(ConfigurationError, match="started without a reference"):
            self.reference(config)


def test_a_run_that_is_traced_writes_its_spans(service: FakeServiceClient, tmp_path: Path) -> None:
    async def main(fail: bool) -> None:
        async with open_session(make_config(tmp_path, enable_trace=True)):
            with timed("train", {}):
                pass
            if fail:
                raise ZeroDivisionError

    asyncio.run(main(fail=False))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(main(fail=True))
    with timed("after the run", {}):
        pass
    spans = [(row["ph"], row["name"]) for row in rows(tmp_path, "trace_events.jsonl") if row["ph"] != "M"]
    assert spans == [("B", "train"), ("E", "train")] * 2
