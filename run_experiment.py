"""`python run_experiment.py CONFIG key=value ...` is `python -m recipes.run_experiment`."""

from recipes.run_experiment import CLIConfig, Trainer, main
from tinker_cookbook.cli_utils import run_recipe

__all__ = ["Trainer"]

if __name__ == "__main__":
    run_recipe(CLIConfig, main, prog="python run_experiment.py")
