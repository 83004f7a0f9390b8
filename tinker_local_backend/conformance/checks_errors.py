"""Checks of errors: a bad request fails at once with an error of the SDK, and disturbs no other request."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker

from tinker_local_backend.conformance.harness import Check, RefusedError, expect, expect_close, expect_refusal
from tinker_local_backend.conformance.probe import (
    Probe,
    datum,
    forward_logprobs,
    prompt,
    sampling_params,
    supervised,
    token_ids,
)

SECONDS = 40.0
"""An error that the SDK retries takes minutes."""
UNKNOWN_MODEL = "conformance/no-such-model"


def unknown_model(probe: Probe) -> None:
    """A base model that is not served is refused, for training and for sampling."""
    service = probe.service
    expect_refusal(lambda: service.create_lora_training_client(UNKNOWN_MODEL, rank=4).result(), "a training client")
    expect_refusal(
        lambda: _drawn(service.create_sampling_client(base_model=UNKNOWN_MODEL).result()), "a sampling client"
    )


def unknown_run(probe: Probe) -> None:
    """A run that does not exist is a NotFoundError."""
    expect_refusal(
        lambda: probe.rest.get_training_run("no-such-run:train:0").result(), "get_training_run", tinker.NotFoundError
    )


def unknown_checkpoint(probe: Probe) -> None:
    """A checkpoint that does not exist is refused, for training, sampling and deletion."""
    path = "tinker://no-such-run:train:0/{}/none"
    state, sampler, service = path.format("weights"), path.format("sampler_weights"), probe.service
    expect_refusal(lambda: service.create_training_client_from_state(state).result(), "a training client")
    expect_refusal(lambda: _drawn(service.create_sampling_client(model_path=sampler).result()), "a sampling client")
    expect_refusal(
        lambda: probe.rest.delete_checkpoint_from_tinker_path(state).result(), "a deletion", tinker.NotFoundError
    )


def sampling_parameters(probe: Probe) -> None:
    """Sampling parameters out of range are refused, and the next request is served."""
    sampler = probe.base_sampler()
    wrong: dict[str, Any] = {"temperature": -1.0, "top_p": 2.0, "max_tokens": -5}
    for name, value in wrong.items():
        expect_refusal(lambda name=name, value=value: _drawn(sampler, **{name: value}), f"{name}={value}")
    expect(len(_drawn(sampler)) == 4, "the request after them had no answer")


def too_long_prompt(probe: Probe) -> None:
    """A prompt that is longer than the model's context is refused."""
    if (length := probe.context_length) is None:
        raise RefusedError("the capabilities state no max_context_length")
    sampler = probe.base_sampler()
    expect_refusal(lambda: _drawn(sampler, tokens=token_ids(length + 1)), f"{length + 1} tokens of {length}")
    expect(len(_drawn(sampler)) == 4, "the request after it had no answer")


def loss_inputs(probe: Probe) -> None:
    """Loss inputs that are missing, of the wrong length or outside the vocabulary are refused; so is an unknown loss."""
    tokens = token_ids(9)
    ones = np.ones(8)
    wrong: dict[str, tuple[Any, tinker.Datum]] = {
        "importance_sampling without logprobs": ("importance_sampling", datum(tokens, advantages=ones)),
        "cross_entropy with fewer weights than targets": ("cross_entropy", supervised(tokens, np.ones(5))),
        "a target outside the vocabulary": ("cross_entropy", datum(tokens, target_tokens=[2**30] * 8, weights=ones)),
        "an unknown loss": ("no_such_loss", supervised(tokens)),
    }
    for what, (loss, one) in wrong.items():
        trainer = probe.trainer()
        expect_refusal(lambda t=trainer, d=one, name=loss: t.forward_backward([d], name).result(), what)


def other_clients(probe: Probe) -> None:
    """A bad request of one client changes nothing for another."""
    good, bad = probe.trainer(), probe.trainer()
    before = forward_logprobs(good, token_ids(12))
    for _ in range(3):
        future = bad.forward_backward([supervised(token_ids(9), np.ones(5))], "cross_entropy")
        expect_refusal(future.result, "wrong weights")
    expect_close(forward_logprobs(good, token_ids(12)), before, "logprobs of the other client", atol=0.02)


def _drawn(sampler: tinker.SamplingClient, tokens: list[int] | None = None, **options: Any) -> list[int]:
    params = sampling_params(**{"max_tokens": 4, **options})
    return list(sampler.sample(prompt(tokens or token_ids(5)), 1, params).result().sequences[0].tokens)


CHECKS = tuple(
    Check(ask, SECONDS)
    for ask in (
        unknown_model,
        unknown_run,
        unknown_checkpoint,
        sampling_parameters,
        too_long_prompt,
        loss_inputs,
        other_clients,
    )
)
