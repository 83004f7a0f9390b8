"""Checks of training clients: forward passes, accumulated gradients and optimizer steps."""

from __future__ import annotations

import numpy as np
import tinker

from tinker_local_backend.conformance.harness import Check, expect, expect_close
from tinker_local_backend.conformance.probe import (
    DATA,
    RANK,
    Probe,
    forward_logprobs,
    logprobs_of,
    supervised,
    token_ids,
    train,
)

CHUNKED = 1030
"""Datums in a call that the SDK splits into two requests, of at most 1024 each."""


def capabilities(probe: Probe) -> None:
    """get_server_capabilities lists the model."""
    models = probe.rest.get_server_capabilities().result().supported_models
    names = [model.model_name for model in models]
    expect(probe.target.model in names, f"model {probe.target.model!r} is not among {names}")
    context = probe.context_length
    expect(context is None or context > 0, f"max_context_length is {context}")


def create_lora_client(probe: Probe) -> None:
    """create_lora_training_client and get_info state base model and rank."""
    trainer = probe.trainer()
    info = trainer.get_info()
    expect(
        info.is_lora and info.lora_rank == RANK, f"is_lora={info.is_lora}, lora_rank={info.lora_rank}, requested {RANK}"
    )
    expect(info.model_data.model_name, "get_info has no model_data.model_name")
    expect(trainer.model_id.count(":") == 2, f"model id {trainer.model_id!r} is not <session>:train:<number>")


def forward(probe: Probe) -> None:
    """forward returns a finite logprob for each target, the same every time, and loss:sum."""
    trainer = probe.trainer()
    first, again = (trainer.forward(DATA, "cross_entropy").result() for _ in range(2))
    for index, data in enumerate(DATA):
        logprobs = logprobs_of(first, index)
        expect(logprobs.shape == (data.model_input.length,), f"datum {index} has logprobs of shape {logprobs.shape}")
        expect(np.isfinite(logprobs).all() and (logprobs <= 1e-6).all(), f"datum {index} has logprobs above 0 or NaN")
        expect_close(logprobs_of(again, index), logprobs, "logprobs of the second call", atol=0.02)
    expect(len(first.loss_fn_outputs) == len(DATA), f"{len(first.loss_fn_outputs)} outputs for {len(DATA)} data")
    total = -sum(logprobs_of(first, index).sum() for index in range(len(DATA)))
    expect_close(first.metrics["loss:sum"], total, "loss:sum")


def forward_trains_nothing(probe: Probe) -> None:
    """forward leaves no gradient: a step after both calls is that of forward_backward alone."""
    one, other = probe.trainer(), probe.trainer()
    other.forward([supervised(token_ids(20, 9), -np.ones(19))], "cross_entropy").result()
    train(one)
    train(other)
    tokens = token_ids(24, 5)
    expect_close(forward_logprobs(other, tokens), forward_logprobs(one, tokens), "after a forward", atol=0.02)


def optim_step(probe: Probe) -> None:
    """optim_step makes the loss fall, and changes nothing at learning rate 0."""
    trainer = probe.trainer()
    losses = [train(trainer) for _ in range(6)]
    expect(
        losses[-1] < losses[0], f"the loss did not fall over {len(losses)} steps: {losses[0]:.4g} to {losses[-1]:.4g}"
    )
    tokens = token_ids(16, 3)
    before = forward_logprobs(trainer, tokens)
    train(trainer, rate=0.0)
    expect_close(forward_logprobs(trainer, tokens), before, "after a step at learning rate 0", atol=0.02)


def gradients_accumulate(probe: Probe) -> None:
    """Gradients of several forward_backward calls add up until the step, which clears them."""
    whole, split = probe.trainer(), probe.trainer()
    untouched = forward_logprobs(whole, token_ids(24, 5))
    for _ in range(2):
        train(whole)
        for data in DATA:
            split.forward_backward([data], "cross_entropy")
        split.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    after = forward_logprobs(whole, token_ids(24, 5))
    moved = float(np.abs(after - untouched).max())
    expect(moved > 1e-4, f"two steps moved no logprob by more than {moved:.1g}")
    # Adam divides small gradients by their size, so their rounding shows.
    expect_close(forward_logprobs(split, token_ids(24, 5)), after, "split over calls", atol=max(0.02, 0.1 * moved))


def seeds_of_adapters(probe: Probe) -> None:
    """Clients with the same seed train alike, and clients with different seeds do not."""
    clients = [probe.trainer(seed) for seed in (7, 7, 8)]
    tokens = token_ids(24, 5)
    for trainer in clients:
        train(trainer, rate=5e-3)
        train(trainer, rate=5e-3)
    same, again, other = (forward_logprobs(trainer, tokens) for trainer in clients)
    expect_close(again, same, "two clients of one seed", atol=0.02)
    expect(np.abs(other - same).max() > 1e-4, "another seed gave the same weights")


def data_in_chunks(probe: Probe) -> None:
    """A call with more data than a request holds returns all outputs in order, and their sum."""
    trainer = probe.trainer()
    rows = [token_ids(3, seed % 7) for seed in range(CHUNKED)]
    output = trainer.forward_backward([supervised(row) for row in rows], "cross_entropy").result()
    expect(len(output.loss_fn_outputs) == CHUNKED, f"{len(output.loss_fn_outputs)} outputs for {CHUNKED} data")
    logprobs = np.stack([logprobs_of(output, index) for index in range(CHUNKED)])
    each = np.stack([forward_logprobs(trainer, token_ids(3, seed)) for seed in range(7)])
    expect_close(logprobs, each[np.arange(CHUNKED) % 7], "logprobs", atol=0.05)
    expect_close(output.metrics["loss:sum"], -logprobs.sum(), "loss:sum")


def requests_keep_their_order(probe: Probe) -> None:
    """Steps that are submitted without waiting give the losses of steps that are awaited one by one."""
    sequential, pipelined = probe.trainer(), probe.trainer()
    expected = [train(sequential, [DATA[step % 3]]) for step in range(6)]
    outputs, steps = [], []
    for step in range(6):
        outputs.append(pipelined.forward_backward([DATA[step % 3]], "cross_entropy"))
        steps.append(pipelined.optim_step(tinker.AdamParams(learning_rate=1e-3)))
    for step in steps:
        step.result()
    losses = [output.result().metrics["loss:sum"] for output in outputs]
    expect_close(losses, expected, "losses of steps in a row", atol=0.02, rtol=5e-3)


CHECKS = tuple(
    Check(ask)
    for ask in (
        capabilities,
        create_lora_client,
        forward,
        forward_trains_nothing,
        optim_step,
        gradients_accumulate,
        seeds_of_adapters,
        data_in_chunks,
        requests_keep_their_order,
    )
)
