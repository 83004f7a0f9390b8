"""Twenty problems that ask for a program: it must write what the function returns for its stdin.

The docstring is the statement. `INPUTS` has functions that draw the stdin of a test.
"""

# ruff: noqa: B905 (solutions are as a learner would write them)

import random
from collections.abc import Callable

from tools.code_problems.functions import numbers, word, words


def sum_of_lines(text):
    """Each line has one integer. Write their sum."""
    return sum(int(line) for line in text.split())


def reverse_lines(text):
    """Write the lines of the input in reverse order."""
    return "\n".join(reversed(text.splitlines()))


def word_count(text):
    """Write each different word of the input with how often it occurs, a word and a number per line, in alphabetical order."""
    found = text.split()
    return "\n".join(f"{one} {found.count(one)}" for one in sorted(set(found)))


def fizz(text):
    """The input is an integer n. Write the numbers from 1 to n, one per line, but Fizz for multiples of 3, Buzz for multiples
    of 5, and FizzBuzz for multiples of both."""
    lines = []
    for i in range(1, int(text) + 1):
        said = "Fizz" * (i % 3 == 0) + "Buzz" * (i % 5 == 0)
        lines.append(said or str(i))
    return "\n".join(lines)


def mean_of_line(text):
    """The input is a line of integers. Write their mean with two decimals."""
    values = [int(part) for part in text.split()]
    return f"{sum(values) / len(values):.2f}"


def grade_book(text):
    """Each line is a name and a mark. Write the name with the highest mark; of several the one that comes first."""
    rows = [line.split() for line in text.splitlines()]
    return max(rows, key=lambda row: int(row[1]))[0]


def triangle(text):
    """The input is an integer n. Write a triangle of n lines; line i has i stars."""
    return "\n".join("*" * i for i in range(1, int(text) + 1))


def to_binary(text):
    """Each line is a non-negative integer. Write each in binary, one per line."""
    return "\n".join(f"{int(line):b}" for line in text.split())


def shopping(text):
    """Each line is an article, how many are bought, and the price of one in cents. Write the sum in cents."""
    return sum(int(count) * int(price) for _, count, price in (line.split() for line in text.splitlines()))


def longest_word(text):
    """Write the longest word of the input; of several the first one."""
    return max(text.split(), key=len)


def sort_by_second(text):
    """Each line is a word and an integer. Write the lines in ascending order of the integer; lines with equal ones keep their
    order."""
    return "\n".join(sorted(text.splitlines(), key=lambda line: int(line.split()[1])))


def robot(text):
    """A robot starts at 0 0. Each letter of the input moves it by one: N (y up), S (y down), E (x up), W (x down). Write its
    x and y."""
    moves = text.strip()
    return f"{moves.count('E') - moves.count('W')} {moves.count('N') - moves.count('S')}"


def bank(text):
    """An account starts at 0. Each line is `in N` or `out N`; a withdrawal of more than there is does not happen. Write the
    balance at the end."""
    balance = 0
    for line in text.splitlines():
        kind, amount = line.split()
        if kind == "in":
            balance += int(amount)
        elif int(amount) <= balance:
            balance -= int(amount)
    return balance


def multiplication_table(text):
    """The input is an integer n. Write n lines with n numbers each: the number in line i and column j is i times j."""
    n = int(text)
    return "\n".join(" ".join(str(i * j) for j in range(1, n + 1)) for i in range(1, n + 1))


def column_sums(text):
    """Each line has the same number of integers. Write the sum of each column, on one line."""
    rows = [[int(part) for part in line.split()] for line in text.splitlines()]
    return " ".join(str(sum(column)) for column in zip(*rows))


def anagrams(text):
    """Each line has two words. For each write yes if they have the same letters equally often, else no."""
    return "\n".join("yes" if sorted(a) == sorted(b) else "no" for a, b in (line.split() for line in text.splitlines()))


def minutes(text):
    """Each line is a time of a day as HH:MM. Write how many minutes are between the earliest and the latest."""
    times = [int(line[:2]) * 60 + int(line[3:5]) for line in text.split()]
    return max(times) - min(times)


def queue(text):
    """Lines are `come NAME` and `serve`. At each serve write the name of who has waited longest, or nobody."""
    waiting, lines = [], []
    for line in text.splitlines():
        if line.startswith("come"):
            waiting.append(line.split()[1])
        else:
            lines.append(waiting.pop(0) if waiting else "nobody")
    return "\n".join(lines)


def unique_digits(text):
    """Each line is an integer. Write how many of them have no digit twice."""
    return sum(len(set(line)) == len(line) for line in text.split())


def histogram(text):
    """The input is a line of digits 0 to 9, separated by spaces. For each digit that occurs, in ascending order, write the digit,
    a colon, a space and as many # as it occurs."""
    found = text.split()
    return "\n".join(f"{digit}: {'#' * found.count(digit)}" for digit in sorted(set(found)))


def lines(rng: random.Random, line: Callable[[], object], most: int = 6) -> str:
    return "".join(f"{line()}\n" for _ in range(rng.randint(1, most)))


def times_of_day(rng: random.Random) -> str:
    return lines(rng, lambda: f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}")


def pair_of_words(rng: random.Random) -> str:
    one = word(rng, 3, 5, "abcd")
    other = "".join(rng.sample(one, len(one))) if rng.random() < 0.5 else word(rng, 3, 5, "abcd")
    return f"{one} {other}"


def table(rng: random.Random) -> str:
    width = rng.randint(1, 4)
    return lines(rng, lambda: " ".join(map(str, numbers(rng, width, width))))


def queue_lines(rng: random.Random) -> str:
    return "come ada\nserve\n" + lines(rng, lambda: rng.choice([f"come {word(rng, 3)}", "serve"]), 9) + "serve\n"


INPUTS: dict[Callable[[str], object], Callable[[random.Random], str]] = {
    sum_of_lines: lambda rng: lines(rng, lambda: rng.randint(-50, 50)),
    reverse_lines: lambda rng: lines(rng, lambda: " ".join(words(rng))),
    word_count: lambda rng: lines(rng, lambda: " ".join(words(rng, letters="ab"))),
    fizz: lambda rng: f"{rng.randint(1, 40)}\n",
    mean_of_line: lambda rng: " ".join(map(str, numbers(rng))) + "\n",
    grade_book: lambda rng: lines(rng, lambda: f"{word(rng, 3)} {rng.randint(1, 9)}"),
    triangle: lambda rng: f"{rng.randint(1, 12)}\n",
    to_binary: lambda rng: lines(rng, lambda: rng.choice([0, rng.randint(0, 999)])),
    shopping: lambda rng: lines(rng, lambda: f"{word(rng, 3)} {rng.randint(1, 9)} {rng.randint(5, 999)}"),
    longest_word: lambda rng: " ".join(words(rng, 2, 9)) + "\n",
    sort_by_second: lambda rng: lines(rng, lambda: f"{word(rng)} {rng.randint(-3, 5)}"),
    robot: lambda rng: word(rng, 1, 20, "NSEW") + "\n",
    bank: lambda rng: lines(rng, lambda: f"{rng.choice(['in', 'out'])} {rng.randint(1, 90)}", 9),
    multiplication_table: lambda rng: f"{rng.randint(1, 9)}\n",
    column_sums: table,
    anagrams: lambda rng: lines(rng, lambda: pair_of_words(rng)),
    minutes: times_of_day,
    queue: queue_lines,
    unique_digits: lambda rng: lines(rng, lambda: rng.randint(1, 9999), 9),
    histogram: lambda rng: " ".join(word(rng, 1, 1, "0123459") for _ in range(rng.randint(1, 15))) + "\n",
}
"""Problem -> function that draws the stdin of a test."""
