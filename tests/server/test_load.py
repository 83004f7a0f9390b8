"""Many requests at once."""

import asyncio
from pathlib import Path

import pytest
import tinker

from tests.server.serving import KEY, TINY_CHAT, Serving

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
