"""Supervised fine-tuning without the library's loop: the whole algorithm in one screen, to copy and change.

    python -m recipes.sl_loop
    python -m recipes.sl_loop file=my_chats.jsonl model_name=Qwen/Qwen3-4B-Base learning_rate=2e-4

No evaluation, no resume, one checkpoint: `recipes.sl_basic` has these. train_mean_nll falls from 7.9 to 4.7 by default.
"""

from __future__ import annotations

import time

import chz

from recipes.loop_common import LoopConfig
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import check_log_dir, default_log_path, run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA, shipped_model
from tinker_cookbook.field_groups import Epochs
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers import get_renderer_of_model
from tinker_cookbook.runs.bootstrap import Run, open_run
from tinker_cookbook.runs.progress import Progress, count_trained_tokens
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.conversations import read_conversations, shared_system_prompt
from tinker_cookbook.supervised.data import SupervisedDatasetFromList, conversation_to_datum
from tinker_cookbook.supervised.types import ExampleSizes
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier


def new_folder() -> str:
    return default_log_path("sl_loop", time.strftime("%Y%m%d_%H%M%S"))


@chz.chz(typecheck=True)
class CLIConfig(LoopConfig, ExampleSizes, Epochs, num_epochs=3, log_path=new_folder):
    """Keys of `python -m recipes.sl_loop`."""

    file: str = chz.field(default=str(EXAMPLE_DATA / "conversations.jsonl"), doc="JSONL file of conversations")


async def main(cli: CLIConfig) -> None:
    cli = chz.replace(cli, model_name=shipped_model(cli.model_name))
    backends.check_backend(cli.backend, cli.model_name, cli.base_url)
    renderer_name = model_info.get_recommended_renderer_name(cli.model_name)
    renderer = get_renderer_of_model(renderer_name, cli.model_name)
    rows = read_conversations(cli.file)
    dataset = SupervisedDatasetFromList(
        rows, cli.batch_size, lambda row: conversation_to_datum(row.messages, renderer, cli.max_length)
    )
    check_log_dir(cli.log_path, cli.behavior_if_log_dir_exists)
    opening = {"system_prompt": shared_system_prompt(row.messages for row in rows)}
    with open_run(cli.log_path, config=cli, recipe_name="sl_loop", extra=opening) as run:
        run.rewind_metrics(0)
        await train(cli, dataset, run)


async def train(cli: CLIConfig, dataset: SupervisedDatasetFromList, run: Run) -> None:
    service = backends.create_service_client(cli.backend, cli.base_url, display_name=cli.session_name)
    client = await service.create_lora_training_client(cli.model_name, rank=cli.lora_rank, seed=cli.seed)
    total_steps, progress = cli.num_epochs * len(dataset), Progress({})
    for step in range(total_steps):
        epoch, batch = divmod(step, len(dataset))
        if batch == 0:
            dataset.set_epoch(seed=cli.seed + epoch)
        data = dataset.get_batch(batch)
        learning_rate = cli.learning_rate * compute_schedule_lr_multiplier("linear", step, total_steps)
        # Both are submitted before the first is awaited, so that the engine runs them back to back.
        passed = client.forward_backward(data, "cross_entropy")
        updated = client.optim_step(tinker.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8))
        logprobs = [output["logprobs"] for output in (await passed).loss_fn_outputs]
        await updated
        nll = compute_mean_nll(logprobs, [datum.loss_fn_inputs["weights"] for datum in data])
        row = {"epoch": epoch, "optim/lr": learning_rate, "train_mean_nll": nll}
        run.log_metrics(row | progress.row(trained_tokens=count_trained_tokens(data)), step=step)
    print(f"Weights: {(await client.save_state('final')).path}\nFiles: {cli.log_path}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
