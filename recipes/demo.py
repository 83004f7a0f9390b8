"""A first look: a policy learns from a judge that does not know the truth, by debate and by its competitors.

    make demo        or        python -m recipes.demo

The judge can check one step of an answer. `recipes.debate_study` compares ways to choose the step, at equal sampled
tokens on the same items; this is one of its seeds. It runs on a CPU in a few minutes and prints a table, its result in
one sentence, and what to run next.
"""

import chz

from recipes import debate_study
from recipes.common import FolderKeys
from recipes.debate_keys import Compared
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.field_groups import Seeded

NEXT = """\
What to look at in that folder:
  study.md, study.json          the table, and every number behind it, item by item
  debate_seed0/metrics.jsonl    one line per step (env/all/debate/judge_accuracy is that of the judge)
  debate_seed0/iteration_...    whole debates to read in a browser: answers, objections, rewards, advantages
What to run next:
  python -m recipes.debate_study                                all seeds; docs/debate.md: what came of it, on six base models
  python -m recipes.debate_study step_judge.name=lm             the tiny model itself checks the step
  python -m recipes.debate_rs_grpo judge=lm task=summary        debates of three rounds, trained on the task's reward
  python -m recipes.debate_rs_grpo model_name=Qwen/Qwen3-4B-Instruct-2507 dataset=my_questions.jsonl
(use .venv/bin/python where the environment of the Makefile is not activated)"""


@chz.chz(typecheck=True)
class DemoConfig(Seeded, Compared, FolderKeys):
    """Keys of `python -m recipes.demo`."""


async def main(demo: DemoConfig) -> None:
    print(
        f"Training a tiny model by {', '.join(demo.protocols)}, {demo.tokens} sampled tokens each; a line for each step.",
        flush=True,
    )
    cli = debate_study.CLIConfig(
        seed=demo.seed,
        seeds=(demo.seed,),
        tokens=demo.tokens,
        protocols=demo.protocols,
        log_path=demo.log_path,
        behavior_if_log_dir_exists=demo.behavior_if_log_dir_exists,
        name="demo",
        num_groups_to_log=1,
    )
    debate_study.show(await debate_study.study(cli))
    print(NEXT)


if __name__ == "__main__":
    run_recipe(DemoConfig, main)
