"""A first look: debate RS->GRPO on the shipped tiny model, with accuracy before and after.

    make demo        or        python -m recipes.demo

Two copies of a tiny model answer sums and argue, a judge picks winners, winners are trained on whether their answer was
right. It runs on a CPU in a few minutes and ends with a table and with what to run next.
"""

import chz

from recipes import debate_rs_grpo
from recipes.rl_common import train_and_show
from tinker_cookbook.cli_utils import run_recipe

NEXT = """\
What to look at in that folder:
  metrics.jsonl                 one line per step (env/all/correct is the accuracy of proposals)
  iteration_000000/rollouts.parquet            every rollout of the first step
  iteration_000000/debate_000000_g000_00.json  a whole debate: text, token ids, logprobs, verdict
  iteration_000000/training_step_0001.json     what the first update was made of
What to run next:
  python -m recipes.debate_rs_grpo --help
  python -m recipes.debate_rs_grpo judge=lm task=summary        a language model as judge, another task
  python -m recipes.debate_rs_grpo model_name=Qwen/Qwen3-4B-Instruct-2507 dataset=my_questions.jsonl
(use .venv/bin/python where the environment of the Makefile is not activated)"""


@chz.chz(typecheck=True)
class DemoConfig:
    """Keys of `python -m recipes.demo`."""

    seed: int = chz.field(default=0, doc="seed of everything random")
    max_steps: int = chz.field(default=20, doc="optimizer steps", validator=chz.validators.gt(0))
    log_path: str | None = chz.field(
        default=None, doc="folder of the run; default: a new one under <user data>/tinker-cookbook"
    )


async def main(demo: DemoConfig) -> None:
    print(f"Debate RS->GRPO on the shipped tiny model: {demo.max_steps} steps, a line for each.", flush=True)
    cli = debate_rs_grpo.CLIConfig(
        seed=demo.seed,
        max_steps=demo.max_steps,
        eval_every=demo.max_steps,
        log_path=demo.log_path,
        name="demo",
        on_zero_advantages="skip",  # the tiny model may come to answer a whole batch right: no reason to end with an error
    )
    await train_and_show(debate_rs_grpo.build_config(cli), ["correct"])
    print(NEXT)


if __name__ == "__main__":
    run_recipe(DemoConfig, main)
