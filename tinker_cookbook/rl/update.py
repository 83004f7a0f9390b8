"""One batch's update: forward and backward passes and optimizer steps, all submitted before any is awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from tinker_cookbook.clients import TrainingClient
from tinker_cookbook.rl.algorithms import custom_loss, loss_datum
from tinker_cookbook.rl.custom_loss import CustomLossFn, sum_over_datums
from tinker_cookbook.runs.finite import OnNonFinite, UpdateGuard
from tinker_cookbook.utils.lazy import tinker, torch
from tinker_cookbook.utils.misc_utils import not_none, split_list

ADAM_BETA1, ADAM_BETA2, ADAM_EPS = 0.9, 0.95, 1e-8

LoopMetrics = dict[str, float | int | str]


class Update:
    """Collects the passes of one batch's update as they are submitted; `finish` waits for all of them.

    The engine runs calls in the order they are made, so a pass can be submitted as soon as its data is there.
    """

    def __init__(
        self,
        training_client: TrainingClient,
        learning_rate: float,
        loss_fn: str | CustomLossFn,
        loss_fn_config: dict[str, float] | None = None,
        grad_clip_norm: float = 0.0,
        on_nonfinite: OnNonFinite = "stop",
    ):
        self._guard = UpdateGuard(on_nonfinite)
        self._client, self._loss_fn, self._loss_fn_config = training_client, loss_fn, loss_fn_config
        self._custom_loss = custom_loss(loss_fn)
        betas = {"beta1": ADAM_BETA1, "beta2": ADAM_BETA2, "eps": ADAM_EPS}
        self._adam = tinker.AdamParams(learning_rate=learning_rate, grad_clip_norm=grad_clip_norm, **betas)
        self._submitted: list[tuple[int | None, Awaitable[Any]]] = []
        """(datums of a pass, or None for a step; what is waited for)"""

    def forward_backward(self, data_D: Sequence[tinker.Datum]) -> None:
        """Submit a pass over some of the datums; without any, nothing."""
        if not data_D:
            return
        if self._custom_loss is not None:
            passes = self._client.forward_backward_custom(list(data_D), sum_over_datums(self._custom_loss))
        else:
            data = [loss_datum(datum, str(self._loss_fn)) for datum in data_D]
            passes = self._client.forward_backward(data, self._loss_fn, self._loss_fn_config)
        self._submitted.append((len(data_D), passes))

    def optim_step(self) -> bool:
        """Submit an optimizer step on what was accumulated since the last one; on nothing, nothing. Whether it did."""
        if not self._submitted or self._submitted[-1][0] is None:
            return False
        self._submitted.append((None, self._client.optim_step(self._adam)))
        return True

    def submit(self, data_D: Sequence[tinker.Datum], num_substeps: int) -> None:
        """One optimizer step per substep, each on its share of the datums; fewer when there are fewer datums."""
        for part in split_list(data_D, min(num_substeps, len(data_D))):
            self.forward_backward(part)
            self.optim_step()

    async def finish(self) -> tuple[list[torch.Tensor | None], LoopMetrics]:
        """Logprobs of all datums in order of submission, float32 (N,) each (None where the pass was not finite and is skipped),
        and the engine's metrics: sums are added up, of the others the last pass and step count."""
        logprobs_D: list[torch.Tensor | None] = []
        found: dict[str, float | int] = {"train/num_substeps": sum(datums is None for datums, _ in self._submitted)}
        for datums, pending in self._submitted:
            if datums is None:
                step = await self._guard.optim_step(pending)
                found |= {f"optim/{key}": value for key, value in ((step and step.metrics) or {}).items()}
                continue
            output = await self._guard.forward_backward(pending)
            if output is None:
                logprobs_D.extend([None] * datums)
                continue
            logprobs_D.extend(outputs["logprobs"].to_torch() for outputs in output.loss_fn_outputs)
            for key, value in output.metrics.items():
                name, _, reduction = key.rpartition(":")
                key = f"train/{name}" if reduction == "mean" else f"train/{name}_{reduction}"
                found[key] = found.get(key, 0.0) + value if reduction == "sum" else value
        return logprobs_D, {**found, **self._guard.metrics()}


async def train_step(
    data_D: list[tinker.Datum],
    training_client: TrainingClient,
    learning_rate: float,
    num_substeps: int,
    loss_fn: str | CustomLossFn,
    loss_fn_config: dict[str, float] | None = None,
    metrics: LoopMetrics | None = None,
    grad_clip_norm: float = 0.0,
) -> list[torch.Tensor]:
    """`Update` in one call: one optimizer step per substep, each on its share of the datums, and fewer for fewer datums.

    Returns:
        The trainer's logprobs of each datum's targets, float32 (N,), in the order of `data_D`; with several substeps those of
        the later ones have seen the earlier ones' updates.
    """
    update = Update(training_client, learning_rate, loss_fn, loss_fn_config, grad_clip_norm)
    update.submit(data_D, num_substeps)
    logprobs_D, found = await update.finish()
    if metrics is not None:
        metrics |= found
    return [not_none(logprobs) for logprobs in logprobs_D]
