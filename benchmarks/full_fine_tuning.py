"""Full fine-tuning: `recipes.full_fine_tuning` compared with TRL's SFTTrainer, loss by loss.

    python -m benchmarks.full_fine_tuning
    python -m benchmarks.full_fine_tuning rates=1e-4 seeds=0 steps=4

Both start from the same weights and train on the same tokens in the same order, with the same optimizer and schedule. A high
rate amplifies differences in the last bits from step to step; the first loss shows whether both compute the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import numpy as np
import tinker
from transformers import AutoModelForCausalLM

from benchmarks.config import RESULTS
from benchmarks.errors import BenchmarkError
from benchmarks.peers.registry import require
from benchmarks.peers.trl_learning import full_losses_of_trl
from benchmarks.report import Report, Table, finish
from recipes import full_fine_tuning
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.tokenizer_utils import get_tokenizer

OURS, HELD_OUT = "train_mean_nll", "test/nll"


@chz.chz(typecheck=True)
class FullConfig:
    """Keys of `python -m benchmarks.full_fine_tuning`."""

    rates: tuple[float, ...] = chz.field(default=(3e-4, 1e-3, 3e-3, 1e-2), doc="peak learning rates")
    seeds: tuple[int, ...] = chz.field(
        default=(0, 1, 2), doc="seeds of the order of the data; a run for each rate and seed"
    )
    steps: int = chz.field(default=8, doc="batches of each run", validator=chz.validators.gt(0))
    output: str = chz.field(default=RESULTS, doc="folder for the results (JSON and markdown)")


def sequence(datum: tinker.Datum) -> tuple[list[int], list[int]]:
    """A datum's tokens with the last target, and its loss mask. Raises BenchmarkError if the weights are not a mean over the
    masked tokens, which is all that TRL can express.
    """
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    mask = weights > 0
    if not np.allclose(weights, mask / mask.sum()):
        raise BenchmarkError("a sequence has weights that are not a mean over its targets; TRL trains only with a mask")
    tokens = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]
    return tokens, [0, *mask.astype(int).tolist()]


async def ours(config: full_fine_tuning.CLIConfig) -> tuple[list[float], float]:
    """The loss of each step before its update, and the held-out loss at the end; nats per token."""
    with tempfile.TemporaryDirectory() as folder:
        await full_fine_tuning.main(chz.replace(config, log_path=folder, behavior_if_log_dir_exists="delete"))
        rows = read_metrics(Path(folder))
    return [row[OURS] for row in rows if OURS in row], rows[-1][HELD_OUT]


def theirs(config: full_fine_tuning.CLIConfig) -> tuple[list[float], float]:
    """As `ours`, with TRL."""
    data, model_name = full_fine_tuning.read_data(config)
    batches = [[sequence(datum) for datum in data.get_batch(step).data] for step in range(data.steps)]
    if len({len(batch) for batch in batches}) > 1:
        raise BenchmarkError(f"steps={config.max_steps}: the batches differ in size; take fewer")
    tokenizer: Any = get_tokenizer(model_name)
    model: Any = AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")
    losses = full_losses_of_trl(model, tokenizer, config.learning_rate, batches)
    return losses, full_fine_tuning.evaluate(model, data.test, tokenizer)[HELD_OUT]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves at a step, relative to the second. Raises ValueError for different lengths."""
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True))


async def measure(config: FullConfig) -> Report:
    """A row per rate and seed."""
    require("trl")
    report = Report.of_recipes("full_fine_tuning")
    columns = ["learning rate", "seed", "first loss", "apart", "last loss", "apart", "largest of all steps"]
    columns += ["held out: ours", "TRL", "apart"]
    table = Table(f"Losses of {config.steps} steps in nats per token; apart: as a share of TRL's", columns, [])
    report.tables.append(table)
    for rate in config.rates:
        for seed in config.seeds:
            cli = full_fine_tuning.CLIConfig(learning_rate=rate, seed=seed, max_steps=config.steps, save=False)
            (own, own_end), (trl, trl_end) = await ours(cli), theirs(cli)
            row = [f"{rate:g}", str(seed)]
            for at in (slice(0, 1), slice(-1, None)):
                row += [f"{own[at][0]:.4f}", f"{apart(own[at], trl[at]):.1e}"]
            row += [f"{apart(own, trl):.1e}", f"{own_end:.4f}", f"{trl_end:.4f}", f"{apart([own_end], [trl_end]):.1e}"]
            table.rows.append(row)
            report.measurements[f"rate {rate:g}, seed {seed}"] = {
                "ours": own,
                "TRL": trl,
                "held out": [own_end, trl_end],
            }
    return report


async def main(config: FullConfig) -> None:
    finish(await measure(config), config.output)


if __name__ == "__main__":
    run_recipe(FullConfig, main)
