"""Reinforcement learning without the library's loop: GRPO on sums in one screen, to copy and change.

    python -m recipes.rl_loop
    python -m recipes.rl_loop model_name=Qwen/Qwen3-4B-Instruct-2507 learning_rate=4e-5 max_number=999

One question is a group of replies; a reply's advantage is its reward minus the group's mean. Each step is awaited
before the next: no evaluation, no resume, a checkpoint only at the end. `recipes.rl_basic` has these. The reward
(fraction of right answers in metrics.jsonl) rises by more than 0.2 over the default run.
"""

from __future__ import annotations

import random
import time

import chz

from recipes.common import GroupKeys, StepKeys
from recipes.loop_common import LoopConfig
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import check_log_dir, default_log_path, run_recipe
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.exceptions import TrainingError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers import Renderer, get_renderer_of_model, get_text_content
from tinker_cookbook.runs.bootstrap import Run, open_run
from tinker_cookbook.runs.progress import Progress, count_trained_tokens
from tinker_cookbook.utils.lazy import np, tinker


def new_folder() -> str:
    return default_log_path("rl_loop", time.strftime("%Y%m%d_%H%M%S"))


@chz.chz(typecheck=True)
class CLIConfig(LoopConfig, StepKeys, GroupKeys, groups_per_batch=16, max_tokens=64, log_path=new_folder):
    """Keys of `python -m recipes.rl_loop`."""

    max_number: int = chz.field(default=20, doc="largest number in a sum", validator=chz.validators.gt(0))


def make_datum(prompt: list[int], reply: tinker.types.SampledSequence, advantage: float) -> tinker.Datum:
    """Prompt and reply, shifted by one: position i predicts token i + 1. Only the reply has advantages."""
    context = [0.0] * (len(prompt) - 1)
    logprobs, advantages = [*context, *(reply.logprobs or [])], [*context, *[advantage] * len(reply.tokens)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *reply.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array([*prompt[1:], *reply.tokens], dtype=np.int64)),
            "logprobs": tinker.TensorData.from_numpy(np.array(logprobs, dtype=np.float32)),
            "advantages": tinker.TensorData.from_numpy(np.array(advantages, dtype=np.float32)),
        },
    )


async def main(cli: CLIConfig) -> None:
    cli = chz.replace(cli, model_name=shipped_model(cli.model_name))
    backends.check_backend(cli.backend, cli.model_name, cli.base_url)
    renderer_name = model_info.get_recommended_renderer_name(cli.model_name)
    renderer = get_renderer_of_model(renderer_name, cli.model_name)
    check_log_dir(cli.log_path, cli.behavior_if_log_dir_exists)
    with open_run(cli.log_path, config=cli, recipe_name="rl_loop", extra={"system_prompt": QA_SYSTEM}) as run:
        run.rewind_metrics(0)
        await train(cli, renderer, run)


async def train(cli: CLIConfig, renderer: Renderer, run: Run) -> None:
    service = backends.create_service_client(cli.backend, cli.base_url, display_name=cli.session_name)
    client = await service.create_lora_training_client(cli.model_name, rank=cli.lora_rank, seed=cli.seed)
    adam = tinker.AdamParams(learning_rate=cli.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
    rng, progress = random.Random(cli.seed), Progress({})

    for step in range(cli.max_steps):
        # The policy that replies is a frozen snapshot; all questions are sampled concurrently.
        sampler = await client.save_weights_and_get_sampling_client()
        sums = [(rng.randint(0, cli.max_number), rng.randint(0, cli.max_number)) for _ in range(cli.groups_per_batch)]
        asked = []
        for i, (a, b) in enumerate(sums):
            prompt = renderer.build_generation_prompt(
                [{"role": "system", "content": QA_SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}]
            )
            params = tinker.SamplingParams(
                max_tokens=cli.max_tokens, stop=renderer.get_stop_sequences(), seed=step * cli.groups_per_batch + i
            )
            asked.append((prompt.to_ints(), a + b, sampler.sample(prompt, cli.group_size, params)))

        data_D, rewards_P, sampled_tokens = [], [], 0
        for prompt, answer, pending in asked:
            replies_G = (await pending).sequences
            texts_G = [get_text_content(renderer.parse_response(reply.tokens)[0]) for reply in replies_G]
            rewards_G = np.array([float(parse_solution(text) == str(answer)) for text in texts_G])
            rewards_P.append(rewards_G.mean())
            sampled_tokens += sum(len(reply.tokens) for reply in replies_G)
            for reply, advantage in zip(replies_G, rewards_G - rewards_G.mean(), strict=True):
                if advantage != 0:
                    data_D.append(make_datum(prompt, reply, float(advantage)))

        if data_D:  # nothing to learn if all rewards of every group are equal
            passed = client.forward_backward(data_D, "importance_sampling")
            updated = client.optim_step(adam)
            await passed
            await updated
        counted = progress.row(sampled_tokens, count_trained_tokens(data_D))
        row = {"reward": float(np.mean(rewards_P)), "num_datums": len(data_D), "optim/lr": cli.learning_rate}
        run.log_metrics(row | counted, step=step)

    if progress.trained_tokens == 0:
        raise TrainingError(
            f"nothing was trained: in each of the {cli.max_steps} steps all replies to a question got one reward"
        )
    saved = await client.save_state("final")
    print(f"Weights: {saved.path}\nFiles: {cli.log_path}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
