"""Known tasks in miniature, compared with TRL: the runs of `recipes.anchor_study`, with its recipes and with TRL's GRPOTrainer.

    python -m benchmarks.known_tasks quick=True sweep_dir=anchors
    python -m benchmarks.known_tasks tasks=reverse_text seeds=0 quick=True sweep_dir=anchors set.max_steps=4

TRL replaces no groups, so `arithmetic_99` is not among the tasks.

The study runs first, unless it is finished. Then the recipe and TRL start from the same weights: those after the study's
supervised stage, with a new adapter on all linears but the unembedding, where TRL has none. Both train on the same groups in
the same order, with the same rewards, group size, rate, rank and reply length. Only the samples and the implementation differ.
The same command resumes an interrupted run.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import torch
from transformers import AutoModelForCausalLM

from benchmarks.config import RESULTS
from benchmarks.peers.registry import require
from benchmarks.peers.trl_episodes import Settings, generating, held_out, train_with_trl
from benchmarks.report import Report, Table, finish
from recipes import anchor_study
from recipes.anchors import EPISODES
from recipes.common import for_model
from recipes.rl_common import dataset_of
from recipes.study_common import cell
from tinker_cookbook import backends, weights
from tinker_cookbook.cli_utils import parse, run_recipe
from tinker_cookbook.env import multi_turn_env
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.runs.checkpoints import last_sampler_path
from tinker_cookbook.runs.ml_log import read_metrics
from tinker_cookbook.sweeps.points import SEED_KEY, gather_keys
from tinker_cookbook.sweeps.study import PART, Part, difference, over_seeds
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.files import write_text
from tinker_cookbook.utils.lazy import pandas

MEASURES = ("before", "after", "rise", "right_before", "right_after")
"""Measures of `anchor_study.measure`, and of TRL's runs."""
TRAINER, TRAINERS = "trainer", ("this library", "TRL")


PLAYED = tuple(name for name, task in anchor_study.TASKS.items() if "replace_constant_groups" not in task.keys)


@chz.chz(typecheck=True)
class KnownTasksConfig(anchor_study.CLIConfig, tasks=PLAYED):
    """Keys of `python -m benchmarks.known_tasks`: those of the study, and the output folder."""

    output: str = chz.field(default=RESULTS, doc="folder for the results (JSON and markdown)")

    @chz.validate
    def _check_played(self) -> None:
        if beyond := [name for name in self.tasks if name not in PLAYED]:
            raise ConfigurationError(f"tasks={beyond[0]}: TRL cannot train it; use {', '.join(PLAYED)}")


async def starting(cli: Any, run_folder: Path, folder: Path) -> Any:
    """The keys of a run that starts from the state before the reinforcement learning of a study's run, with a new adapter.

    After a supervised stage this is the model with the adapter merged in, written to `folder`. As in TRL, the unembedding gets no
    adapter.
    """
    service: Any = backends.create_service_client(cli.backend, cli.base_url)
    if (run_folder / "warm_up").exists():
        path = last_sampler_path(str(run_folder / "warm_up"))
        merged = await weights.export(service, path, folder, "merged", dtype="float32", overwrite=True)
        cli = chz.replace(cli, model_name=str(merged.folder), warm_up_steps=0)
    client = await service.create_lora_training_client(
        cli.model_name, rank=cli.lora_rank, seed=cli.seed, train_unembed=False
    )
    return chz.replace(cli, load_checkpoint_path=(await client.save_state("start")).path)


async def with_ours(cli: Any, part: Part, folder: Path) -> dict[str, float]:
    """Train with the recipe. Returns the measures of the study."""
    await part.loaded().main(chz.replace(cli, log_path=str(folder), behavior_if_log_dir_exists="delete"))
    return anchor_study.measure(pandas.DataFrame(read_metrics(folder)))


async def with_trl(cli: Any) -> dict[str, float]:
    """Train the same with TRL. Returns the same measures, except that there is only one evaluation before and one after."""
    env = multi_turn_env(EPISODES[cli.anchor]) if hasattr(cli, "anchor") else cli.env
    training, tested = await dataset_of(cli, env)()
    assert tested is not None
    peft: Any = importlib.import_module("peft")
    tokenizer: Any = get_tokenizer(cli.model_name)
    torch.manual_seed(cli.seed)
    base: Any = AutoModelForCausalLM.from_pretrained(cli.model_name, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        service = backends.create_service_client(cli.backend, cli.base_url)
        exported = await weights.export(service, cli.load_checkpoint_path, Path(folder) / "start")
        model = peft.PeftModel.from_pretrained(base, str(exported.folder), is_trainable=True)
    settings = Settings(cli.groups_per_batch, cli.group_size, cli.learning_rate, cli.max_tokens, cli.seed)
    generate = generating(model, tokenizer.pad_token_id, settings.max_tokens)
    before = await held_out(_batches(tested), generate)
    # The trainer runs its episodes in another event loop.
    await asyncio.to_thread(train_with_trl, model, tokenizer, _batches(training), settings)
    after = await held_out(_batches(tested), generate)
    ends = {"before": before["reward"], "after": after["reward"], "rise": after["reward"] - before["reward"]}
    return ends | {"right_before": before["correct"], "right_after": after["correct"]}


def _batches(dataset: RLDataset) -> list[Sequence[EnvGroupBuilder]]:
    return [dataset.get_batch(index) for index in range(len(dataset))]


async def train_all(config: KnownTasksConfig, study: Path) -> pandas.DataFrame:
    """A row per task, seed and trainer; finished runs are loaded."""
    rows: list[dict[str, Any]] = []
    for part in anchor_study.parts(config):
        for run in part.planned():
            folder = study / "beside_trl" / part.name / run.name
            if not (folder / "result.json").exists():
                cli: Any = for_model(parse(part.loaded().config_cls, run.arguments))
                cli = await starting(cli, study / part.name / run.name, folder / "model")
                results = [await with_ours(cli, part, folder / "ours"), await with_trl(cli)]
                write_text(folder / "result.json", json.dumps(dict(zip(TRAINERS, results, strict=True))) + "\n")
            for trainer, measured in json.loads((folder / "result.json").read_text()).items():
                rows.append({PART: part.name, SEED_KEY: run.point[SEED_KEY], TRAINER: trainer, **measured})
                print(rows[-1], flush=True)
    return pandas.DataFrame(rows)


def table(config: KnownTasksConfig, runs: pandas.DataFrame) -> Table:
    """A row per task and trainer, and one for the difference of the two, seed by seed."""
    columns = ["task", "trainer", "held-out reward before RL", "after", "change", "right before", "after"]
    rows: list[list[str]] = []
    for name in config.tasks:
        ours, trl = ({PART: name, TRAINER: trainer} for trainer in TRAINERS)
        for setting in (ours, trl):
            rows.append([name, setting[TRAINER], *(cell(over_seeds(runs, setting, key)) for key in MEASURES)])
        rows.append([name, "difference", *(cell(difference(runs, ours, trl, key)) for key in MEASURES)])
    title = f"{config.form}: mean over seeds [95 % interval]; difference: this library minus TRL, seed by seed"
    return Table(title, columns, rows)


async def main(config: KnownTasksConfig) -> None:
    require("trl")
    folder = config.folder(anchor_study.RECIPE)
    config = chz.replace(config, sweep_dir=str(folder))
    await anchor_study.main(config)
    if config.only_plan:
        return
    runs = await train_all(config, folder)
    report = Report.of_recipes("known_tasks")
    report.tables.append(table(config, runs))
    report.measurements["runs"] = runs[[PART, TRAINER, SEED_KEY, *MEASURES]].to_dict("records")
    finish(report, config.output)


if __name__ == "__main__":
    run_recipe(KnownTasksConfig, main, prepare=lambda arguments: gather_keys(arguments, "set"))
