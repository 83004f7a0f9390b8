"""A concurrent program run again gives the same bits, although its tasks finish at different times."""

import asyncio
from pathlib import Path

import pytest

from tests.engine.helpers import STEP, cross_entropy_datum, params, prompt, random_tokens, weights
from tests.engine.test_async import run
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient


def multi_turn_program(home: Path, model: str) -> list:
    """12 conversations of different lengths beside training steps: every token and logprob, in the order of arrival."""
    record: list = []

    async def conversation(client: SamplingClient, index: int) -> None:
        tokens = random_tokens(2 + index % 5, index)
        for turn in range(1 + index % 4):
            fields = params(3 + (5 * index + 7 * turn) % 11, seed=None if index % 2 else index)
            response = await client.sample(prompt(tokens), 1 + index % 2, fields)
            for sequence in response.sequences:
                record.append((index, turn, sequence.tokens, sequence.logprobs))
            tokens = [*tokens, *response.sequences[0].tokens, 7]
        record.append((index, (await client.compute_logprobs(prompt(tokens)))[1:]))

    async def steps(client: TrainingClient) -> None:
        for step in range(4):
            forward = client.forward_backward([cross_entropy_datum(5 + step, step)], "cross_entropy")
            update = client.optim_step(STEP)
            record.append((await forward).metrics)
            record.append((await update).metrics)

    async def main() -> None:
        with ServiceClient(home=home, deterministic=True) as service:
            client = await service.create_lora_training_client_async(model, rank=4, seed=0)
            for _ in range(2):
                snapshot = await client.save_weights_and_get_sampling_client_async()
                async with asyncio.TaskGroup() as group:
                    group.create_task(steps(client))
                    for index in range(12):
                        group.create_task(conversation(snapshot, index))
            record.append({name: matrix.tobytes() for name, matrix in weights(client).items()})

    run(main())
    return record


@pytest.mark.cpu_promise
def test_a_program_run_twice_gives_the_same_bits(
    tmp_path: Path, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_SEED", "3")
    first = multi_turn_program(tmp_path, tied_model)
    for _ in range(2):
        assert multi_turn_program(tmp_path, tied_model) == first
