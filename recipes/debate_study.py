"""Does a policy learn the truth from a judge who cannot tell it? Debate, consultancy, direct judging and voting compared.

The judge can check one step of an answer. The step is named by the opponent (debate), by the author (consultancy), or
at random (direct); or there is no judge (self_consistency: the most common answer). Every protocol starts from the
same weights, trains on the same items and samples the same number of tokens; none sees the truth, which is only used
for measurement. `truth`, trained on the truth itself, shows the upper bound. Each trained policy answers the same
held-out items; 95 % intervals come from a bootstrap over seeds and items.

    python -m recipes.debate_study                        # three seeds
    python -m recipes.debate_study seeds=0                # what `make demo` runs
    python -m recipes.debate_study log_path=study behavior_if_log_dir_exists=resume seeds=0,1,2,3,4    # more seeds of a study
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import chz
from rich.console import Console

from recipes.common import RL_RATES, for_model, open_log_path, tiny_debate
from recipes.results import Seeds
from recipes.rl_common import TaskConfig, algorithm, check_groups
from tinker_cookbook.backends import closing_clients
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.dataset import Oversight
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import StepJudged
from tinker_cookbook.debate.oversight import OVERSIGHT_ADVANTAGE
from tinker_cookbook.debate.protocols import OVERSIGHT
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError, TrainingError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.report.tables import markdown_table, print_table
from tinker_cookbook.rl import train
from tinker_cookbook.rl.rollouts import do_batch_rollout, finished_groups
from tinker_cookbook.runs.checkpoints import get_last_checkpoint, sampler_of
from tinker_cookbook.runs.metadata import changed_keys
from tinker_cookbook.stores.folder import one_writer, open_folder
from tinker_cookbook.stores.training_store import CONFIG_BASE_NAME
from tinker_cookbook.utils.fields import docs
from tinker_cookbook.utils.files import flatten, read_json_object, read_jsonl, to_jsonable, write_json, write_text
from tinker_cookbook.utils.interrupts import interruptible
from tinker_cookbook.utils.intervals import Estimate, bootstrap_mean
from tinker_cookbook.utils.processes import processes
from tinker_cookbook.utils.run_logs import label
from tinker_cookbook.utils.secrets import redact
from tinker_cookbook.utils.seeds import derive_seed
from tinker_cookbook.weights_config import WeightsConfig

RECIPE = "debate_study"
RATES = RL_RATES._replace(tiny=2e-3)
BEGIN, END = "<!-- study -->", "<!-- end of study -->"
BEFORE = "before"
RESULTS = "study.json"
RESTS_ON = (
    "The held-out questions of the shipped data are new starts of known steps: 99 % of their steps occur in training. "
    "On four base models debate was never behind direct judging, and on one of them level with it (docs/debate.md)."
)
FREE = (
    "seeds",
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


@chz.chz(typecheck=True)
class StudyKeys:
    """What is compared."""

    protocols: tuple[str, ...] = chz.field(default=OVERSIGHT, doc=f"which to compare: {', '.join(OVERSIGHT)}")
    tokens: int = chz.field(default=24_000, doc="sampled tokens of each run", validator=chz.validators.gt(0))


@chz.chz(typecheck=True)
class CLIConfig(
    StepJudged,
    Seeds,
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
    page: str | None = chz.field(
        default=None, doc=f"Markdown page with the lines {BEGIN} and {END}, which gets the table"
    )

    @chz.validate
    def _check_study(self) -> None:
        if unknown := set(self.protocols) - set(OVERSIGHT):
            raise ConfigurationError(f"protocols={','.join(sorted(unknown))} is unknown; use {', '.join(OVERSIGHT)}")
        if not self.seeds or not self.protocols:
            raise ConfigurationError("seeds and protocols must name at least one each")
        if self.processes < 1:
            raise ConfigurationError(f"processes={self.processes}: must be greater than 0")
        if self.samples % 2:
            raise ConfigurationError(f"samples={self.samples} is odd, but a debate takes two answers; make it even")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ConfigurationError(f"batch_tokens={self.batch_tokens}: must be at least 1, or None")
        if self.page is not None:
            fill_page(self.page, "")


@dataclass(frozen=True)
class Measured:
    """A policy on the held-out items, under one protocol. Lists are per item."""

    correct_I: list[float]
    """share of its answers that are right"""
    accepted_I: list[float]
    """share that the judge accepts"""
    judge_right_I: list[float]
    """share on which judge and truth agree"""
    pairs_I: list[float]
    """of pairs of a right and a wrong answer, where the judge prefers the right one; items that have such pairs"""
    tokens_per_rollout: float


@dataclass(frozen=True)
class Run:
    """One protocol, one seed."""

    protocol: str
    seed: int
    steps: int
    tokens: int
    """sampled in training"""
    seconds: float
    before: Measured
    after: Measured


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
    )


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    """The mean over answers with a verdict; 0 without any."""
    values = [row[key] for row in rows if key in row]
    return fmean(values) if values else 0.0


async def run_one(cli: CLIConfig, folder: Path, protocol: str, seed: int, before: Measured) -> Run:
    """Train for as many whole updates as the tokens allow, estimated from the rollout length before training; then
    measure.
    """
    per_question = before.tokens_per_rollout * group_size(cli)
    groups = cli.num_groups if cli.batch_tokens is None else max(1, round(cli.batch_tokens / per_question))
    steps = max(1, round(cli.tokens / (per_question * groups)))
    config = run_config(cli, folder, protocol, seed, groups, steps)
    started = time.perf_counter()
    await train.main(config)
    record = get_last_checkpoint(config.log_path, "sampler_path")
    if record is None:
        raise CheckpointError(f"{config.log_path} holds no checkpoint to measure; delete the folder and start over")
    after = await measure(cli, protocol, record.sampler_path)
    rows = read_jsonl(Path(config.log_path) / "metrics.jsonl")
    tokens = sum(int(row.get("env/all/total_ac_tokens", 0)) for row in rows)
    return Run(protocol, seed, steps, tokens, time.perf_counter() - started, before, after)


def estimate(runs: Sequence[Run], values: str) -> Estimate:
    return bootstrap_mean([getattr(run.after, values) for run in runs])


def gap(runs: Sequence[Run]) -> Estimate:
    """How much more of the trained policy's answers the judge accepts than are right."""
    return bootstrap_mean(
        [[a - c for a, c in zip(run.after.accepted_I, run.after.correct_I, strict=True)] for run in runs]
    )


def lead(runs: Sequence[Run], others: Sequence[Run]) -> Estimate:
    """Accuracy of one protocol's policies minus another's, on the same items, over the seeds that both have."""
    other = {run.seed: run.after.correct_I for run in others}
    both = [run for run in runs if run.seed in other]
    return bootstrap_mean([[a - b for a, b in zip(run.after.correct_I, other[run.seed], strict=True)] for run in both])


COLUMNS = (
    "signal",
    "steps",
    "tokens",
    "judge right, before",
    "prefers the right one",
    "policy right",
    "debate minus this",
    "hacking gap",
)


SHOWN = ("signal", "prefers the right one", "policy right", "debate minus this", "hacking gap")


def table_rows(runs: Sequence[Run]) -> list[list[str]]:
    by_protocol: dict[str, list[Run]] = {}
    for run in runs:
        by_protocol.setdefault(run.protocol, []).append(run)
    first = runs[0].before
    rows = [[BEFORE, "0", "0", "", "", str(bootstrap_mean([first.correct_I])), "", ""]]
    for protocol, protocol_runs in by_protocol.items():
        pairs = protocol_runs[0].before.pairs_I
        debate = by_protocol.get("debate")
        rows.append(
            [
                protocol,
                str(protocol_runs[0].steps),
                f"{fmean(run.tokens for run in protocol_runs):.0f}",
                str(bootstrap_mean([protocol_runs[0].before.judge_right_I])),
                str(bootstrap_mean([pairs])) if pairs else "",
                str(estimate(protocol_runs, "correct_I")),
                str(lead(debate, protocol_runs)) if debate and protocol != "debate" else "",
                str(gap(protocol_runs)),
            ]
        )
    return rows


def sentence(runs: Sequence[Run]) -> str:
    """The result in one sentence."""
    debates = [run for run in runs if run.protocol == "debate"]
    rivals = {
        name: [run for run in runs if run.protocol == name] for name in OVERSIGHT if name not in ("debate", "truth")
    }
    rivals = {name: runs_of for name, runs_of in rivals.items() if runs_of}
    if not debates or not rivals:
        return "Nothing to compare: the sentence needs debate and another protocol without the truth."
    best = max(rivals, key=lambda name: estimate(rivals[name], "correct_I").mean)
    difference, accuracy = lead(debates, rivals[best]), estimate(debates, "correct_I")
    how = "beats" if difference.low > 0 else "loses to" if difference.high < 0 else "cannot be told apart from"
    tokens, seeds = fmean(run.tokens for run in debates), f"{len(debates)} seed{'s' if len(debates) > 1 else ''}"
    over = "seeds and " if len(debates) > 1 else ""
    return (
        f"On this one base model, at about {tokens:.0f} sampled tokens and {seeds}, the policy trained by debate is right on "
        f"{accuracy} of the held-out answers and {how} the best other signal without the truth, {best} "
        f"({estimate(rivals[best], 'correct_I')}): difference {difference}, over {over}questions, not over base models."
    )


def markdown(runs: Sequence[Run]) -> str:
    """The table and the sentence."""
    return "\n".join([markdown_table(COLUMNS, table_rows(runs)), "", sentence(runs)])


def fill_page(path: str, section: str) -> str:
    """Insert this section into the page. Raises ConfigurationError if the page lacks the marker lines."""
    page = Path(path).expanduser()
    text = page.read_text() if page.is_file() else ""
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ConfigurationError(f"page={path!r} must be a file with the lines {BEGIN} and {END}, in this order")
    return f"{before}{begin}\n{section}\n\n{end}{after}"


def write_results(folder: Path, runs: Sequence[Run]) -> None:
    """study.json with every number, study.md with the table."""
    write_json(folder / RESULTS, {"runs": [asdict(run) for run in runs]})
    write_text(folder / "study.md", f"{markdown(runs)}\n")


def earlier_runs(folder: Path, cli: CLIConfig) -> dict[tuple[str, int], Run]:
    """The results of a resumed study so far, by protocol and seed; its config is stored for the next time.

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
    return {(run.protocol, run.seed): run for run in runs}


def _as_now(config: dict[str, Any]) -> dict[str, Any]:
    """The flat keys of a study's config, which older code may have written: missing keys get their defaults."""
    keys = {**flatten(redact(to_jsonable(CLIConfig()))), **flatten(config)}
    keys["num_test"] = keys.pop("max_eval_items", keys["num_test"])
    if keys["step_judge.name"] == "scripted":
        keys["step_judge.name"] = "key"
    return keys


async def study(cli: CLIConfig) -> list[Run]:
    """Run every protocol with every seed; results are written after each run, and a resumed study keeps them."""
    cli = for_model(cli)
    folder = open_folder(open_log_path(cli, RECIPE, RECIPE, str(cli.task)), "log_path")
    with one_writer(folder, "log_path"):
        earlier = earlier_runs(folder, cli)
        known = {run.protocol: run.before for run in earlier.values()}
        before = {
            protocol: known.get(protocol) or await measure(cli, protocol, sampler_of(cli.load_checkpoint_path))
            for protocol in cli.protocols
        }
        asked = [(protocol, seed) for seed in cli.seeds for protocol in cli.protocols]
        finished, order = dict(earlier), dict.fromkeys([*asked, *earlier])
        # Processes, not threads: an engine computes on one core, and each run gets its own.
        with processes(cli.processes) as start:

            async def finish(one: tuple[str, int]) -> None:
                finished[one] = run = await start(_run_process, cli, folder, *one, before[one[0]])
                write_results(folder, [finished[other] for other in order if other in finished])
                print(told(run), flush=True)

            async with asyncio.TaskGroup() as group:
                for one in asked:
                    if one not in earlier:
                        group.create_task(finish(one))
    return [finished[one] for one in asked]


def told(run: Run) -> str:
    """A line for the terminal."""
    before, after = fmean(run.before.correct_I), fmean(run.after.correct_I)
    return (
        f"{run.protocol}, seed {run.seed}: {run.steps} steps, {run.tokens} tokens, {run.seconds:.0f} s; right "
        f"{before:.3f} -> {after:.3f}"
    )


def _run_process(cli: CLIConfig, folder: Path, protocol: str, seed: int, before: Measured) -> Run:
    """`run_one`, in a separate process."""
    with interruptible() as interrupts:
        try:
            with closing_clients(), label(f"{protocol}, seed {seed}"):
                return interrupts.run(run_one(cli, folder, protocol, seed, before))
        except KeyboardInterrupt:
            raise TrainingError(f"{protocol}, seed {seed}: interrupted; what it did is saved") from None


def show(runs: Sequence[Run], rests_on: str = RESTS_ON) -> None:
    """Print the columns that fit the terminal, the sentence, and its basis."""
    shown = [COLUMNS.index(column) for column in SHOWN]
    rows = [[row[i] for i in shown] for row in table_rows(runs)]
    print_table("Held-out items, mean [95 % interval]", SHOWN, rows)
    Console(soft_wrap=True).print(f"{sentence(runs)}\n{rests_on}".rstrip())


async def main(cli: CLIConfig) -> None:
    runs = await study(cli)
    if cli.page is not None:
        write_text(Path(cli.page).expanduser(), fill_page(cli.page, markdown(runs)))
    show(runs, RESTS_ON if cli.task == "collatz" else "")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
