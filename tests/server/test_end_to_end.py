"""The unmodified SDK over the server gives what the in-process client gives."""

import numpy as np
import pytest
import tinker

from tests.server.data import ATOL, DATA, assert_same_output, random_tokens
from tests.server.serving import TINY_CHAT
from tinker_local_backend import ServiceClient


def test_a_run_from_start_to_sample(sdk: tinker.ServiceClient, local: ServiceClient) -> None:
    both = [
        client.create_lora_training_client(TINY_CHAT, rank=4, seed=7, user_metadata={"who": "me"}).result()
        for client in (sdk, local)
    ]
    losses: list[float] = []
    for _ in range(3):
        steps = [
            (c.forward_backward(DATA, "cross_entropy"), c.optim_step(tinker.AdamParams(learning_rate=1e-3)))
            for c in both
        ]
        (found, found_step), (expected, expected_step) = [(a.result(), b.result()) for a, b in steps]
        assert_same_output(found, expected)
        assert found_step.metrics == pytest.approx(expected_step.metrics, rel=1e-4)
        losses.append(found.metrics["loss:sum"])
    assert losses[2] < losses[1] < losses[0]
    samplers = [client.save_weights_and_get_sampling_client().result() for client in both]
    params = tinker.SamplingParams(max_tokens=12, seed=3, temperature=0.8)
    prompt = tinker.ModelInput.from_ints(random_tokens(9, 99))
    found_sample, expected_sample = [
        sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result() for sampler in samplers
    ]
    for left, right in zip(found_sample.sequences, expected_sample.sequences, strict=True):
        assert (left.tokens, left.stop_reason) == (right.tokens, right.stop_reason)
        np.testing.assert_allclose(left.logprobs or [], right.logprobs or [], atol=ATOL)
    assert len({tuple(sequence.tokens) for sequence in found_sample.sequences}) > 1
    assert len({sequence.sequence_id for sequence in found_sample.sequences}) == 3
