"""Conversations for a supervised stage before reinforcement learning, from training questions only.

    python -m tools.warm_up_rows rows=code_lines slips=0.5 out=lines.jsonl
    python -m tools.warm_up_rows rows=code_debate out=debates.jsonl count=8000
    python -m tools.warm_up_rows rows=reasoning_gym:chain_sum config.max_terms=2 config.max_digits=2 slips=0.5 out=sums.jsonl

`code_lines` are right lines; `code_debate` are answers of task=code_lines with mistakes, objections to such answers, and speeches
of an author to the judge; `reasoning_gym:NAME` are right answers (the extra `reasoning`). With `slips` a share of the lines or
answers is wrong: a model that learns from them knows the task but is careless, which leaves room for reinforcement learning. The
same keys give the same file.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.prompts import OPPONENT
from tinker_cookbook.env.reasoning.environment import ReasoningGym
from tinker_cookbook.env.shipped.code.lines import (
    CHECKED,
    LineProgram,
    line_messages,
    line_programs,
    split_programs,
)
from tinker_cookbook.env.shipped.questions.code_lines import (
    LINES_SYSTEM,
    OBJECTION_REQUEST,
    STEPS,
    SUPPORT_REQUEST,
    line_row,
    value_of,
)
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.utils.files import write_jsonl

LINES, DEBATE, REASONING = "code_lines", "code_debate", "reasoning_gym:"
FORGOTTEN = ("at least", "at most", "drop the sign")
"""Steps that writers forget: without them the line is right for most arguments, or for few."""
FORGETS, MISREADS = 0.6, 0.15
"""Probability that a writer forgets such a step, and else that a constant is off by one."""
OBJECTION_SKILL, SUPPORT_SKILL = 0.9, 0.9
"""Probability that a speech names an argument for which the line is wrong (right) if there is one; else any argument."""
OBJECTS_TO_WRONG = 0.8
"""Probability that an objection is to a wrong line, if writers get the program wrong at all."""
KINDS = {"answer": 4, "debate": 5, "consultancy": 1}
SEED_OF_QUESTIONS = 20_000
"""Added to the seed, so that the questions differ from those of runs with small seeds."""


@chz.chz(typecheck=True)
class CLIConfig:
    """Keys of `python -m tools.warm_up_rows`."""

    rows: str = chz.field(doc=f"{LINES}, {DEBATE} or {REASONING}NAME")
    out: str = chz.field(doc="the JSONL file to write")
    count: int = chz.field(default=3000, doc="conversations", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="random seed")
    slips: float = chz.field(
        default=0.0,
        doc=f"share of {LINES} (written by a careless writer) and of numbers of {REASONING}NAME (off by a little) that is wrong",
        validator=[chz.validators.ge(0), chz.validators.lt(1)],
    )
    config: dict[str, Any] = chz.field(
        default_factory=dict, doc="fields of the generator's config, as config.max_terms=2"
    )

    @chz.validate
    def _check(self) -> None:
        if self.rows not in (LINES, DEBATE) and not self.rows.startswith(REASONING):
            raise ConfigurationError(f"rows={self.rows!r} is unknown; use {LINES}, {DEBATE} or {REASONING}NAME")
        if self.slips and self.rows == DEBATE:
            raise ConfigurationError(f"slips: writers of {DEBATE} are always careless; leave it out")
        if self.config and not self.rows.startswith(REASONING):
            raise ConfigurationError(f"config is only for {REASONING}NAME; leave it out with rows={self.rows}")


@cache
def _by_words() -> dict[str, LineProgram]:
    return {program.words: program for program in line_programs(STEPS)}


def written_line(program: LineProgram, rng: random.Random) -> str:
    """The line that a careless writer gives for a program."""
    steps = program.words.split(", then ")
    forgettable = [i for i, step in enumerate(steps) if step.startswith(FORGOTTEN)]
    if forgettable and rng.random() < FORGETS:
        del steps[rng.choice(forgettable)]
        if not steps:
            return "x"
    elif rng.random() < MISREADS:
        i = rng.randrange(len(steps))
        words, _, constant = steps[i].rpartition(" ")
        if constant.isdigit():
            steps[i] = f"{words} {int(constant) + rng.choice((-1, 1))}"
    other = _by_words().get(", then ".join(steps))
    return program.line if other is None else other.line


def _wrong_line(program: LineProgram, rng: random.Random) -> str:
    """A wrong line, if one of a few attempts is wrong."""
    lines = (written_line(program, rng) for _ in range(8))
    return next((line for line in lines if not all(_right(program, line))), program.line)


def _speech(program: LineProgram, line: str, rng: random.Random, word: str, skill: float) -> str:
    """A speech that names an argument for which a line is wrong or right."""
    matching = [x for x, right in zip(CHECKED, _right(program, line), strict=True) if right == (word == "right")]
    x = rng.choice(matching) if matching and rng.random() < skill else rng.choice(CHECKED)
    return f"f({x}) is {word}."


def _right(program: LineProgram, line: str) -> list[bool]:
    return [value_of(line, x) == value for x, value in zip(CHECKED, program.values, strict=True)]


def debate_conversations(seed: int) -> Iterator[list[Message]]:
    """Answers with mistakes, and speeches about answers; infinite."""
    rng, programs = random.Random(f"warm_up/{seed}"), split_programs(STEPS, "train")
    while True:
        program = rng.choice(programs)
        line = written_line(program, rng)
        messages: list[Message] = [
            {"role": "system", "content": LINES_SYSTEM},
            {"role": "user", "content": line_row(program)["question"]},
            {"role": "assistant", "content": _tagged(line)},
        ]
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        if kind == "debate":
            theirs = _wrong_line(program, rng) if rng.random() < OBJECTS_TO_WRONG else written_line(program, rng)
            request = OBJECTION_REQUEST.replace(OPPONENT, _tagged(theirs))
            speech = _speech(program, theirs, rng, "wrong", OBJECTION_SKILL)
            messages += _exchange(request, speech)
        elif kind == "consultancy":
            speech = _speech(program, line, rng, "right", SUPPORT_SKILL)
            messages += _exchange(SUPPORT_REQUEST, speech)
        yield messages


def _exchange(request: str, speech: str) -> list[Message]:
    return [{"role": "user", "content": request}, {"role": "assistant", "content": speech}]


def _tagged(line: str) -> str:
    return f"<SOLUTION>{line}</SOLUTION>"


def careless_lines(seed: int, slips: float) -> Iterator[list[Message]]:
    """Prompts of training programs with lines, of which a share `slips` is wrong, in repeated passes; infinite."""
    rng, programs = random.Random(f"warm_up/lines/{seed}"), split_programs(STEPS, "train")
    while True:
        rng.shuffle(programs)
        for program in programs:
            line = _wrong_line(program, rng) if rng.random() < slips else program.line
            yield [*line_messages(program, "words"), {"role": "assistant", "content": line}]


def off_by_a_little(answer: str, rng: random.Random) -> str:
    """A number close to this one; answers that are not numbers are returned unchanged."""
    try:
        number = int(answer)
    except ValueError:
        return answer
    return str(number + rng.choice((-10, -2, -1, 1, 2, 10)))


def reasoning_conversations(name: str, config: dict[str, Any], seed: int, slips: float) -> Iterator[list[Message]]:
    """Training questions of a generator with tagged answers, of which a share `slips` is wrong."""
    rng = random.Random(f"warm_up/{name}/{seed}")
    env = ReasoningGym(generators={name: 1.0}, config={name: config})
    mixture = env.mixture(SEED_OF_QUESTIONS + seed)
    for number in range(env.size):
        content = mixture.entry(number, is_test=False).content
        answer = off_by_a_little(content["answer"], rng) if rng.random() < slips else content["answer"]
        yield [
            {"role": "system", "content": env.system_prompt},
            {"role": "user", "content": content["question"]},
            {"role": "assistant", "content": _tagged(answer)},
        ]


def main(cli: CLIConfig) -> None:
    if cli.rows == LINES:
        conversations = careless_lines(cli.seed, cli.slips)
    elif cli.rows == DEBATE:
        conversations = debate_conversations(cli.seed)
    else:
        conversations = reasoning_conversations(cli.rows.removeprefix(REASONING), cli.config, cli.seed, cli.slips)
    rows = [{"messages": messages} for messages in islice(conversations, cli.count)]
    write_jsonl(Path(cli.out).expanduser(), rows)
    print(f"{cli.out}: {len(rows)} conversations")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
