"""Trained weights for use elsewhere: a PEFT adapter, or one model with the adapter merged in, with a model card.

    python -m recipes.export log_path=<run> output=~/my_adapter
    python -m recipes.export log_path=<run> output=~/my_adapter format=vllm
    python -m recipes.export log_path=<run> output=~/my_model format=merged dtype=bfloat16
    python -m recipes.export model_path=tinker://<run>/sampler_weights/final output=~/my_adapter backend=tinker

A merged model is loaded again and compared with base model plus adapter before it is moved into place.
"""

from typing import Literal

import chz

from recipes.policy import CheckpointKeys
from tinker_cookbook import backends, weights
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.checkpoints import last_sampler_path

RECIPE = "export"


@chz.chz(typecheck=True)
class CLIConfig(CheckpointKeys):
    """Keys of `python -m recipes.export`. With log_path, its config and metrics go into the model card; model_path may name
    another checkpoint of the run.
    """

    output: str = chz.field(doc="folder to write")
    format: Literal["adapter", "vllm", "merged"] = chz.field(
        default="adapter",
        doc="adapter (PEFT), vllm (an adapter; other names of routed experts) or merged (a whole model)",
    )
    base_model: str | None = chz.field(default=None, doc="directory or hub id; default: the checkpoint's")
    dtype: str | None = chz.field(default=None, doc="merged: float32, bfloat16 or float16; default: the base model's")
    overwrite: bool = chz.field(default=False, doc="replace an earlier export")


async def main(cli: CLIConfig) -> None:
    if cli.model_path is None and cli.log_path is None:
        raise ConfigurationError("nothing to export: give log_path=<run> or model_path=tinker://...")
    if cli.base_model is not None:
        backends.check_backend(cli.backend, cli.base_model, cli.base_url, field="base_model")
    path = cli.model_path if cli.model_path is not None else last_sampler_path(str(cli.log_path))
    exported = await weights.export(
        backends.create_service_client(cli.backend, cli.base_url),
        path,
        cli.output,
        cli.format,
        base_model=cli.base_model,
        dtype=cli.dtype,
        overwrite=cli.overwrite,
        log_path=cli.log_path,
    )
    checked = (
        "" if exported.max_abs_diff is None else f"; logits differ by at most {exported.max_abs_diff:.2g} after merging"
    )
    print(f"{cli.format} of {exported.base_model} from {path}{checked}\nFiles: {exported.folder}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
