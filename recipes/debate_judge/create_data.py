"""Labelled debates to train a judge on: a frozen policy debates questions whose answers are known, without a judge.

    python -m recipes.debate_judge.create_data output_path=debates.jsonl
    python -m recipes.debate_judge.create_data model_name=Qwen/Qwen3-4B-Instruct-2507 task=qa dataset=questions.jsonl \\
        protocol.answers=assigned output_path=debates.jsonl

It keeps the debates with exactly one right side. Each line of the file has the judge's view, with the truth next to
it. The records of a `debate_rs_grpo` run have the same content, so the judge's recipes also accept its folder.
"""

from collections import Counter
from pathlib import Path

import chz

from recipes.policy import PolicyCLIConfig, open_policy, reply_tokens
from recipes.results import OutputFile
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.dataset import Debates, TurnKeys
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.records import read_view
from tinker_cookbook.debate.saved import SavedDebate, labelled
from tinker_cookbook.debate.views import Winner
from tinker_cookbook.env.single_turn import TaskSource
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.utils.fields import docs, fill
from tinker_cookbook.utils.files import write_jsonl
from tinker_cookbook.utils.misc_utils import gather_all


@chz.chz(typecheck=True)
class CLIConfig(OutputFile, TaskSource, TurnKeys, PolicyCLIConfig, seed=0):
    """Keys of `python -m recipes.debate_judge.create_data`. The questions are all of the training split."""

    DOCS = docs(output_path="file that gets a line for each labelled debate")

    debates: int = chz.field(default=2, doc="debates about each question", validator=chz.validators.gt(0))
    max_items: int | None = chz.field(default=None, doc="use only this many questions; default: all")


async def play(cli: CLIConfig) -> list[SavedDebate]:
    """The debates, right on one side or not."""
    policy = await open_policy(cli)
    max_tokens = reply_tokens(cli, policy.base_model)
    env = fill(Debates, cli, max_tokens=max_tokens, context_window=policy.context_length)
    task, items, _ = env.load()
    protocol = await env.make_protocol(task, policy.renderer, cli.seed or 0)
    groups = [DebateGroupBuilder(protocol, item, cli.debates, (0, i)) for i, item in enumerate(items[: cli.max_items])]
    completer = TinkerTokenCompleter(policy.sampling_client, max_tokens, cli.temperature, seed=cli.seed)
    # One call per group, because a batch's groups have no records.
    played = await gather_all(do_group_rollout(group, completer.fork("group", i)) for i, group in enumerate(groups))
    records = [record.content for group in played for record in group.records]
    return [SavedDebate(str(r["instance_id"]), read_view(r["view"]), Winner.INVALID) for r in records]


async def main(cli: CLIConfig) -> None:
    debates = await play(cli)
    judged = labelled(debates)
    path = Path(cli.output_path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, [debate.row() for debate in judged])
    right = Counter(str(debate.label) for debate in judged)
    print(f"{len(debates)} debates, {len(judged)} with exactly one right side: {dict(sorted(right.items()))}; {path}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
