"""Shared keys of the two loops of one screen, `recipes.rl_loop` and `recipes.sl_loop`."""

import chz

from recipes.common import DefaultModel, ExistingFolderKey
from tinker_cookbook.field_groups import LearningRate, RunFolder
from tinker_cookbook.runs.config import ClientKeys
from tinker_cookbook.utils.fields import docs


@chz.chz(typecheck=True)
class LoopConfig(DefaultModel, ClientKeys, LearningRate, RunFolder, ExistingFolderKey, learning_rate=1e-3):
    """The model, the optimizer and the run's folder."""

    DOCS = docs(
        session_name="name of the run's session in the service's console",
        log_path="folder for metrics.jsonl and logs.log; default: a new one under <user data>/tinker-cookbook",
        behavior_if_log_dir_exists="ask, delete, raise; resume: start over",
    )
