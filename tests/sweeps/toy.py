"""A recipe without a model: its metrics follow from its keys, and it notes every start and every step in its folder."""

import asyncio
import os
import signal
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import LogdirBehavior, check_log_dir, run_recipe
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.runs.bootstrap import open_run


@chz.chz(typecheck=True)
class Inner:
    beta: float = 0.5


@chz.chz(typecheck=True)
class CLIConfig:
    learning_rate: float = chz.field(default=1.0, validator=chz.validators.gt(0))
    seed: int = 0
    text: str | None = None
    inner: Inner = chz.field(default_factory=Inner)
    max_steps: int = 3
    fail_at: float | None = None
    """learning rate that fails at step 1, until a file `fixed_now` is in the folder above"""
    die: bool = False
    wait: bool = False
    """write the process's id to `pid` and wait to be ended"""
    log_path: str | None = None
    behavior_if_log_dir_exists: LogdirBehavior = "ask"


async def main(config: CLIConfig) -> None:
    assert config.log_path is not None
    check_log_dir(config.log_path, config.behavior_if_log_dir_exists)
    folder = Path(config.log_path)
    done = len((folder / "metrics.jsonl").read_text().splitlines()) if (folder / "metrics.jsonl").exists() else 0
    with open(folder / "starts", "a") as starts:
        starts.write(f"{done}\n")
    with open_run(folder, config=config, recipe_name="toy") as run:
        for step in range(done, config.max_steps):
            await asyncio.sleep(0)
            if config.wait:
                (folder / "pid").write_text(str(os.getpid()))
                await asyncio.Event().wait()
            if config.die:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 1 and config.fail_at == config.learning_rate and not (folder.parent / "fixed_now").exists():
                raise TrainingError(f"diverged at learning_rate={config.learning_rate}")
            run.logger.log_metrics(
                {"score": config.learning_rate * (step + 1) + config.seed, "env/all/correct": 0.5, "note": "n"},
                step=step,
            )


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
