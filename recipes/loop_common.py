"""Shared keys of the two loops of one screen, `recipes.rl_loop` and `recipes.sl_loop`."""

import chz

from recipes.common import default_model
from tinker_cookbook.cli_utils import LogdirBehavior
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.utils.fields import Defaults


@chz.chz(typecheck=True)
class LoopConfig(Defaults):
    """The model, the optimizer and the run's folder."""

    model_name: str = chz.field(
        default_factory=default_model,
        munger=lambda self, name: shipped_model(name),
        doc="tiny_chat (shipped), a model directory or a hub id; default: TINKER_DEBATE_BASE_MODEL, else tiny_chat",
    )
    backend: str | None = chz.field(default=None, doc="local or tinker; default: TINKER_BACKEND, else local")
    session_name: str | None = chz.field(default=None, doc="what the service's console calls the run's session")
    learning_rate: float = chz.field(default=1e-3, doc="peak learning rate", validator=chz.validators.gt(0))
    lora_rank: int = chz.field(default=32, doc="rank of the LoRA adapter", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="seed of the adapter and of everything that is drawn")
    log_path: str = chz.field(
        doc="folder for metrics.jsonl and logs.log; default: a new one under <user data>/tinker-cookbook"
    )
    behavior_if_log_dir_exists: LogdirBehavior = chz.field(default="ask", doc="ask, delete, raise; resume: begin anew")
