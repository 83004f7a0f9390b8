"""The training text: a seeded mixture of conversations, in stages: a textbook, careful writers, careless writers.

The first stages teach sums, copying and judging from right answers, the last one teaches how often writers slip. Training on all
of it at once would take several times as many steps.
"""

import dataclasses
import random
from collections.abc import Iterator

from tools.make_tiny_model import arithmetic, chat, debates, drills

Turns = list[tuple[str, str]]


# Loss weights of the pieces of a text. Prompts are mostly unpredictable random choices of the corpus, yet they repeat themselves,
# which teaches copying.
PROMPT, WRITTEN, DECIDED = 0.05, 1.0, 4.0

# Number of each kind per thousand. The textbook stage teaches knowledge, the chats teach form.
TEXTBOOK = {"sum_table": 400, "recall": 250, "graded_answers": 150, "sum": 200}
CHATS = {
    "sum": 330,
    "quiz": 60,
    "sum_table": 50,
    "graded_answers": 70,
    "recall": 20,
    "sum_debate": 130,
    "sum_verdict": 170,
    "summary": 60,
    "article_debate": 22,
    "article_verdict": 18,
    "talk": 60,
    "thought": 5,
    "tool": 5,
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training: `share` of all conversations, their kinds, and how often their writers are right."""

    share: float
    mixture: dict[str, int]
    right_rate: float
    judge_rate: float


STAGES = (
    Stage(share=0.22, mixture=TEXTBOOK, right_rate=0.97, judge_rate=1.0),
    Stage(share=0.43, mixture=CHATS, right_rate=0.97, judge_rate=0.99),
    Stage(share=0.35, mixture=CHATS, right_rate=0.50, judge_rate=0.92),
)


def conversation(kind: str, stage: Stage, rng: random.Random) -> Turns:
    """One conversation of a kind of TEXTBOOK or CHATS, as (role, content) turns. Drills are plain text without ChatML."""
    match kind:
        case "sum":
            return arithmetic.single_turn(stage.right_rate, rng)
        case "quiz":
            return arithmetic.quiz(stage.right_rate, rng)
        case "sum_table":
            return drills.sum_table(rng)
        case "recall":
            return drills.recall(rng)
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
    raise ValueError(f"kind: {kind!r} is unknown; choose one of {sorted(TEXTBOOK | CHATS)}")


def generate(stage: Stage, count: int, seed: int) -> Iterator[Turns]:
    """`count` conversations of one stage. The same arguments give the same text."""
    rng = random.Random(f"{seed}/{stage}")
    kinds, weights = list(stage.mixture), list(stage.mixture.values())
    for _ in range(count):
        yield conversation(rng.choices(kinds, weights)[0], stage, rng)


def stages(conversations: int, seed: int) -> list[list[Turns]]:
    return [list(generate(stage, round(conversations * stage.share), seed)) for stage in STAGES]


def segments(turns: Turns) -> list[tuple[str, float]]:
    """ChatML text in pieces, each with its loss weight: contents and stops of assistant turns weigh most.

    Pieces are tokenized separately, so a training text has the same tokens as a prompt followed by a sampled reply.
    """
    pieces: list[tuple[str, float]] = []
    opening = ""
    drilled = {"given": PROMPT, "written": WRITTEN, "decided": DECIDED}
    for role, content in turns:
        if role in drilled:
            pieces.append((content, drilled[role]))
            continue
        opening += f"<|im_start|>{role}\n"
        if role == "assistant":
            pieces += [(opening, PROMPT), (f"{content}<|im_end|>", WRITTEN)]
            opening = "\n"
        else:
            opening += f"{content}<|im_end|>\n"
    pieces.append((f"{opening}<|endoftext|>", PROMPT))
    return pieces


def plain_text(turns: Turns) -> str:
    return "".join(piece for piece, _ in segments(turns))
