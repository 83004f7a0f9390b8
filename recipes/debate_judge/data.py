"""The labelled debates for training a judge: the keys of both recipes."""

import chz

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.debate.judge_training import LabelledDebates
from tinker_cookbook.utils.fields import docs

SHIPPED = "collatz"


@chz.chz(typecheck=True)
class JudgeKeys(LabelledDebates, debates=SHIPPED):
    """Keys of every recipe that trains a judge."""

    DOCS = docs(
        debates=f"{SHIPPED} (shipped: debates of tiny_debate), the folder of a run with debate_*.json, or a .jsonl file of "
        "recipes.debate_judge.create_data"
    )


def debates_path(keys: JudgeKeys) -> str:
    """The location of the debates in the key."""
    return str(EXAMPLE_DATA / "debates" / f"{SHIPPED}.jsonl") if keys.debates == SHIPPED else keys.debates
