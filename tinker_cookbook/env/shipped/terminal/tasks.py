"""Tasks for a terminal: a folder of files, a goal in words, and a check. Two kinds are drawn here; others come from a file."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_cookbook.data.rows import Row, read_file
from tinker_cookbook.exceptions import DataFormatError
from tinker_cookbook.utils.narrowing import is_mapping

EXPECTED = '{"goal": "...", "files": {"name": "content"}, "check": "a command"}'
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "juniper")
ENDINGS = (".log", ".txt", ".csv", ".conf")


@dataclass(frozen=True)
class TerminalTask:
    """A task.

    Attributes:
        goal: the task, in words.
        files: path -> content, at the start.
        check: the command that decides, run in a copy of the final folder.
        check_files: written over the folder's files for the check; the policy never sees them.
        expected: what the check must print, lines and spaces at its ends aside; None: its exit code decides. A check that
            runs what the policy wrote should be decided so: what a program prints is compared outside of its reach.
    """

    id: str
    goal: str
    files: Mapping[str, str]
    check: str
    check_files: Mapping[str, str] = field(default_factory=dict[str, str])
    expected: str | None = None


def read_tasks(path: str | Path) -> list[TerminalTask]:
    """The tasks of a file, one per row. Raises ConfigurationError or DataFormatError, with file and line."""

    def parse(row: Row) -> TerminalTask:
        files, more = (_texts(row.content.get(name, {}), name) for name in ("files", "check_files"))
        expected = row.content.get("expected")
        if expected is not None and not isinstance(expected, str):
            raise DataFormatError(f"expected={expected!r}: must be a text, or left out")
        name = str(row.content.get("id", row.place))
        return TerminalTask(name, row.text("goal"), files, row.text("check"), more, expected)

    return read_file(path, parse, EXPECTED, "dataset")


def _texts(value: Any, name: str) -> dict[str, str]:
    if not is_mapping(value) or not all(isinstance(text, str) for item in value.items() for text in item):
        raise DataFormatError(f"{name} must be an object of file names and their contents")
    return dict(value)


def find_and_count(rng: random.Random) -> TerminalTask:
    """A task to count some of the files in a tree."""
    word, other = rng.sample(WORDS, 2)
    ending = rng.choice(ENDINGS)
    files: dict[str, str] = {}
    for number in range(rng.randint(8, 24)):
        folder = "/".join(rng.sample(WORDS, rng.randint(1, 3)))
        lines = [f"{rng.choice(WORDS)} {rng.randint(1, 99)}" for _ in range(rng.randint(0, 5))]
        if rng.random() < 0.5:
            lines.insert(rng.randint(0, len(lines)), rng.choice([word, word, f"{word}s", f"{other}-{word}"]))
        files[f"data/{folder}/{number}{rng.choice(ENDINGS)}"] = "".join(f"{line}\n" for line in lines)
    kind, answer = rng.choice(_counts(files, word, ending))
    goal = f"Below data/, {kind} Write the number, and nothing else, to answer.txt."
    name = f"count-{rng.getrandbits(32):08x}"
    return TerminalTask(name, goal, files, "cat answer.txt", expected=str(answer))


def _counts(files: Mapping[str, str], word: str, ending: str) -> list[tuple[str, int]]:
    ended = {name: text for name, text in files.items() if name.endswith(ending)}
    return [
        (f"how many files end in {ending}?", len(ended)),
        (f"how many files contain the text {word}?", sum(word in text for text in files.values())),
        (
            f"how many lines do the files that end in {ending} have together?",
            sum(text.count("\n") for text in ended.values()),
        ),
        (
            f"how many lines are exactly {word}, in all files together?",
            sum(line == word for text in files.values() for line in text.splitlines()),
        ),
        ("how many files are empty?", sum(not text for text in files.values())),
    ]


@dataclass(frozen=True)
class _Script:
    """A script with possible faults.

    Attributes:
        purpose: its function, in words.
        text: the script that works.
        faults: text in it -> its replacement in a broken script.
        inputs: draws a pair of its stdin and its stdout.
    """

    name: str
    purpose: str
    text: str
    faults: Mapping[str, str]
    inputs: Callable[[random.Random], tuple[str, str]]


# Each input shows each fault of its script.


def _numbers(rng: random.Random, low: int = 1, high: int = 99) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(2, 6))]


def _sum_input(rng: random.Random) -> tuple[str, str]:
    scores = _numbers(rng, 100, 199)
    rows = "".join(f"{rng.choice(WORDS)},{rng.randint(1, 99)},{score}\n" for score in scores)
    return f"name,age,score\n{rows}", f"{sum(scores)}"


def _largest_input(rng: random.Random) -> tuple[str, str]:
    numbers = _numbers(rng)
    return "".join(f"{number}\n" for number in numbers), f"{max(numbers)}"


def _longest_input(rng: random.Random) -> tuple[str, str]:
    lines = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4))) for _ in range(4)]
    return "".join(f"{line}\n" for line in lines), f"{max(len(line.split()) for line in lines)}"


def _unique_input(rng: random.Random) -> tuple[str, str]:
    first, second, third, once = rng.sample(WORDS, 4)
    words = [first, second, first, third, *rng.choices([first, second, third], k=rng.randint(0, 4)), once]
    return "".join(f"{word}\n" for word in words), "\n".join(sorted(set(words)))


def _average_input(rng: random.Random) -> tuple[str, str]:
    numbers = _numbers(rng)
    if sum(numbers) % len(numbers) == 0:
        numbers[0] += 1
    return " ".join(map(str, numbers)) + "\n", f"{sum(numbers) / len(numbers):.2f}"


_SCRIPTS = (
    _Script(
        "total.sh",
        "reads a CSV table with a header from stdin and prints the sum of its column score",
        """total=0
read -r header
while IFS=, read -r name age score; do
  total=$((total + score))
done
echo "$total"
""",
        {
            "read -r header\n": "read -r header\nread -r header\n",
            "IFS=, read": "IFS=; read",
            "total + score": "total + age",
            "done\n": "",
            "total=0": "total=1",
            "name age score": "name score",
        },
        _sum_input,
    ),
    _Script(
        "largest.sh",
        "reads a number per line from stdin and prints the largest",
        """best=0
while read -r number; do
  if [ "$number" -gt "$best" ]; then
    best=$number
  fi
done
echo "$best"
""",
        {
            "-gt": "-lt",
            "  fi\n": "",
            "best=$number": "best = $number",
            "best=0": "best=100",
            '[ "$number"': '["$number"',
        },
        _largest_input,
    ),
    _Script(
        "unique.sh",
        "reads a word per line from stdin and prints each different word once, in alphabetical order",
        "sort | uniq\n",
        {"sort | uniq": "uniq | sort", "uniq": "uniq -d", "sort |": "sort -r |", "| uniq": "> uniq"},
        _unique_input,
    ),
    _Script(
        "longest.py",
        "reads lines from stdin and prints how many words the line with the most words has",
        """import sys

most = 0
for line in sys.stdin:
    words = line.split()
    most = max(most, len(words))
print(most)
""",
        {
            "import sys": "import system",
            "line.split()": 'line.split("")',
            "len(words)": "len(line)",
            "for line in sys.stdin:": "for line in sys.stdin",
            "most = 0": "most = None",
            "max(": "min(",
        },
        _longest_input,
    ),
    _Script(
        "average.py",
        "reads a line of integers from stdin and prints their mean with two decimals",
        """numbers = [int(word) for word in input().split()]
mean = sum(numbers) / len(numbers)
print(f"{mean:.2f}")
""",
        {"int(word)": "word", " / ": " // ", ":.2f": ":2f", "input()": "input", "len(numbers)": "len(numbers) + 1"},
        _average_input,
    ),
)
HIDDEN_INPUTS = 4


def repair(rng: random.Random) -> TerminalTask:
    """A broken script, an input that shows it, and a check that says whether it works; the task is checked on other inputs."""
    script = rng.choice(_SCRIPTS)
    fault = rng.choice(sorted(script.faults))
    shown, *hidden = _inputs(script, rng)
    program = "python3" if script.name.endswith(".py") else "sh"
    check = f'[ "$({program} {script.name} < input.txt)" = "$(cat expected.txt)" ] && echo it works\n'
    files = {
        script.name: script.text.replace(fault, script.faults[fault]),
        "input.txt": shown[0],
        "expected.txt": f"{shown[1]}\n",
        "check.sh": check,
    }
    goal = (
        f"{script.name} {script.purpose}; but it is broken. Repair it, so that `sh check.sh` prints `it works`. "
        "It will be checked on other inputs too."
    )
    hidden_files = {f".hidden/{number}": given for number, (given, _) in enumerate(hidden)}
    command = f"for i in .hidden/*; do {program} {script.name} < $i; echo ==; done"
    expected = "\n".join(f"{wanted}\n==" for _, wanted in hidden)
    return TerminalTask(f"repair-{rng.getrandbits(32):08x}", goal, files, command, hidden_files, expected)


def _inputs(script: _Script, rng: random.Random) -> list[tuple[str, str]]:
    """The shown input and the hidden ones."""
    return [script.inputs(rng) for _ in range(1 + HIDDEN_INPUTS)]


KINDS: Mapping[str, Callable[[random.Random], TerminalTask]] = {"repair": repair, "count": find_and_count}
"""Kinds of drawn tasks."""
