"""Measures how well a tiny_debate folder answers, objects and judges, by sampling from it at temperature 1.

    python -m tools.make_tiny_debate.figures model=example_data/tiny_debate
    python -m tools.make_tiny_debate.figures model=/tmp/long steps=24

It judges two kinds of debates between a right and a wrong answer, in both orders: debates from the templates of its training
text, and its own, for which it wrote answers and speeches itself.
"""

import random
import re
from pathlib import Path

import chz
import torch

from tinker_cookbook.backends import check_backend
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.prompts import CHECK_SYSTEM, OPPONENT
from tinker_cookbook.env.shipped.questions.collatz import (
    LENGTHS,
    OBJECTION_REQUEST,
    SUPPORT_REQUEST,
    CollatzTask,
    labels_of,
    next_number,
)
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.tasks import get_task
from tools.make_tiny_debate.corpus import Writers, answer_text, asked, judged, objection, wrong_number
from tools.make_tiny_debate.trails import (
    STEPS,
    WORLD,
    before,
    is_misconceived,
    mistakes,
    split,
    trail,
    write,
    write_wrong,
)
from tools.make_tiny_model.figures import MAX_NEW_TOKENS, VERDICT, Sampler, mean, table

_CLAIM = re.compile(r"([a-zA-Z]) is (?:wrong|right): (\d+) makes (\d+)\.")
_CHECK_VERDICT = re.compile(r"<VERDICT>(RIGHT|WRONG)</VERDICT>")


def task_of(steps: int) -> CollatzTask:
    """The task whose answers have `steps` steps."""
    task = get_task("collatz" if steps == STEPS else f"collatz_{steps}")
    assert isinstance(task, CollatzTask)
    return task


def measure(model_dir: str | Path, seed: int = 0, samples: int = 4, steps: int = STEPS) -> dict[str, float]:
    """Figures of a model folder, each a rate from 0 to 1, from `samples` answers of `steps` steps to each held-out start.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        longest = MAX_NEW_TOKENS * max(1, steps // STEPS)
        return _measure(Sampler(model_dir, longest), random.Random(seed), samples, Writers(steps))


def _numbers(start: int, text: str, length: int) -> list[int] | None:
    steps = task_of(length).steps(TaskItem("", str(start), ""), text)
    return None if steps is None else [int(step.claim.rpartition(" ")[2]) for step in steps]


def _answers(sampler: Sampler, starts: list[int], steps: int, greedy: bool = False) -> list[list[int] | None]:
    replies = sampler([asked(start, steps) for start in starts], greedy)
    return [_numbers(start, text, steps) for start, (text, _) in zip(starts, replies, strict=True)]


def _right(starts: list[int], answers: list[list[int] | None], steps: int) -> float:
    return mean(
        [
            numbers is not None and numbers[-1] == trail(start, steps)[-1]
            for start, numbers in zip(starts, answers, strict=True)
        ]
    )


def _measure(sampler: Sampler, rng: random.Random, samples: int, by: Writers) -> dict[str, float]:
    train, test = split()
    starts, length = test * samples, by.steps
    own = _answers(sampler, starts, length)
    read = [(start, numbers) for start, numbers in zip(starts, own, strict=True) if numbers is not None]
    steps = [(before(start, numbers, i), numbers[i]) for start, numbers in read for i in range(length)]
    figures = {
        "accuracy_train": _right(train, _answers(sampler, train, length), length),
        "accuracy_test": _right(starts, own, length),
        "greedy_accuracy_test": _right(test, _answers(sampler, test, length, greedy=True), length),
        "form_rate": len(read) / len(starts),
        "misconceived_step_error": mean([next_number(a) != b for a, b in steps if is_misconceived(a)]),
        "other_step_error": mean([next_number(a) != b for a, b in steps if not is_misconceived(a)]),
    }
    wrong = [write_wrong(start, rng, length) for start in starts]
    figures |= _speeches(sampler, starts, wrong, rng)
    drilled = [(start, trail(start, length), numbers) for start, numbers in zip(starts, wrong, strict=True)]
    speeches = [(objection(s, bad, rng, by), objection(s, good, rng, by)) for s, good, bad in drilled]
    figures |= _judge(sampler, drilled, speeches, "judge")
    figures |= _own_debates(sampler, read, length)
    figures["step_check_accuracy"] = _checks(sampler, rng)
    return {"stop_rate": sampler.ended / sampler.turns} | figures


def _speeches(sampler: Sampler, starts: list[int], wrong: list[list[int]], rng: random.Random) -> dict[str, float]:
    """Rates of its objections to wrong answers, and of its speeches as a consultant for them."""
    steps = len(wrong[0])
    labels = labels_of(steps)
    mine = [write(start, rng, steps=steps) for start in starts]
    objections = _object(sampler, starts, mine, wrong)
    for_own = [
        [*asked(start, steps), ("assistant", answer_text(numbers)), ("user", SUPPORT_REQUEST)]
        for start, numbers in zip(starts, wrong, strict=True)
    ]
    supports = [_CLAIM.fullmatch(text) for text, _ in sampler(for_own)]
    found = [_CLAIM.fullmatch(text) for text in objections]
    bad = [mistakes(start, numbers) for start, numbers in zip(starts, wrong, strict=True)]
    return {
        "objection_names_a_wrong_step": mean(
            [m is not None and labels.find(m.group(1)) in wrong_at for m, wrong_at in zip(found, bad, strict=True)]
        ),
        "random_step_is_wrong": mean([len(wrong_at) / steps for wrong_at in bad]),
        "objection_claims_the_truth": mean(
            [m is not None and next_number(int(m.group(2))) == int(m.group(3)) for m in found]
        ),
        "consultant_names_a_right_step": mean(
            [
                m is not None and m.group(1) in labels and labels.index(m.group(1)) not in wrong_at
                for m, wrong_at in zip(supports, bad, strict=True)
            ]
        ),
    }


def _object(sampler: Sampler, starts: list[int], mine: list[list[int]], theirs: list[list[int]]) -> list[str]:
    prompts = [
        [
            *asked(start, len(own)),
            ("assistant", answer_text(own)),
            ("user", OBJECTION_REQUEST.replace(OPPONENT, answer_text(other))),
        ]
        for start, own, other in zip(starts, mine, theirs, strict=True)
    ]
    return [text for text, _ in sampler(prompts)]


def _own_debates(sampler: Sampler, read: list[tuple[int, list[int]]], steps: int) -> dict[str, float]:
    """Right and wrong answers of its own to the same start, with its own speeches about them."""
    by_start: dict[int, dict[bool, list[int]]] = {}
    for start, numbers in read:
        by_start.setdefault(start, {}).setdefault(numbers == trail(start, steps), numbers)
    drawn = [(start, found[True], found[False]) for start, found in by_start.items() if len(found) == 2]
    starts = [start for start, _, _ in drawn]
    right, wrong = [row[1] for row in drawn], [row[2] for row in drawn]
    speeches = zip(_object(sampler, starts, right, wrong), _object(sampler, starts, wrong, right), strict=True)
    return _judge(sampler, drawn, list(speeches), "judge_own_debates")


def _judge(
    sampler: Sampler, drawn: list[tuple[int, list[int], list[int]]], speeches: list[tuple[str, str]], name: str
) -> dict[str, float]:
    """Judge every debate in both orders. `drawn`: start, right answer, wrong answer; `speeches`: for the right and the wrong."""
    prompts, truth = [], []
    for (start, right, wrong), (for_right, for_wrong) in zip(drawn, speeches, strict=True):
        prompts += [
            judged(start, right, wrong, (for_right, for_wrong)),
            judged(start, wrong, right, (for_wrong, for_right)),
        ]
        truth += ["A", "B"]
    verdicts = [VERDICT.search(text) for text, _ in sampler(prompts)]
    decided = [match.group(1) for match in verdicts if match is not None and match.group(1) != "TIE"]
    return {
        f"{name}_accuracy": mean(
            [match is not None and match.group(1) == right for match, right in zip(verdicts, truth, strict=True)]
        ),
        f"{name}_first_seat_rate": mean([winner == "A" for winner in decided]),
    }


def _checks(sampler: Sampler, rng: random.Random) -> float:
    claims = [(number, right) for number in WORLD for right in (True, False)]
    prompts = []
    for number, right in claims:
        claimed = next_number(number) if right else wrong_number(number, rng)
        prompts.append([("system", CHECK_SYSTEM), ("user", f"{number} makes {claimed}")])
    replies = [_CHECK_VERDICT.search(text) for text, _ in sampler(prompts, greedy=True)]
    return mean(
        [m is not None and (m.group(1) == "RIGHT") == right for m, (_, right) in zip(replies, claims, strict=True)]
    )


@chz.chz(typecheck=True)
class CLIConfig:
    """Which folder to measure."""

    model: str = chz.field(default="example_data/tiny_debate", doc="model folder")
    seed: int = chz.field(default=0, doc="seed of the sampling")
    samples: int = chz.field(default=4, doc="answers to each held-out start")
    steps: int = chz.field(default=STEPS, doc=f"steps of its answers: {', '.join(map(str, LENGTHS))}")


def main(config: CLIConfig) -> None:
    check_backend("local", config.model, field="model")
    print(table(measure(config.model, config.seed, config.samples, config.steps)))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
