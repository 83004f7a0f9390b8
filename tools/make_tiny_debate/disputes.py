"""Conversations that teach a tiny debater disputes: bisection over several requests, and estimates of steps.

    python -m tools.make_tiny_debate.disputes out=disputes.jsonl
    python -m recipes.chat_sl mixture=disputes.jsonl model_name=tiny_debate num_epochs=1 max_length=None learning_rate=1e-3 \\
        log_path=runs/taught
    python -m recipes.export log_path=runs/taught output=tiny_taught format=merged

The shipped model has seen only one objection per conversation, and no percentages. Half of these conversations are of kinds that
it knows, against forgetting. The same keys give the same file.
"""

import random
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.dispute import narrow
from tinker_cookbook.debate.prompts import OPPONENT
from tinker_cookbook.debate.transcript import Turn
from tinker_cookbook.env.shipped.questions.collatz import ESTIMATE_REQUEST, LENGTHS, OBJECTION_REQUEST
from tinker_cookbook.env.steps import NARROWING_REQUEST
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.utils.files import write_jsonl
from tools.make_tiny_debate.corpus import (
    OBJECTION_SKILL,
    Turns,
    Writers,
    answer,
    answer_text,
    asked,
    consultancy,
    debate,
    objection_to,
)
from tools.make_tiny_debate.figures import task_of
from tools.make_tiny_debate.trails import STEPS, draw, mistakes, write, write_wrong

DOUBTS, QUALMS = (5, 10, 20), 80
"""Percentages that writers give to a step that they know to be wrong, and to one that they are unsure about."""


def _two_answers(rng: random.Random, by: Writers) -> tuple[int, list[int], list[int]]:
    """A start, the speaker's answer, and the opponent's, which is wrong as often as in the debates that the model knows."""
    start = draw(rng)
    mine = write(start, rng, steps=by.steps)
    return start, mine, write_wrong(start, rng, by.steps) if rng.random() < 0.85 else write(start, rng, steps=by.steps)


def bisection(rng: random.Random, by: Writers) -> Turns:
    """An examiner who repeatedly names a wrong step among the remaining ones, until one step remains."""
    start, mine, theirs = _two_answers(rng, by)
    task, item = task_of(by.steps), TaskItem("", str(start), "")
    steps = task.steps(item, answer_text(theirs))
    assert steps is not None
    wrong, speeches = set(mistakes(start, theirs)), []
    request = OBJECTION_REQUEST.replace(OPPONENT, answer_text(theirs))
    turns = [*asked(start, by.steps), ("assistant", answer_text(mine))]
    while not (state := narrow(task, item, steps, speeches)).is_over:
        left = [steps.index(step) for step in state.left]
        if speeches:
            request = NARROWING_REQUEST.format(first=state.left[0].name, last=state.left[-1].name)
        known = [i for i in left if i in wrong]
        chosen = rng.choice(known) if known and rng.random() < by.objection_skill else rng.choice(left)
        speech = objection_to(start, theirs, chosen, rng)
        speeches.append(Turn([], speech, speech, kind="speech", round=len(speeches) + 1))
        turns += [("user", request), ("assistant", speech)]
    return turns


def estimates(rng: random.Random, by: Writers) -> Turns:
    """An estimator who gives low percentages to the wrong steps that it detects, and a middling one to another step at times."""
    start, mine, theirs = _two_answers(rng, by)
    wrong = mistakes(start, theirs)
    detected = [i for i in wrong if rng.random() < by.objection_skill]
    percents = {i: rng.choice(DOUBTS) for i in detected}
    if not detected or rng.random() < 0.3:
        percents.setdefault(rng.randrange(by.steps), QUALMS)
    reply = " ".join(f"{by.labels[i]} {percent}%" for i, percent in sorted(percents.items()))
    request = ESTIMATE_REQUEST.replace(OPPONENT, answer_text(theirs))
    return [*asked(start, by.steps), ("assistant", answer_text(mine)), ("user", request), ("assistant", reply)]


MIXTURE = {bisection: 25, estimates: 25, answer: 20, debate: 22, consultancy: 8}


def conversations(count: int, seed: int, by: Writers) -> list[Turns]:
    """`count` conversations. The same arguments give the same text."""
    rng = random.Random(f"disputes/{seed}")
    return [kind(rng, by) for kind in rng.choices(list(MIXTURE), list(MIXTURE.values()), k=count)]


@chz.chz(typecheck=True)
class CLIConfig:
    """What to write."""

    out: str = chz.field(doc="the JSONL file to write")
    count: int = chz.field(default=3000, doc="conversations", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="random seed")
    steps: int = chz.field(default=STEPS, doc="steps of an answer, as in the model's training")
    objection_skill: float = chz.field(
        default=OBJECTION_SKILL, doc="probability that a speech names a wrong step if there is one, else any step"
    )

    @chz.validate
    def _check(self) -> None:
        if self.steps not in LENGTHS:
            raise ValueError(f"steps must be one of {', '.join(map(str, LENGTHS))}, got {self.steps}")
        if not 0 <= self.objection_skill <= 1:
            raise ValueError(f"objection_skill must be a share from 0 to 1, got {self.objection_skill}")


def main(config: CLIConfig) -> None:
    made = conversations(config.count, config.seed, Writers(config.steps, config.objection_skill))
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]} for turns in made]
    write_jsonl(Path(config.out).expanduser(), rows)
    print(f"{config.out}: {len(rows)} conversations")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
