"""The runs of a report: their metrics as columns, config, metadata and state, read from their folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.stores.registry import RunInfo, RunRegistry
from tinker_cookbook.stores.storage import LocalStorage
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.sweeps import ranking
from tinker_cookbook.sweeps.points import SEED_KEY
from tinker_cookbook.sweeps.run import STATUS_BASE_NAME, read_status
from tinker_cookbook.utils.files import flatten, iterate_jsonl
from tinker_cookbook.utils.metric_names import each_once
from tinker_cookbook.utils.trace import EVENTS_BASE_NAME

IGNORED_KEYS = frozenset({SEED_KEY, "log_path", "wandb_name", "behavior_if_log_dir_exists", "processes"})
"""Config keys, at any depth, that may differ between runs of one setting."""

MOST_NAMED = 30
"""Characters of a value that names a setting."""

MOST_SPANS = 20_000
"""Spans of a trace that a report shows; the file has all."""


@dataclass
class RunData:
    """A run at its last read."""

    label: str
    folder: Path
    store: TrainingRunStore
    info: RunInfo
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """nested, as config.json has it"""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    sweep: dict[str, Any] = field(default_factory=dict[str, Any])
    """of a sweep: its status there, with the swept keys and their values in `point`; empty for other runs"""

    @property
    def flat_config(self) -> dict[str, Any]:
        """Dotted keys of the leaves."""
        return flatten(self.config) if self.config else {}

    @property
    def recipe(self) -> str | None:
        """The recipe that produced it."""
        return self.metadata.get("recipe")

    @property
    def seed(self) -> Any:
        """The run's seed; None: it has none."""
        return self.sweep.get("point", {}).get(SEED_KEY, self.flat_config.get(SEED_KEY))

    def steps(self) -> list[int]:
        """The steps that have records, in order."""
        return [info.iteration for info in self.store.list_iterations() if info.has_train_rollouts]


def listed_folders(log_path: str) -> list[str]:
    """The folders of the key `log_path`, which commas separate. Raises ConfigurationError when there is none."""
    paths = [path for path in log_path.split(",") if path]
    if not paths:
        raise ConfigurationError("log_path: give at least one folder")
    return paths


def open_runs(paths: Sequence[str]) -> list[RunData]:
    """The runs in some folders; each folder is a run or contains several (a sweep), to the registry's depth.

    Labels are the shortest paths that distinguish them.

    Raises:
        ConfigurationError: a path is not a folder, or has no run.
        DataFormatError: a file of a run is damaged.
    """
    opened: dict[Path, RunData] = {}
    for given in paths:
        root = Path(given).expanduser().resolve()
        if not root.is_dir():
            raise ConfigurationError(
                f"log_path: {given!r} is not a folder; give the folder of a run, or one with runs in it"
            )
        registry = RunRegistry([LocalStorage(root)])
        infos = registry.refresh()
        if not infos:
            raise ConfigurationError(
                f"log_path: {given!r} has no run in it (a folder with metrics.jsonl, run_metadata.json or checkpoints.jsonl)"
            )
        for info in infos:
            folder = root / info.prefix
            if folder not in opened:
                opened[folder] = RunData("", folder, registry.get_training_store(info.run_id), info)
    runs = list(opened.values())
    for run, label in zip(runs, _labels([run.folder for run in runs]), strict=True):
        run.label = label
        read_run(run)
    return runs


def read_run(run: RunData) -> None:
    """Read metrics, config and metadata again. Raises as `open_runs`."""
    run.rows = each_once(run.store.read_metrics())
    run.config = run.store.read_config() or {}
    run.metadata = run.store.read_metadata() or {}
    status = run.folder / STATUS_BASE_NAME
    run.sweep = read_status(status) if status.exists() else {}


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, and for equal ones as many more parts as distinguish them."""
    if len(folders) == 1:
        return [folders[0].name]
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Metrics by name, with a value or None per step, and `step` itself. Rows of one step are joined; a row without a step
    belongs to the step before."""
    joined: dict[int, dict[str, Any]] = {}
    last = 0
    for row in rows:
        last = row.get("step", last)
        joined.setdefault(last, {}).update(row)
    steps = sorted(joined)
    keys = dict.fromkeys(key for step in steps for key in joined[step] if key != "step")
    return {"step": steps} | {key: [joined[step].get(key) for step in steps] for key in keys}


def swept_keys(runs: Sequence[RunData]) -> list[str]:
    """Keys in which the runs differ, the seed last: those of `settings`, without uninformative ones."""
    points = [setting | {SEED_KEY: run.seed} for setting, run in zip(settings(runs), runs, strict=True)]
    keys = dict.fromkeys(key for one in points for key in one)
    return [key for key in keys if len({json.dumps(one.get(key), sort_keys=True) for one in points}) > 1]


def settings(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """What distinguishes each run except its seed, as in `sweeps.ranking.settings`: for runs of a sweep the requested
    values, for others their configs.
    """
    swept = all(run.sweep for run in runs)
    runs_settings = [run.sweep if swept else {"point": {}, "recipe": run.recipe, "config": run.config} for run in runs]
    differing = ranking.settings(runs_settings)
    return [{key: value for key, value in one.items() if _last(key) not in IGNORED_KEYS} for one in differing]


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def seeds_together(runs: Sequence[RunData]) -> list[list[int]]:
    """Indices of the runs, grouped by everything except the seed. Runs of different recipes are never grouped."""
    return ranking.same_setting(settings(runs))


def setting_name(setting: Mapping[str, Any]) -> str:
    """A setting on one line: its short values with the last parts of their keys; empty if it has none."""
    return " ".join(f"{_last(key)}={value}" for key, value in setting.items() if len(str(value)) < MOST_NAMED)


def read_spans(run: RunData) -> list[dict[str, Any]]:
    """The spans of the run's trace, `enable_trace=true`: name, row (the task or thread), start and seconds; empty
    without one.

    The newest `MOST_SPANS` of them, in order of their start.
    """
    path = run.folder / EVENTS_BASE_NAME
    if not path.exists():
        return []
    open_spans: dict[tuple[int, int], list[dict[str, Any]]] = {}
    names: dict[int, str] = {}
    spans: list[dict[str, Any]] = []
    try:
        for line in iterate_jsonl(path, tolerate_torn_tail=True):
            event = line.row
            place = (event["pid"], event["tid"])
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    names[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "B":
                open_spans.setdefault(place, []).append(event)
            elif event["ph"] == "E" and open_spans.get(place):
                begun = open_spans[place].pop()
                spans.append(
                    {
                        "name": begun["name"],
                        "row": f"{names.get(place[0], place[0])}/{place[1]}",
                        "start": begun["ts"] / 1e6,
                        "seconds": (event["ts"] - begun["ts"]) / 1e6,
                        "args": event.get("args", {}),
                    }
                )
    except KeyError as error:
        raise DataFormatError(
            f"{path}: an event has no {error}; remove it, it is not a trace of this library"
        ) from error
    return sorted(spans, key=lambda span: span["start"])[-MOST_SPANS:]
