"""stable_reinforce by the unmodified SDK: what was sampled is recorded under its names, and verified when it is trained on."""

import dataclasses

import numpy as np
import pytest
import tinker

from benchmarks.ours import sampled_datum
from tests.server.serving import TINY_CHAT
from tinker_local_backend import ServiceClient

PROMPT = [5, 6, 7, 8]
PARAMS = tinker.SamplingParams(max_tokens=6, seed=3)
LOSS = "stable_reinforce"


def test_the_same_numbers_as_in_process(sdk: tinker.ServiceClient, local: ServiceClient) -> None:
    outputs = []
    for service in (sdk, local):
        client = service.create_lora_training_client(TINY_CHAT, rank=4, seed=7).result()
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        prompt = tinker.ModelInput.from_ints(PROMPT)
        good, bad = sampler.sample(prompt=prompt, num_samples=2, sampling_params=PARAMS).result().sequences
        data = [sampled_datum(PROMPT, good, 1.0), sampled_datum(PROMPT, bad, -0.5)]
        strict = {"verify_provenance": True, "weight_cap": 1.5}
        outputs.append(client.forward_backward(data, LOSS, strict).result())  # pyright: ignore[reportArgumentType]

        logprobs = data[0].loss_fn_inputs["logprobs"].to_numpy() - np.float32(0.25)
        other = {**data[0].loss_fn_inputs, "logprobs": tinker.TensorData.from_numpy(logprobs)}
        with pytest.raises(Exception, match=r"logprobs\[0\] of sequence"):
            client.forward([dataclasses.replace(data[0], loss_fn_inputs=other)], LOSS).result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        with pytest.raises(Exception, match="has no record of sequence"):
            client.forward(data, LOSS, strict).result()  # pyright: ignore[reportArgumentType]
        outputs.append(client.forward(data, LOSS).result())
        with pytest.raises(Exception, match="has no provenance, which this loss needs"):
            client.forward([tinker.Datum(data[0].model_input, data[0].loss_fn_inputs)], LOSS).result()
    for over_the_wire, in_process in zip(outputs[:2], outputs[2:], strict=True):
        assert over_the_wire.metrics == pytest.approx(in_process.metrics, rel=1e-3, abs=1e-5)


def test_a_sampler_that_does_not_record_is_known_to_nobody(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_lora_training_client(TINY_CHAT, rank=4, seed=7).result()
    path = client.save_weights_for_sampler("plain").result().path
    with pytest.raises(tinker.BadRequestError, match=r"is of base model .*, not 'another'"):
        sdk.create_sampling_client(path, "another").result()
    for record in (False, True):
        sampler = sdk.create_sampling_client(path, TINY_CHAT, record_stability_info=record).result()
        prompt = tinker.ModelInput.from_ints(PROMPT)
        (sequence,) = sampler.sample(prompt=prompt, num_samples=1, sampling_params=PARAMS).result().sequences
        call = client.forward([sampled_datum(PROMPT, sequence, 1.0)], LOSS, {"verify_provenance": 1.0})
        if record:
            call.result()
        else:
            with pytest.raises(Exception, match="has no record of sequence"):
                call.result()
