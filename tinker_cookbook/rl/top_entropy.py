"""Training only on the tokens of highest entropy, the forks of a reply, where the policy decides what follows.

"Beyond the 80/20 Rule" (arXiv 2506.01939). The entropy is that of the trainer's whole distribution before the
update, which takes a forward pass; the threshold is a quantile over the sampled tokens of the batch, so no split of it matters.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_cookbook.rl.data_processing import replace_inputs
from tinker_cookbook.utils.lazy import np, tinker


def top_entropy_masks(
    entropies_D: Sequence[np.ndarray], masks_D: Sequence[np.ndarray], share: float
) -> tuple[list[np.ndarray], float]:
    """Which sampled tokens have an entropy of at least the (1 - share) quantile of all sampled tokens.

    Args:
        entropies_D: nats, (N,) per datum.
        masks_D: > 0 where the policy sampled the token, (N,) per datum.
        share: fraction of the sampled tokens, above 0 and at most 1; all ties are kept.

    Returns:
        bool (N,) per datum, and the threshold in nats (0 without sampled tokens).
    """
    sampled_D = [mask > 0 for mask in masks_D]
    values = [entropy[sampled] for entropy, sampled in zip(entropies_D, sampled_D, strict=True)]
    every = np.concatenate([*values, np.zeros(0)]).astype(np.float32)
    threshold = float(np.quantile(every, 1 - share)) if len(every) else 0.0
    kept_D = [
        sampled & (entropy.astype(np.float32) >= np.float32(threshold))
        for entropy, sampled in zip(entropies_D, sampled_D, strict=True)
    ]
    return kept_D, threshold


def keep_top_entropy(
    data_D: Sequence[tinker.Datum], entropies_D: Sequence[np.ndarray], share: float
) -> tuple[list[tinker.Datum], dict[str, float]]:
    """The datums with advantage 0 at the other sampled tokens.

    Metrics: `top_entropy/threshold` in nats, `top_entropy/mean`, the mean over all sampled tokens, and `top_entropy/share`, the
    share of them that is kept.
    """
    masks_D = [datum.loss_fn_inputs["mask"].to_numpy() for datum in data_D]
    kept_D, threshold = top_entropy_masks(entropies_D, masks_D, share)
    changed = [
        replace_inputs(datum, advantages=datum.loss_fn_inputs["advantages"].to_numpy() * kept)
        for datum, kept in zip(data_D, kept_D, strict=True)
    ]
    sampled = sum(int((mask > 0).sum()) for mask in masks_D)
    total = sum(float(entropy[mask > 0].sum()) for entropy, mask in zip(entropies_D, masks_D, strict=True))
    return changed, {
        "top_entropy/threshold": threshold,
        "top_entropy/mean": total / max(1, sampled),
        "top_entropy/share": sum(int(kept.sum()) for kept in kept_D) / max(1, sampled),
    }
