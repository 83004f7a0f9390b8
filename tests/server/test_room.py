"""At a limit, sessions that have fallen silent give their place; live ones keep it."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tests.rl.arena import PatientLoop, run
from tests.server.stand_in import Link
from tinker_local_backend.server.access import Access, Tenant
from tinker_local_backend.server.access_log import AccessLog
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.metrics import Metrics
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Session

pytestmark = pytest.mark.usefixtures("on_loop_time")


class Served:
    """A service of three models and five sessions; `clients` have a session with a model each."""

    def __init__(self, home: Path) -> None:
        config = ServerConfig(model="m", max_models=3, max_sessions=5)
        self.link = Link()
        self.service = Service(config, self.link, Metrics(), AccessLog(None), Access({}, home))  # pyright: ignore[reportArgumentType]
        self.tenant, self.other = (Tenant(name, home / name) for name in ("a", "b"))

    async def session(self, tenant: Tenant | None = None, silent: float = 0.0) -> Session:
        session = await self.service.create_session(tenant or self.tenant, {}, None)
        session.seen = asyncio.get_running_loop().time() - silent
        return session

    async def train(self, session: Session) -> str:
        model = await self.service.create_model(session.tenant, session.session_id, 0, {"op": "create_model"}, b"")
        await asyncio.sleep(0)
        return model.model_id

    async def clients(self, *silent: float, tenant: Tenant | None = None) -> list[Session]:
        made = [await self.session(tenant) for _ in silent]
        for session, seconds in zip(made, silent, strict=True):
            await self.train(session)
            session.seen -= seconds
        return made

    def is_live(self, session: Session) -> bool:
        return self.service.sessions.is_live(session)


@pytest.fixture
def on_loop_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service reads the clock of its event loop, which jumps."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time(), time=time.time)
    for module in ("service", "sessions"):
        monkeypatch.setattr(f"tinker_local_backend.server.{module}.time", clock)


def play(main: Awaitable[None]) -> None:
    run(main, PatientLoop)


def test_the_longest_silent_gives_its_model_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        served = Served(tmp_path)
        (foreign,) = await served.clients(200.0, tenant=served.other)
        late, later, live = await served.clients(31.0, 60.0, 1.0)
        model = await served.train(await served.session())
        assert served.link.dropped == [f"{later.session_id}:train:0"]
        assert [served.is_live(s) for s in (late, later, live, foreign)] == [True, False, True, True]
        assert served.service.model(served.tenant, model).info is not None

    play(main())


def test_live_sessions_keep_their_models(tmp_path: Path) -> None:
    """The refusal comes as soon as each of them was heard from, and nobody is ended."""

    async def main() -> None:
        served = Served(tmp_path)
        held = await served.clients(9.0, 9.0, 9.0)
        asking = asyncio.create_task(served.train(await served.session()))
        for session in held:
            await asyncio.sleep(0.02)
            assert not asking.done()
            served.service.sessions.touch(served.tenant, session.session_id)
        with pytest.raises(Refused, match="3 models are being trained \\(max_models\\)"):
            await asking
        assert all(served.is_live(session) for session in held) and served.link.dropped == []

    play(main())


def test_a_request_waits_for_a_session_that_may_be_dead(tmp_path: Path) -> None:
    async def main() -> None:
        served = Served(tmp_path)
        dead, live, other = await served.clients(29.8, 5.0, 5.0)
        asking = [asyncio.create_task(served.train(s)) for s in [await served.session()] for _ in range(2)]
        await asyncio.sleep(0.02)
        assert not asking[0].done() and served.is_live(dead)
        models = await asyncio.gather(*asking)
        assert models[0] == models[1]  # the same request, sent again while it waited
        assert [served.is_live(s) for s in (dead, live, other)] == [False, True, True]

    play(main())


def test_sessions_without_models_give_room_for_sessions_alone(tmp_path: Path) -> None:
    async def main() -> None:
        served = Served(tmp_path)
        idle = [await served.session(silent=40.0 + n) for n in range(2)]
        await served.clients(31.0, 0.0, 0.0)
        await served.session()
        assert [served.is_live(session) for session in idle] == [True, False]
        idle[0].seen = asyncio.get_running_loop().time()
        await served.session()  # the one with the model is the next to go
        assert served.service.live["models"] == 2
        with pytest.raises(Refused, match="5 live sessions \\(max_sessions\\)"):
            await served.session()

    play(main())
