"""Possible problems of a run, one sentence each, from its metrics alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

KL_HEALTHY = 1e-3
"""Per token, between sampler and trainer of the same weights; above it something other than rounding differs."""

RECENT = 5
"""Steps that "lately" means."""

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Finding:
    """A possible problem."""

    level: Literal["bad", "look", "fine"]
    what: str
    sentence: str
    keys: tuple[str, ...]
    """the metrics that it is about"""


def findings(columns: Columns) -> list[Finding]:
    """The problems shown by a run's metrics, the worst first. Missing metrics are not judged.

    Args:
        columns: as returned by `report.runs.columns`.
    """
    results = [finding for check in _CHECKS for finding in check(columns)]
    order = {"bad": 0, "look": 1, "fine": 2}
    return sorted(results, key=lambda finding: order[finding.level])


def findings_as_json(columns: Columns) -> list[dict[str, Any]]:
    """`findings` as JSON types."""
    return [asdict(finding) for finding in findings(columns)]


def _kl(columns: Columns) -> Iterator[Finding]:
    depths = {
        int(key.rsplit("/", 1)[1]): key
        for key in columns
        if key.startswith("optim/kl_by_depth/") and _values(columns, key)
    }
    key = "optim/kl_sample_train_v2"
    if not _values(columns, key):
        return
    worst = max(_values(columns, key))
    late = {depth: _mean(_values(columns, name)[-RECENT:]) for depth, name in sorted(depths.items())}
    keys = (key, *(depths[depth] for depth in sorted(depths)))
    if worst <= KL_HEALTHY:
        yield Finding("fine", "sampler and trainer", f"They agree: the KL is {worst:.2g} at most.", keys)
        return
    sentence = f"The KL between sampler and trainer reached {worst:.2g}; {KL_HEALTHY:g} is healthy on the policy's own samples."
    values = list(late.values())
    if len(values) > 1 and values[-1] > 3 * max(values[0], 1e-12):
        sentence += f" It grows with depth ({values[0]:.2g} to {values[-1]:.2g}): look at positions and the cache."
    versions = zip(columns["step"], columns.get("sampling_client/step_min", ()), strict=False)
    if any(isinstance(version, int | float) and step > version for step, version in versions):
        sentence += " Some groups were sampled with older weights, which raises it."
    yield Finding("bad" if worst > 10 * KL_HEALTHY else "look", "sampler and trainer", sentence, keys)


def _ratios(columns: Columns) -> Iterator[Finding]:
    high, low = _values(columns, "optim/ratio_max"), _values(columns, "optim/ratio_min")
    if high and (max(high) > 10 or min(low) < 0.1):
        yield Finding(
            "look",
            "ratios",
            f"Importance ratios went from {min(low):.2g} to {max(high):.2g}. "
            "A loss that clips them (ppo) keeps single tokens from deciding an update.",
            ("optim/ratio_min", "optim/ratio_max"),
        )


def _no_signal(columns: Columns) -> Iterator[Finding]:
    sampled, trained = _sum(columns, "groups/sampled"), _sum(columns, "groups/trained")
    keys = ("groups/trained", "groups/filtered", "env/all/by_group/frac_mixed")
    skipped, steps = _sum(columns, "train/skipped_steps"), len(_values(columns, "train/skipped_steps"))
    if skipped:
        # A run that has learned its questions skips a step now and then.
        yield Finding(
            "bad" if skipped > steps / 5 else "look",
            "steps without training",
            f"{skipped:.0f} of {steps} steps had no advantage other than zero and trained nothing. "
            "Rewards within each group were all the same: use larger groups, other questions or a finer reward.",
            ("train/skipped_steps", *keys),
        )
    if sampled and trained < 0.5 * sampled:
        yield Finding(
            "look",
            "groups without signal",
            f"{trained:.0f} of {sampled:.0f} groups were trained on; in the others all rewards were the same, or they failed.",
            keys,
        )
    elif sampled:
        yield Finding("fine", "groups", f"{trained:.0f} of {sampled:.0f} groups were trained on.", keys)


def _failures(columns: Columns) -> Iterator[Finding]:
    failed, sampled = _sum(columns, "groups/failed"), _sum(columns, "groups/sampled")
    errors = {key.removeprefix("rollout_errors/"): key for key in columns if key.startswith("rollout_errors/")}
    counts = {name: _values(columns, key)[-1] for name, key in errors.items() if _values(columns, key)}
    by_name = ", ".join(
        f"{name} {count:.0f}" for name, count in counts.items() if name not in ("total", "groups_skipped")
    )
    if failed or by_name:
        yield Finding(
            "bad" if sampled and failed > 0.1 * sampled else "look",
            "failures",
            f"{failed:.0f} of {sampled:.0f} groups were given up" + (f"; errors: {by_name}." if by_name else "."),
            ("groups/failed", *errors.values()),
        )


def _cut_off(columns: Columns) -> Iterator[Finding]:
    completed = _values(columns, "env/all/stop/completed")
    stops = tuple(key for key in columns if key.startswith("env/all/stop/"))
    if completed and _mean(completed[-RECENT:]) < 0.9:
        yield Finding(
            "look",
            "stop reasons",
            f"Lately {100 * (1 - _mean(completed[-RECENT:])):.0f} % of the rollouts did not end by themselves. "
            "Replies that are cut off have no stop token to learn from: raise max_tokens, or the turns allowed.",
            stops,
        )


def _entropy(columns: Columns) -> Iterator[Finding]:
    values = _values(columns, "optim/entropy")
    if len(values) > RECENT:
        first, last = _mean(values[:RECENT]), _mean(values[-RECENT:])
        if last < 0.1 * first:
            yield Finding(
                "look",
                "entropy",
                f"The entropy of sampled tokens fell from {first:.2g} to {last:.2g} nats: the policy hardly explores any more. "
                "A lower learning rate, a KL penalty or an earlier checkpoint helps.",
                ("optim/entropy",),
            )


def _clipped(columns: Columns) -> Iterator[Finding]:
    for key in columns:
        if key.rsplit("/", 1)[-1] in ("clip_fraction", "clipped_fraction", "clipfrac", "frac_clipped"):
            values = _values(columns, key)
            if values and _mean(values[-RECENT:]) > 0.2:
                yield Finding(
                    "look",
                    "clipped tokens",
                    f"Lately {100 * _mean(values[-RECENT:]):.0f} % of the tokens were clipped and had no gradient.",
                    (key,),
                )


def _gradients(columns: Columns) -> Iterator[Finding]:
    skipped = [key for key in columns if key.startswith("train/nonfinite")]
    total = sum(_sum(columns, key) for key in skipped)
    if total:
        yield Finding(
            "bad",
            "numbers that are not finite",
            f"{total:.0f} passes or updates were not finite and were skipped.",
            tuple(skipped),
        )
    norms = _values(columns, "optim/grad_norm")
    if len(norms) > RECENT and max(norms[-RECENT:]) > 20 * max(_mean(norms), 1e-12):
        yield Finding(
            "look",
            "gradients",
            f"The gradient norm jumped to {max(norms[-RECENT:]):.2g}; its mean is {_mean(norms):.2g}.",
            ("optim/grad_norm",),
        )


_CHECKS: tuple[Callable[[Columns], Iterator[Finding]], ...] = (
    _kl, _ratios, _no_signal, _failures, _cut_off, _entropy, _clipped, _gradients,
)  # fmt: skip


def _values(columns: Columns, key: str) -> list[float]:
    return [value for value in columns.get(key, ()) if isinstance(value, int | float) and math.isfinite(value)]


def _sum(columns: Columns, key: str) -> float:
    return sum(_values(columns, key))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
