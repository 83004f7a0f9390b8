"""Does a policy learn the truth from a judge who cannot tell it? Debate, consultancy, direct judging and voting compared.

The judge can check one step of an answer. The step is named by the opponent (debate), by the author (consultancy), or
at random (direct); or there is no judge (self_consistency: the most common answer). Every protocol starts from the
same weights, trains on the same items and samples the same number of tokens; none sees the truth, which is only used
for measurement. `truth`, trained on the truth itself, shows the upper bound. Each trained policy answers the same
held-out items; 95 % intervals come from a bootstrap over seeds and items.

    python -m recipes.debate_study                        # three seeds
    python -m recipes.debate_study seeds=0                # what `make demo` runs
    python -m recipes.debate_study log_path=study behavior_if_log_dir_exists=resume seeds=0,1,2,3,4    # more seeds of a study
    python -m recipes.debate_study dataset=facts          # some planted facts occur in no training question
    python -m recipes.debate_study base_models=a,b,c      # folders of base models: intervals over those too
    python -m recipes.debate_study protocols=debate,debate_random_step,debate_unpaid,format    # what a debate owes to its parts
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import chz
from rich.console import Console

from recipes.common import RL_RATES, for_model, open_log_path, tiny_debate
from recipes.debate_results import SHOWN, Measured, Run, columns, label_of, markdown, raw_rows, sentence, table_rows
from recipes.results import PageKey, Seeds
from recipes.rl_common import TaskConfig, algorithm, check_groups
from tinker_cookbook.backends import closing_clients
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.dataset import Oversight
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import StepJudged
from tinker_cookbook.debate.oversight import OVERSIGHT_ADVANTAGE
from tinker_cookbook.debate.protocols import OVERSIGHT
from tinker_cookbook.debate.signals import SIGNALS
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, TrainingError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.report.tables import print_table
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollouts import do_batch_rollout, finished_groups
from tinker_cookbook.runs.checkpoints import get_last_checkpoint, sampler_of
from tinker_cookbook.runs.metadata import changed_keys
from tinker_cookbook.stores.folder import one_writer, open_folder
from tinker_cookbook.stores.training_store import CONFIG_BASE_NAME
from tinker_cookbook.utils.fields import docs
from tinker_cookbook.utils.files import flatten, read_json_object, read_jsonl, to_jsonable, write_json, write_text
from tinker_cookbook.utils.interrupts import interruptible
from tinker_cookbook.utils.processes import processes
from tinker_cookbook.utils.run_logs import label
from tinker_cookbook.utils.secrets import redact
from tinker_cookbook.utils.seeds import derive_seed
from tinker_cookbook.weights_config import WeightsConfig

RECIPE = "debate_study"
RATES = RL_RATES._replace(tiny=2e-3)
RESULTS, ROWS = "study.json", "study.parquet"
QUICK_TOKENS = 12_000
"""Sampled tokens of each run of the quick form."""
TRAINING_FACTOR = 5
"""How much longer a token takes in training than in measuring, roughly: it is also trained on."""
RESTS_ON = (
    "The held-out questions of dataset=trails are new starts of known steps: 99 % of their steps occur in training. "
    "On four base models debate was never behind direct judging, and on one of them level with it (docs/debate.md)."
)
FREE = (
    "seeds",
    "base_models",
    "protocols",
    "processes",
    "page",
    "log_path",
    "name",
    "behavior_if_log_dir_exists",
    "num_groups_to_log",
    "write_records",
)
"""Keys that may change when a study goes on."""

Place = tuple[str, str, int]
"""Base model, protocol and seed of a run."""


@chz.chz(typecheck=True)
class StudyKeys:
    """What is compared."""

    protocols: tuple[str, ...] = chz.field(default=OVERSIGHT, doc=f"which to compare: {', '.join(SIGNALS)}")
    base_models: tuple[str, ...] = chz.field(
        default=(), doc="folders or ids of base models, each studied with every protocol and seed; default: model_name"
    )
    quick: bool = chz.field(
        default=False, doc=f"the first seed alone and {QUICK_TOKENS:,} tokens: some minutes on two idle cores"
    )
    tokens: int = chz.field(default=24_000, doc="sampled tokens of each run", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class CLIConfig(
    StepJudged,
    Seeds,
    PageKey,
    StudyKeys,
    TaskConfig,
    rates=RATES,
    model_name=tiny_debate,
    task="collatz",
    write_records=False,
    num_groups_to_log=0,
    seeds=(0, 1, 2),
    processes=2,
):
    """Keys of `python -m recipes.debate_study`. `seed` is for the measurements, `seeds` are for the runs."""

    DOCS = docs(seeds="a run of each protocol for each of these", processes="runs at a time, each on a core of its own")

    batch_tokens: int | None = chz.field(
        default=2000,
        doc="sampled tokens of each update, so that all protocols make as many updates; None: num_groups questions in each, "
        "and more updates where a rollout takes fewer tokens",
    )
    samples: int = chz.field(default=4, doc="answers to each held-out item; even", validator=chz.validators.gt(0))

    @chz.validate
    def _check_study(self) -> None:
        if unknown := set(self.protocols) - set(SIGNALS):
            raise ConfigurationError(f"protocols={','.join(sorted(unknown))} is unknown; use {', '.join(SIGNALS)}")
        if len({label_of(base) for base in self.base_models}) < len(self.base_models):
            raise ConfigurationError(
                f"base_models={','.join(self.base_models)}: two have one name; their runs need different folders"
            )
        if not self.seeds or not self.protocols:
            raise ConfigurationError("seeds and protocols must name at least one each")
        if self.processes < 1:
            raise ConfigurationError(f"processes={self.processes}: must be greater than 0")
        if self.samples % 2:
            raise ConfigurationError(f"samples={self.samples} is odd, but a debate takes two answers; make it even")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ConfigurationError(f"batch_tokens={self.batch_tokens}: must be at least 1, or None")

    def of_base(self, base: str) -> "CLIConfig":
        """The keys of a base model's runs; "": of `model_name`."""
        return for_model(chz.replace(self, model_name=base) if base else self)

    def settled(self) -> "CLIConfig":
        """With what `quick` means."""
        quick = {"seeds": self.seeds[:1], "tokens": min(self.tokens, QUICK_TOKENS)}
        return chz.replace(self, **quick) if self.quick else self


def group_size(cli: CLIConfig) -> int:
    """Rollouts per question."""
    return check_groups(cli.num_rollouts, cli.num_groups, multiple=2)


def dataset_builder(cli: CLIConfig, protocol: str, seed: int, groups: int, steps: int) -> DatasetBuilder:
    env = oversight(cli, protocol)
    sizes = {"groups_per_batch": groups, "group_size": group_size(cli), "num_batches": steps}
    return cli.fill(DatasetBuilder, env=env, seed=seed, num_test=cli.num_test, **sizes)


def oversight(cli: CLIConfig, protocol: str) -> Oversight:
    return cli.fill(
        Oversight,
        protocol=protocol,
        step_judge=cli.step_judge.with_weights(
            cli.fill(WeightsConfig, base_model=cli.model_name, load_checkpoint_path=None)
        ),
        context_window=model_info.get_context_length(cli.model_name),
    )


def run_config(cli: CLIConfig, folder: Path, protocol: str, seed: int, groups: int, steps: int) -> train.Config:
    """The training run of one protocol and seed."""
    return cli.fill(
        train.Config,
        recipe_name=RECIPE,
        log_path=str(folder / f"{protocol}_seed{seed}"),
        seed=seed,
        dataset_builder=dataset_builder(cli, protocol, seed, groups, steps),
        **algorithm(cli, OVERSIGHT_ADVANTAGE),
        on_zero_advantages="skip",
        evaluator_builders=[],
        eval_every=0,
        save_every=0,
        max_steps=steps,
    )


async def measure(cli: CLIConfig, protocol: str, checkpoint: str | None) -> Measured:
    """Answers to the held-out items under the protocol, from the base model or a checkpoint. All use the same random
    numbers.
    """
    weights = cli.fill(WeightsConfig, base_model=cli.model_name, load_checkpoint_path=checkpoint)
    client = await weights.open("the measured policy")
    env, builder = oversight(cli, protocol), dataset_builder(cli, protocol, cli.seed, 1, 1)
    task, _, test = env.read(builder)
    made = await env.make_protocol(task, builder.renderer(), cli.seed)
    assert cli.max_tokens is not None
    policy = TinkerTokenCompleter(client, cli.max_tokens, cli.temperature, seed=derive_seed(cli.seed, "study"))
    debates = cli.samples // env.num_speakers
    groups = [DebateGroupBuilder(made, item, debates, (0, i), policy) for i, item in enumerate(test[: cli.num_test])]
    played = finished_groups(await do_batch_rollout(groups, policy))
    rows_I = [
        [metrics | group.trajectories_G[i].transitions[0].metrics for i, metrics in enumerate(group.metrics_G)]
        for group in played
    ]
    rollouts = [trajectory for group in played for trajectory in group.trajectories_G]
    return Measured(
        correct_I=[fmean(row["correct"] for row in rows) for rows in rows_I],
        accepted_I=[_mean(rows, "debate/accepted") for rows in rows_I],
        judge_right_I=[_mean(rows, "debate/judge_accuracy") for rows in rows_I],
        pairs_I=[row["debate/pair_accuracy"] for rows in rows_I for row in rows if "debate/pair_accuracy" in row],
        tokens_per_rollout=fmean(trajectory.num_action_tokens for trajectory in rollouts),
        items_I=[item.id for item in test[: cli.num_test]],
        parts_I=[item.part for item in test[: cli.num_test]],
    )


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    """The mean over answers with a verdict; 0 without any."""
    values = [row[key] for row in rows if key in row]
    return fmean(values) if values else 0.0


async def run_one(cli: CLIConfig, folder: Path, base: str, protocol: str, seed: int, before: Measured) -> Run:
    """Train for as many whole updates as the tokens allow, estimated from the rollout length before training; then
    measure.
    """
    per_question = before.tokens_per_rollout * group_size(cli)
    groups = cli.num_groups if cli.batch_tokens is None else max(1, round(cli.batch_tokens / per_question))
    steps = max(1, round(cli.tokens / (per_question * groups)))
    config = run_config(cli, folder / label_of(base), protocol, seed, groups, steps)
    started, computing = time.perf_counter(), time.process_time()
    await train.main(config)
    record = get_last_checkpoint(config.log_path, "sampler_path")
    if record is None:
        raise CheckpointError(f"{config.log_path} holds no checkpoint to measure; delete the folder and start over")
    after = await measure(cli, protocol, record.sampler_path)
    rows = read_jsonl(Path(config.log_path) / "metrics.jsonl")
    sampled, read = (sum(int(row.get(f"env/all/total_{of}_tokens", 0)) for row in rows) for of in ("ac", "ob"))
    checks = sum(
        row.get("env/all/debate/judge_checks", 0.0) * row["env/all/total_episodes"] for row in rows if _played(row)
    )
    seconds, computed = time.perf_counter() - started, time.process_time() - computing
    return Run(protocol, seed, steps, sampled, seconds, before, after, base, read, round(checks), computed)


def _played(row: Mapping[str, Any]) -> bool:
    return "env/all/total_episodes" in row


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """study.json with every number, study.parquet with a row for each run and item, study.md with the table."""
    write_json(folder / RESULTS, {"runs": [asdict(run) for run in runs]})
    raw_rows(runs).to_parquet(folder / ROWS, index=False)
    write_text(folder / "study.md", f"{markdown(runs)}\n")


def earlier_runs(folder: Path, cli: CLIConfig) -> dict[Place, Run]:
    """The results of a resumed study so far, by base model, protocol and seed; its config is stored for the next time.

    Raises ConfigurationError if its settings differ, because the runs would not be comparable.
    """
    place, config = folder / CONFIG_BASE_NAME, redact(to_jsonable(cli))
    if not place.exists():
        write_json(place, config)
        return {}
    before = read_json_object(place, "set behavior_if_log_dir_exists=delete to start over")
    changed = changed_keys(_as_now(before), flatten(config))
    others = [
        f"{key}={now!r}, was {then!r}" for key, (then, now) in changed.items() if key.partition(".")[0] not in FREE
    ]
    if others:
        raise ConfigurationError(
            f"log_path={str(folder)!r} holds a study with other settings ({'; '.join(others)}); give another log_path, or set "
            "behavior_if_log_dir_exists=delete to start over"
        )
    results = folder / RESULTS
    saved = read_json_object(results, "remove the file to measure again")["runs"] if results.exists() else []
    runs = [Run(**{**run, "before": Measured(**run["before"]), "after": Measured(**run["after"])}) for run in saved]
    return {(run.base, run.protocol, run.seed): run for run in runs}


def _as_now(config: dict[str, Any]) -> dict[str, Any]:
    """The flat keys of a study's config, which older code may have written: missing keys get their defaults."""
    keys = {**flatten(redact(to_jsonable(CLIConfig()))), **flatten(config)}
    keys["num_test"] = keys.pop("max_eval_items", keys["num_test"])
    if keys["step_judge.name"] == "scripted":
        keys["step_judge.name"] = "key"
    return keys


async def study(cli: CLIConfig) -> list[Run]:
    """Run every protocol with every base model and seed, after a line that says how many and how long; results are written after
    each run, and a resumed study keeps them.
    """
    cli = cli.settled()
    bases = {base: cli.of_base(base) for base in cli.base_models or ("",)}
    folder = open_folder(open_log_path(cli.of_base(""), RECIPE, RECIPE, str(cli.task)), "log_path")
    with one_writer(folder, "log_path"):
        earlier = earlier_runs(folder, cli.of_base(""))
        before = {(run.base, run.protocol): run.before for run in earlier.values()}
        asked = [(base, protocol, seed) for base in bases for seed in cli.seeds for protocol in cli.protocols]
        finished, order = dict(earlier), dict.fromkeys([*asked, *earlier])
        started, measured = time.perf_counter(), 0.0
        for base, protocol in dict.fromkeys((base, protocol) for base, protocol, _ in asked):
            if (base, protocol) not in before:
                found = await measure(bases[base], protocol, sampler_of(cli.load_checkpoint_path))
                before[base, protocol] = found
                measured += found.tokens_per_rollout * len(found.correct_I) * cli.samples
        per_token = (time.perf_counter() - started) / measured * TRAINING_FACTOR if measured else None
        print(announced(cli, asked, earlier, per_token), flush=True)
        # Processes, not threads: an engine computes on one core, and each run gets its own.
        with processes(cli.processes) as start:

            async def finish(one: Place) -> None:
                base, protocol, _ = one
                finished[one] = run = await start(_run_process, bases[base], folder, *one, before[base, protocol])
                write_results(folder, [finished[other] for other in order if other in finished])
                print(told(run), flush=True)

            async with asyncio.TaskGroup() as group:
                for one in asked:
                    if one not in earlier:
                        group.create_task(finish(one))
    return [finished[one] for one in asked]


def announced(cli: CLIConfig, asked: Sequence[Place], earlier: Mapping[Place, Run], per_token: float | None) -> str:
    """A line about what is to run, and how long it takes by the runs that are finished, else by the measurements: seconds for a
    sampled token, if anything was measured."""
    left = [one for one in asked if one not in earlier]
    seconds = fmean(run.seconds for run in earlier.values()) if earlier else cli.tokens * (per_token or 0.0)
    hours = seconds * len(left) / cli.processes / 3600
    by = "those that are finished" if earlier else "the measurements before training"
    return f"{len(asked)} runs, {len(left)} to go; about {hours:.2f} hours, by {by}"


def told(run: Run) -> str:
    """A line for the terminal."""
    before, after = fmean(run.before.correct_I), fmean(run.after.correct_I)
    base = f"{label_of(run.base)}, " if run.base else ""
    return (
        f"{base}{run.protocol}, seed {run.seed}: {run.steps} steps, {run.tokens} tokens, {run.seconds:.0f} s; right "
        f"{before:.3f} -> {after:.3f}"
    )


def _run_process(cli: CLIConfig, folder: Path, base: str, protocol: str, seed: int, before: Measured) -> Run:
    """`run_one`, in a separate process."""
    with interruptible() as interrupts:
        try:
            with closing_clients(), label(f"{protocol}, seed {seed}"):
                return interrupts.run(run_one(cli, folder, base, protocol, seed, before))
        except KeyboardInterrupt:
            raise TrainingError(f"{protocol}, seed {seed}: interrupted; what it did is saved") from None


def show(runs: Sequence[Run], rests_on: str = RESTS_ON) -> None:
    """Print the columns that fit the terminal, the sentence, and its basis."""
    named = columns(runs)
    shown = [i for i, column in enumerate(named) if column in SHOWN or column.startswith("right, ")]
    rows = [[row[i] for i in shown] for row in table_rows(runs)]
    print_table("Held-out items, mean [95 % interval]", [named[i] for i in shown], rows)
    Console(soft_wrap=True).print(f"{sentence(runs)}\n{rests_on}".rstrip())


async def main(cli: CLIConfig) -> None:
    runs = await study(cli)
    cli.write_page(markdown(runs))
    show(runs, RESTS_ON if cli.task == "collatz" else "")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
