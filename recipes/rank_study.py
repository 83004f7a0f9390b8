"""Does the best learning rate depend on the rank of the adapter? SFT, DPO and RL over ranks, rates and seeds.

All adapters train on one base model in this process (`processes=0`). For each rank and seed the best rate is the
vertex of a parabola through the best value and its neighbours, over the logarithm of the rate. The answer is the shift
of that optimum from the lowest rank to the highest, seed by seed, with its 95 % interval.

    python -m recipes.rank_study quick=True                          # 135 runs, about ten minutes on two free cores
    python -m recipes.rank_study sweep_dir=ranks                     # 225 runs; the same command goes on
    python -m recipes.rank_study algorithms=sft full=True            # beside full fine-tuning (recipes.full_fine_tuning)
    python -m recipes.rank_study set.model_name=Qwen/Qwen3-0.6B rates=3e-5,1e-4,3e-4,1e-3,3e-3 only_plan=True

The folder gets rows.parquet (every step of every run), runs.parquet (a row per run) and rank_study.md.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import chz

from recipes.study_common import LEAN, LEAN_RL, Section, StudyKeys, cell, finish, measured, run_parts
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.sweeps.points import SEED_KEY, Value, gather_keys
from tinker_cookbook.sweeps.ranking import MODES
from tinker_cookbook.sweeps.study import PART, STEPS_KEY, Part, over_seeds, select
from tinker_cookbook.utils.intervals import Estimate, student_mean
from tinker_cookbook.utils.lazy import np, pandas

RECIPE = "rank_study"
RANK, RATE = "lora_rank", "learning_rate"
FULL_NAME = "full"
VALUE = "value"


class Algorithm(NamedTuple):
    """A recipe, and what of it is compared."""

    recipe: str
    metric: str
    """at the last evaluation; MODES says which end is better"""
    steps: int
    quick_steps: int
    fixed: Mapping[str, Value] = LEAN

    @property
    def sign(self) -> int:
        """1: higher is better; -1: lower is."""
        return 1 if MODES[self.metric] == "max" else -1


ALGORITHMS: Mapping[str, Algorithm] = {
    "sft": Algorithm("recipes.sl_basic", "test/nll", 24, 8),
    "dpo": Algorithm("recipes.preference.train", "test/dpo_loss", 21, 6),
    "rl": Algorithm(
        "recipes.rl_basic", "test/env/all/reward/total", 20, 10, {**LEAN_RL, "groups_per_batch": 8, "num_test": 64}
    ),
}
FULL = Algorithm("recipes.full_fine_tuning", "test/nll", ALGORITHMS["sft"].steps, ALGORITHMS["sft"].quick_steps)
FULL_SHARE = 0.1
"""Rates of full fine-tuning, as a share of those of an adapter ("LoRA without regret": a tenth)."""


class Form(NamedTuple):
    """What is run where the keys do not say."""

    ranks: tuple[int, ...]
    rates: tuple[float, ...]


RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
WHOLE, QUICK = Form((1, 4, 16, 64, 128), RATES), Form((1, 16, 128), RATES)


@chz.chz(typecheck=True)
class CLIConfig(StudyKeys, concurrent=4):
    """Keys of `python -m recipes.rank_study`."""

    algorithms: tuple[str, ...] = chz.field(
        default=tuple(ALGORITHMS),
        doc=f"which to run: {', '.join(f'{name} ({a.recipe})' for name, a in ALGORITHMS.items())}",
    )
    ranks: tuple[int, ...] = chz.field(default=(), doc=f"default: {WHOLE.ranks}, quick {QUICK.ranks}")
    rates: tuple[float, ...] = chz.field(
        default=(), doc=f"learning rates, rising, at least three; default: {RATES}, which suit the tiny models"
    )
    full: bool = chz.field(
        default=False, doc=f"also full fine-tuning on the data of sft, at {FULL_SHARE:g} of the rates and at the rates"
    )

    @chz.validate
    def _check_study(self) -> None:
        if unknown := [name for name in self.algorithms if name not in ALGORITHMS]:
            raise ConfigurationError(f"algorithms={unknown[0]} is unknown; use {', '.join(ALGORITHMS)}")
        if not self.algorithms:
            raise ConfigurationError("algorithms must name at least one")
        rates, ranks = self.chosen().rates, self.chosen().ranks
        if len(rates) < 3 or list(rates) != sorted(set(rates)) or rates[0] <= 0:
            raise ConfigurationError(f"rates={rates}: an optimum needs at least three, positive and rising")
        if list(ranks) != sorted(set(ranks)) or ranks[0] < 1:
            raise ConfigurationError(f"ranks={ranks}: must be positive and rising")
        if self.full and "sft" not in self.algorithms:
            raise ConfigurationError("full=True stands beside sft; add it to algorithms")

    def chosen(self) -> Form:
        """The form, with the keys that are given."""
        form = QUICK if self.quick else WHOLE
        return Form(self.ranks or form.ranks, self.rates or form.rates)


def full_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Those of full fine-tuning: lower by the share, and the given ones."""
    return tuple(sorted({float(f"{share * rate:.6g}") for rate in rates for share in (FULL_SHARE, 1.0)}))


def parts(cli: CLIConfig) -> list[Part]:
    """A part per algorithm."""
    form, found = cli.chosen(), list[Part]()
    chosen = {name: ALGORITHMS[name] for name in cli.algorithms} | ({FULL_NAME: FULL} if cli.full else {})
    for name, algorithm in chosen.items():
        steps = algorithm.quick_steps if cli.quick else algorithm.steps
        axes: dict[str, Sequence[Value]] = {RANK: form.ranks, RATE: form.rates, SEED_KEY: cli.seeds}
        if name == FULL_NAME:
            axes = {RATE: full_rates(form.rates), SEED_KEY: cli.seeds}
        # Evaluations before the first step and after the last one: nothing else is compared.
        fixed = {**algorithm.fixed, STEPS_KEY: steps, "eval_every": steps, **cli.set}
        found.append(Part(name, algorithm.recipe, axes, fixed))
    return found


def measure(rows: "pandas.DataFrame") -> dict[str, float]:
    """The metric of the run's algorithm at the last evaluation, and before training."""
    name = rows[PART].iloc[0]
    metric = (FULL if name == FULL_NAME else ALGORITHMS[name]).metric
    values = rows[metric].dropna()
    return {VALUE: float(values.iloc[-1]), "before": float(values.iloc[0])}


def optimum(rates: Sequence[float], values: Sequence[float], sign: int) -> float:
    """log10 of the best rate: the vertex of the parabola through the best value and its neighbours over log10(rate); at
    an end of the grid, that end.

    Args:
        rates: rising.
        values: one per rate, all finite.
        sign: 1 if higher values are better, -1 if lower ones are.
    """
    x, y = np.log10(np.asarray(rates, dtype=np.float64)), sign * np.asarray(values, dtype=np.float64)
    best = int(y.argmax())
    if best in (0, len(x) - 1):
        return float(x[best])
    curve, slope, _ = np.polyfit(x[best - 1 : best + 2] - x[best], y[best - 1 : best + 2], 2)
    return float(x[best] - slope / (2 * curve)) if curve < 0 else float(x[best])


def optima(runs: "pandas.DataFrame", algorithm: str, sign: int) -> dict[int, dict[int, float]]:
    """rank -> seed -> `optimum`, of seeds with every rate."""
    found: dict[int, dict[int, float]] = {}
    of = runs[(runs[PART] == algorithm) & runs[VALUE].notna()]
    rates = sorted(of[RATE].unique())
    for (rank, seed), some in of.groupby([RANK, SEED_KEY]):
        values = some.set_index(RATE)[VALUE]
        if set(values.index) == set(rates):
            found.setdefault(int(rank), {})[int(seed)] = optimum(rates, [values[rate] for rate in rates], sign)
    return found


def as_rate(log10: Estimate) -> str:
    """An optimum as a learning rate; its interval is geometric."""
    mean, low, high = (10**x for x in (log10.mean, log10.low, log10.high))
    return f"{mean:.1e}" if math.isnan(low) else f"{mean:.1e} [{low:.1e}, {high:.1e}]"


def tables(cli: CLIConfig, runs: "pandas.DataFrame") -> list[Section]:
    """Of each algorithm the metric by rank and rate, with the best rate of each rank."""
    form, found = cli.chosen(), list[Section]()
    for name in cli.algorithms:
        algorithm = ALGORITHMS[name]
        best = optima(runs, name, algorithm.sign)
        rows = [
            [
                str(rank),
                *(cell(over_seeds(runs, {PART: name, RANK: rank, RATE: rate}, VALUE), 3) for rate in form.rates),
                as_rate(student_mean(list(best[rank].values()))) if rank in best else "",
            ]
            for rank in form.ranks
        ]
        end = "higher" if algorithm.sign > 0 else "lower"
        title = f"{name}: {algorithm.metric} by rank and rate ({end} is better), mean [95 % interval]"
        found.append(Section(title, ["rank", *(f"{rate:g}" for rate in form.rates), "best rate"], rows))
    if cli.full:
        rates = full_rates(form.rates)
        row = [cell(over_seeds(runs, {PART: FULL_NAME, RATE: rate}, VALUE), 3) for rate in rates]
        title = f"full fine-tuning on the data of sft: {FULL.metric} by rate, mean [95 % interval]"
        found.append(Section(title, [f"{rate:g}" for rate in rates], [row]))
    return found


def sentences(cli: CLIConfig, runs: "pandas.DataFrame") -> list[str]:
    """What the intervals say of each algorithm."""
    form, said = cli.chosen(), list[str]()
    low, high = form.ranks[0], form.ranks[-1]
    edges = {math.log10(form.rates[0]), math.log10(form.rates[-1])}
    for name in cli.algorithms:
        sign = ALGORITHMS[name].sign
        best = optima(runs, name, sign)
        shared = [seed for seed in best.get(low, {}) if seed in best.get(high, {})]
        if low == high or not shared:
            said.append(f"{name}: nothing to compare; it takes two ranks with a finished run of every rate.")
            continue
        shift = student_mean([best[high][seed] - best[low][seed] for seed in shared])
        if math.isnan(shift.low):
            how = "one seed has no interval"
        elif shift.low > 0 or shift.high < 0:
            how = "the interval leaves out 0: the best rate depends on the rank"
        else:
            how = "the interval holds 0: no dependence is seen, and one of up to its ends is not excluded"
        step = math.log10(form.rates[1] / form.rates[0])
        edge = sum(at in edges for of_rank in best.values() for at in of_rank.values())
        at_edge = f"; {edge} of {sum(map(len, best.values()))} optima lie at the grid's edge" if edge else ""
        said.append(
            f"{name}: from rank {low} to {high} the best rate moves by {cell(shift)} decades (the grid's step is {step:.2f}); "
            f"{how}{at_edge}."
        )
        said.append(f"{name}: {_of_best(cli, runs, name, sign)}")
    return said


def _of_best(cli: CLIConfig, runs: "pandas.DataFrame", name: str, sign: int) -> str:
    """The metric at the best rate of each rank, and by how much the lowest rank is behind the highest."""
    at: dict[int, dict[int, float]] = {}
    for rank in cli.chosen().ranks:
        by_seed = select(runs, {PART: name, RANK: rank}).groupby(SEED_KEY)[VALUE]
        values = by_seed.max() if sign > 0 else by_seed.min()
        at[rank] = {int(seed): float(value) for seed, value in values.items()}
    low, high = cli.chosen().ranks[0], cli.chosen().ranks[-1]
    gaps = [at[low][seed] - at[high][seed] for seed in at[low] if seed in at[high]]
    shown = ", ".join(f"rank {rank} {cell(student_mean(list(of.values())), 3)}" for rank, of in at.items() if of)
    return f"at the best rate of each seed {shown}; rank {low} minus rank {high} {cell(student_mean(gaps), 3)}."


async def main(cli: CLIConfig) -> None:
    study = parts(cli)
    ran = await run_parts(cli, RECIPE, study)
    if ran is None:
        return
    folder, rows = ran
    runs, failed = measured(folder, rows, [RANK, RATE, SEED_KEY], measure)
    steps = ", ".join(f"{part.name} {part.fixed[STEPS_KEY]}" for part in study)
    about = f"{cli.form}: {len(runs)} runs, of so many batches each: {steps}."
    finish(cli, folder, RECIPE, tables(cli, runs), [about, *sentences(cli, runs)], failed)


if __name__ == "__main__":
    run_recipe(CLIConfig, main, prepare=lambda arguments: gather_keys(arguments, "set"))
