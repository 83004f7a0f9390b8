"""What goes wrong in one request stays in it: others of the same batch get their results."""

import asyncio
import math

import pytest
import tinker
import torch

from tests.engine.helpers import (
    STEP,
    assert_repeats,
    assert_same_tokens,
    cross_entropy_datum,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tinker_local_backend import LocalBackendError, RequestError, SamplingClient, ServiceClient

TOKENS = random_tokens(6, 0)


def outcomes(*requests: tuple[SamplingClient, tinker.SamplingParams]) -> list:
    """The sequences of each request, or the error it failed with; all are submitted at once."""

    async def main() -> list:
        futures = [client.sample(prompt(TOKENS), 1, fields) for client, fields in requests]
        results = await asyncio.gather(*(future.result_async() for future in futures), return_exceptions=True)
        return [result if isinstance(result, BaseException) else result.sequences for result in results]

    return asyncio.run(main())


def test_a_tiny_temperature_fails_alone_or_is_greedy(base_sampler: SamplingClient) -> None:
    try:
        requests = [(base_sampler, params(seed=0)), (base_sampler, params(temperature=1e-39, seed=0, stop=[]))]
        other, tiny = outcomes(*requests)
    except RequestError as error:
        assert "temperature" in str(error)
        return
    (greedy,) = outcomes((base_sampler, params(temperature=0.0, stop=[])))
    assert not isinstance(other, Exception)
    if not isinstance(tiny, LocalBackendError):
        assert_same_tokens([tiny[0].tokens], [greedy[0].tokens])


@pytest.mark.parametrize("temperature", [0.01, 1e-6, 100.0, 1e30])
def test_extreme_temperatures_are_fine(base_sampler: SamplingClient, temperature: float) -> None:
    (sequences,) = outcomes((base_sampler, params(temperature=temperature, seed=0, stop=[])))
    assert len(sequences[0].tokens) == 8
    assert all(math.isfinite(x) and x <= 0 for x in sequences[0].logprobs)
    if temperature <= 1e-6:
        (greedy,) = outcomes((base_sampler, params(temperature=0.0, stop=[])))
        assert_same_tokens([sequences[0].tokens], [greedy[0].tokens])


def test_a_snapshot_with_weights_that_are_not_finite_fails_alone(
    service: ServiceClient, tied_model: str, base_sampler: SamplingClient
) -> None:
    """A run that diverged is sampled beside one that did not."""
    diverged = make_training_client(service, tied_model)
    with torch.no_grad():
        diverged._run.state.adapter.b["lm_head"].fill_(math.nan)
    snapshot = diverged.save_weights_and_get_sampling_client().result()
    other, broken = outcomes((base_sampler, params(seed=0)), (snapshot, params(seed=0)))
    assert isinstance(broken, LocalBackendError)
    assert not isinstance(other, Exception)


def test_a_failing_client_does_not_disturb_another(service: ServiceClient, tied_model: str) -> None:
    good, bad = (make_training_client(service, tied_model) for _ in range(2))
    results, failing = [], []
    for _ in range(3):
        results.append(good.forward_backward([cross_entropy_datum(5, 0)], "cross_entropy"))
        failing += [bad.forward_backward([], "cross_entropy"), bad.optim_step(STEP), bad.load_state(PATH)]
    for future in failing:
        with pytest.raises(LocalBackendError):
            future.result()
    losses = [future.result().metrics["loss:sum"] for future in results]
    assert_repeats(losses[1:], [losses[0]] * 2)


PATH = "tinker://nobody/weights/nothing"
