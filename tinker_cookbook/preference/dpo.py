"""The settings and the loss of DPO, logprobs of a frozen reference, and an evaluator. The loop is in train_dpo.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeAlias, get_args

import chz

from tinker_cookbook.clients import CustomLossFn, SamplingClient, TrainingClient
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.runs.evaluation import TrainingClientEvaluator, compute_target_logprobs, forward_logprobs
from tinker_cookbook.runs.reference import KLReferenceConfig
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.epochs import EpochConfig, EpochOptions
from tinker_cookbook.utils.lazy import tinker, torch

LossType: TypeAlias = Literal["dpo", "ipo", "dpo_norm"]
LOSS_METRICS = ("dpo_loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
Scalars: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"


@chz.chz(typecheck=True)
class DPOOptions(EpochOptions):
    """Settings of the DPO loop."""

    dpo_beta: float = chz.field(
        default=0.1,
        doc="weight of the log-ratios; a small value allows a policy far from the reference",
        validator=chz.validators.gt(0),  # pyright: ignore[reportUnknownMemberType]
    )
    loss_type: LossType = chz.field(
        default="dpo", doc="dpo, ipo, or dpo_norm (log-ratios per token): see compute_dpo_loss"
    )
    reference: KLReferenceConfig | None = chz.field(
        default=None, doc="reference policy (of the same tokenizer); None: the weights that the run starts from"
    )


@chz.chz(typecheck=True)
class Config(DPOOptions, EpochConfig, learning_rate=1e-5):
    """A DPO run. The batches of its data are pairs, alternately chosen and rejected (DPODatasetBuilderFromComparisons)."""

    reference_model_name: str | None = chz.field(
        default=None, doc="a base model as the reference policy: short for reference.base_model"
    )

    @chz.validate
    def _one_reference(self) -> None:
        if self.reference is not None and self.reference_model_name is not None:
            raise ConfigurationError("reference and reference_model_name are both set; use one of them")

    def named_reference(self) -> KLReferenceConfig | None:
        """The reference policy set in the config."""
        if self.reference_model_name is None:
            return self.reference
        return KLReferenceConfig(base_model=self.reference_model_name)


def compute_dpo_loss(
    chosen_logprobs: Scalars,
    rejected_logprobs: Scalars,
    chosen_ref_logprobs: Scalars,
    rejected_ref_logprobs: Scalars,
    dpo_beta: float,
    loss_type: LossType = "dpo",
    chosen_lengths: Scalars | None = None,
    rejected_lengths: Scalars | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Mean loss over B pairs, and metrics.

    Here beta is dpo_beta, r the log-ratio of a reply, log p(reply) - log p_ref(reply), summed over its tokens, and n
    its number of tokens:

        dpo        -log sigmoid(beta (r_chosen - r_rejected))           Rafailov et al. 2023, eq. 7; TRL: sigmoid
        dpo_norm   -log sigmoid(beta (r_chosen/n - r_rejected/n))       Lambert et al. 2024 (Tulu 3); TRL: sigmoid_norm
        ipo        (r_chosen/n - r_rejected/n - 1/(2 beta))^2           Azar et al. 2023, eq. 17, per token as in TRL

    Args:
        chosen_logprobs: (B,) or B scalars, the sums over reply tokens; the loss is differentiable in these and in
                rejected_logprobs. The reference's logprobs are constants.
        chosen_lengths: (B,) numbers of reply tokens; only used by the two length-normalised losses.

    Returns:
        The scalar loss, and for every loss dpo_loss, accuracy (how often r_chosen > r_rejected), chosen_reward and
        rejected_reward (mean beta r) and margin (their difference).

    Raises:
        ConfigurationError: unknown loss_type, dpo_beta not positive, or lengths missing.
        DataValidationError: no pair, or arguments of different lengths.
    """
    if loss_type not in get_args(LossType):
        raise ConfigurationError(f"loss_type={loss_type!r} is unknown; use {', '.join(get_args(LossType))}")
    if not dpo_beta > 0:
        raise ConfigurationError(f"dpo_beta={dpo_beta}: must be greater than 0")
    parts = [_vector(x) for x in (chosen_logprobs, rejected_logprobs, chosen_ref_logprobs, rejected_ref_logprobs)]
    _check_lengths(parts)
    chosen, rejected = parts[0] - parts[2].detach(), parts[1] - parts[3].detach()
    if loss_type == "dpo":
        losses = _pair_losses(chosen - rejected, dpo_beta, loss_type)
    else:
        if chosen_lengths is None or rejected_lengths is None:
            raise ConfigurationError(f"loss_type={loss_type!r} needs chosen_lengths and rejected_lengths")
        counts = [_vector(chosen_lengths).to(chosen), _vector(rejected_lengths).to(chosen)]
        _check_lengths([chosen, *counts])
        chosen_mean, rejected_mean = chosen / counts[0], rejected / counts[1]
        losses = _pair_losses(chosen_mean - rejected_mean, dpo_beta, loss_type)
    loss = losses.mean()
    rewards = dpo_beta * chosen.detach(), dpo_beta * rejected.detach()
    metrics = {
        "dpo_loss": float(loss.detach()),
        "accuracy": float((rewards[0] > rewards[1]).double().mean()),
        "margin": float((rewards[0] - rewards[1]).mean()),
        "chosen_reward": float(rewards[0].mean()),
        "rejected_reward": float(rewards[1].mean()),
    }
    return loss, metrics


def _pair_losses(difference: torch.Tensor, beta: float, loss_type: LossType) -> torch.Tensor:
    if loss_type == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    return -torch.nn.functional.logsigmoid(beta * difference)


def _vector(values: Scalars) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.stack(list(values)) if values else torch.zeros(0)


def _check_lengths(parts: Sequence[torch.Tensor]) -> None:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1 or next(iter(shapes)) == (0,):
        raise DataValidationError(f"the loss takes one number per pair in each argument, got shapes {sorted(shapes)}")


def check_pairs(data: Sequence[tinker.Datum], where: str, context: int | None = None) -> None:
    """Raise DataValidationError unless the datums are pairs that fit the context, with weights of 0 and 1."""
    if len(data) % 2 or not data:
        raise DataValidationError(f"{where} has {len(data)} datums; DPO takes chosen and rejected alternately")
    for i, datum in enumerate(data):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        if not weights.any() or not ((weights == 0) | (weights == 1)).all():
            raise DataValidationError(
                f"datum {i} of {where}: weights must be 1 on the reply and 0 elsewhere (reduction='none')"
            )
        length = datum.model_input.length + 1
        if context is not None and length > context:
            raise DataValidationError(
                f"datum {i} of {where} has {length} tokens, but the model has a context of {context}; "
                f"set the dataset's max_length to {context} or less"
            )


async def compute_reference_logprobs(reference: SamplingClient, data: Sequence[tinker.Datum]) -> list[torch.Tensor]:
    """`compute_target_logprobs` as tensors: the reference's logprob of every target token, float32 (N,) per datum."""
    return [torch.from_numpy(logprobs) for logprobs in await compute_target_logprobs(data, reference)]  # pyright: ignore[reportUnknownMemberType]


def dpo_loss_fn(reference_logprobs: Sequence[torch.Tensor], beta: float, loss_type: LossType) -> CustomLossFn:
    """The loss for forward_backward_custom on alternating pairs, given the reference's logprobs of the same datums."""

    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        # Weight 0 selects by index, not by multiplication: a logprob there may be -inf.
        kept = [datum.loss_fn_inputs["weights"].to_torch() != 0 for datum in data]
        policy = [lp[mask].double().sum() for lp, mask in zip(logprobs, kept, strict=True)]
        reference = [lp[mask].double().sum() for lp, mask in zip(reference_logprobs, kept, strict=True)]
        lengths = [mask.sum() for mask in kept]
        return compute_dpo_loss(
            policy[::2], policy[1::2], reference[::2], reference[1::2], beta, loss_type, lengths[::2], lengths[1::2]
        )

    return loss_fn


class DPOEvaluator(TrainingClientEvaluator):
    """The loss and its metrics on held-out pairs as <name>/dpo_loss, <name>/accuracy, ..., and <name>/nll over all replies.

    The reference's logprobs are computed at the first evaluation and cached.
    """

    def __init__(
        self,
        batches: Sequence[list[tinker.Datum]],
        reference: SamplingClient,
        beta: float,
        loss_type: LossType,
        name: str = "test",
    ):
        self._batches, self._data = batches, [datum for batch in batches for datum in batch]
        self._reference, self._name = reference, name
        self._loss_fn = partial(dpo_loss_fn, beta=beta, loss_type=loss_type)
        self._reference_logprobs: list[torch.Tensor] | None = None

    async def __call__(self, training_client: TrainingClient) -> dict[str, float]:
        if self._reference_logprobs is None:
            self._reference_logprobs = await compute_reference_logprobs(self._reference, self._data)
        logprobs = [values.to_torch() for values in await forward_logprobs(training_client, self._batches)]
        _, metrics = self._loss_fn(self._reference_logprobs)(self._data, logprobs)
        metrics["nll"] = compute_mean_nll(logprobs, [datum.loss_fn_inputs["weights"] for datum in self._data])
        return {f"{self._name}/{key}": value for key, value in metrics.items()}
