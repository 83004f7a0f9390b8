"""The training text: a seeded mixture of conversations, in stages from careful writers to careless ones.

The first stage teaches the sums from mostly right answers, the last one teaches how often people slip. Learning both
at once would cost several times as many steps.
"""

import dataclasses
import random
from collections.abc import Iterator

from recipes.make_tiny_model import arithmetic, chat, debates, drills

Turns = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training: `share` of all conversations, and how often its writers are right."""

    share: float
    right_rate: float
    judge_rate: float


STAGES = (
    Stage(share=0.65, right_rate=0.97, judge_rate=0.99),
    Stage(share=0.35, right_rate=0.50, judge_rate=0.90),
)

# How many of each kind there are, per thousand.
MIXTURE = {
    "sum": 360,
    "quiz": 70,
    "sum_table": 110,
    "graded_answers": 75,
    "sum_debate": 80,
    "sum_verdict": 125,
    "summary": 55,
    "article_debate": 18,
    "article_verdict": 18,
    "talk": 71,
    "thought": 9,
    "tool": 9,
}


def conversation(kind: str, stage: Stage, rng: random.Random) -> Turns:
    """One conversation of a kind of MIXTURE, as (role, content) turns. Drills are pieces of text without ChatML."""
    match kind:
        case "sum":
            return arithmetic.single_turn(stage.right_rate, rng)
        case "quiz":
            return arithmetic.quiz(stage.right_rate, rng)
        case "sum_table":
            return drills.sum_table(rng)
        case "graded_answers":
            return drills.graded_answers(rng)
        case "sum_debate":
            return debates.sum_debate(rng)[0].seen_by_a()
        case "sum_verdict":
            return debates.judged_sum(stage.judge_rate, rng)
        case "summary":
            return debates.summary_turn(rng)
        case "article_debate":
            return debates.article_debate(rng)[0].seen_by_a()
        case "article_verdict":
            return debates.judged_article(stage.judge_rate, rng)
        case "talk":
            return chat.talk(rng)
        case "thought":
            return chat.thought(stage.right_rate, rng)
        case "tool":
            return chat.tool_call(stage.right_rate, rng)
    raise ValueError(f"kind: {kind!r} is not in the mixture; choose one of {sorted(MIXTURE)}")


def generate(stage: Stage, count: int, seed: int) -> Iterator[Turns]:
    """`count` conversations of one stage. The same arguments give the same text."""
    rng = random.Random(f"{seed}/{stage}")
    kinds, weights = list(MIXTURE), list(MIXTURE.values())
    for _ in range(count):
        yield conversation(rng.choices(kinds, weights)[0], stage, rng)


def stages(conversations: int, seed: int) -> list[list[Turns]]:
    return [list(generate(stage, round(conversations * stage.share), seed)) for stage in STAGES]


def segments(turns: Turns) -> list[tuple[str, bool]]:
    """ChatML text in pieces, each with whether the model is to write it: contents and stops of assistant turns.

    Cutting there keeps the tokens of a training text equal to those of a prompt followed by a sampled reply.
    """
    pieces: list[tuple[str, bool]] = []
    opening = ""
    for role, content in turns:
        if role in ("given", "written"):
            pieces.append((content, role == "written"))
            continue
        opening += f"<|im_start|>{role}\n"
        if role == "assistant":
            pieces += [(opening, False), (f"{content}<|im_end|>", True)]
            opening = "\n"
        else:
            opening += f"{content}<|im_end|>\n"
    pieces.append((f"{opening}<|endoftext|>", False))
    return pieces


def plain_text(turns: Turns) -> str:
    return "".join(piece for piece, _ in segments(turns))
