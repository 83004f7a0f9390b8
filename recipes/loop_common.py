"""Shared keys of the two loops of one screen, `recipes.rl_loop` and `recipes.sl_loop`."""

import chz

from recipes.common import DefaultModel, ExistingFolderKey
from tinker_cookbook.field_groups import AdapterKeys, LearningRate, RunFolder, Seeded, ServiceKeys


@chz.chz(typecheck=True)
class LoopConfig(
    DefaultModel,
    ServiceKeys,
    AdapterKeys,
    LearningRate,
    Seeded,
    RunFolder,
    ExistingFolderKey,
    learning_rate=1e-3,
    docs={
        "log_path": "folder for metrics.jsonl and logs.log; default: a new one under <user data>/tinker-cookbook",
        "behavior_if_log_dir_exists": "ask, delete, raise; resume: begin anew",
    },
):
    """The model, the optimizer and the run's folder."""

    session_name: str | None = chz.field(default=None, doc="what the service's console calls the run's session")
