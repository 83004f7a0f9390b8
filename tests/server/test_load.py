"""Many requests at once, and many clients that wait."""

import asyncio
from pathlib import Path

import pytest
import tinker

from tests.server.serving import KEY, TINY_CHAT, Serving, Wire

pytestmark = pytest.mark.server


def test_a_thousand_samples_at_once_all_come_back(tmp_path: Path) -> None:
    """More than the queue takes: the SDK is told to wait and sends again, and nothing is lost or mixed up."""
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    with Serving(tmp_path / "home", max_sampling_requests=200) as serving:
        client = (
            tinker.ServiceClient(base_url=serving.url, api_key=KEY)
            .create_sampling_client(base_model=TINY_CHAT)
            .result()
        )

        async def ask(seed: int) -> tuple[int, ...]:
            params = tinker.SamplingParams(max_tokens=3, seed=seed % 10, stop=[])
            sampled = await client.sample(tinker.ModelInput.from_ints([1 + seed % 10]), 1, params)
            return tuple(sampled.sequences[0].tokens)

        async def main() -> list[tuple[int, ...]]:
            return await asyncio.gather(*(ask(seed) for seed in range(1000)))

        answers = asyncio.run(main())
        for kind in range(10):
            assert len(set(answers[kind::10])) == 1
        assert len(set(answers)) > 1


STEPS, HEARTBEATS = 12, 10


def test_heartbeats_are_answered_while_the_engine_is_busy(server: Serving) -> None:
    """HTTP is a process of its own: many heartbeats and a listing come back before the steps that were there first."""
    wire = Wire(server.url)
    session = wire.session()
    model = wire.model(session)
    steps = [wire.forward_backward(model, number, length=600)[1] for number in range(1, STEPS + 1)]
    for _ in range(HEARTBEATS):
        assert wire.post("/session_heartbeat", session_id=session)[0] == 200
    assert wire.ask("GET", "/training_runs")[0] == 200
    live = wire.ask("GET", f"{server.url}/metrics")[1].decode()
    assert "tinker_live_requests 0.0" not in live, "the steps had ended before"
    assert isinstance(wire.result(steps[-1]), bytes)
    wire.post(f"/sessions/{session}/finish")
