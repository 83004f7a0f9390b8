"""Forty problems that ask for a function: its docstring is the statement, its body the reference solution.

`INPUTS` has functions that draw a test's arguments. The first tests of a problem are its examples.
"""

# ruff: noqa: B905 (solutions are as a learner would write them)

import random
import string
from collections.abc import Callable
from typing import Any

Draw = Callable[[random.Random], list[Any]]


def running_sums(numbers):
    """Given a list of integers, return the list of the sums of its first one, first two, ... elements."""
    total, sums = 0, []
    for number in numbers:
        total += number
        sums.append(total)
    return sums


def count_vowels(text):
    """Return how many letters of the text are vowels (a, e, i, o, u), in upper or lower case."""
    return sum(letter in "aeiou" for letter in text.lower())


def second_largest(numbers):
    """Return the second largest of the different values in a list of integers, or None if all are the same."""
    values = sorted(set(numbers))
    return values[-2] if len(values) > 1 else None


def is_rotation(first, second):
    """Return whether the second word is the first one with some letters moved from its beginning to its end."""
    return len(first) == len(second) and second in first + first


def digits_sum(number):
    """Return the sum of the decimal digits of an integer. The sign of a negative one does not count."""
    return sum(int(digit) for digit in str(abs(number)))


def longest_run(values):
    """Return the length of the longest run of equal neighbours in a list; 0 for an empty list."""
    best = length = 0
    for i, value in enumerate(values):
        length = length + 1 if i and value == values[i - 1] else 1
        best = max(best, length)
    return best


def merge_sorted(first, second):
    """Two lists are sorted in ascending order. Return one sorted list with all their elements."""
    return sorted(first + second)


def missing_number(numbers):
    """A list has the integers from 0 to n in some order, but for one. Return the one that is missing."""
    n = len(numbers)
    return n * (n + 1) // 2 - sum(numbers)


def caesar(text, shift):
    """Move each letter a to z of the text by `shift` places in the alphabet, around its end; keep everything else."""
    moved = ""
    for letter in text:
        if "a" <= letter <= "z":
            letter = chr((ord(letter) - 97 + shift) % 26 + 97)
        moved += letter
    return moved


def flatten_once(lists):
    """Return one list with the elements of the lists in a list, in order."""
    return [element for inner in lists for element in inner]


def balanced(text):
    """Return whether the brackets ()[]{} in the text are balanced. Other characters do not count."""
    closing, opened = {")": "(", "]": "[", "}": "{"}, []
    for letter in text:
        if letter in "([{":
            opened.append(letter)
        elif letter in closing and (not opened or opened.pop() != closing[letter]):
            return False
    return not opened


def to_base(number, base):
    """Write a non-negative integer in a base from 2 to 10, as a text."""
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = str(digit) + digits
    return digits or "0"


def word_lengths(text):
    """Return a dictionary from each word of the text to its length. Words are separated by spaces."""
    return {word: len(word) for word in text.split()}


def rotate_right(values, steps):
    """Return the list with its last element moved to the front, `steps` times."""
    steps = steps % len(values) if values else 0
    return values[len(values) - steps :] + values[: len(values) - steps]


def gcd_of(numbers):
    """Return the greatest common divisor of a list of positive integers."""
    result = 0
    for number in numbers:
        while number:
            result, number = number, result % number
    return result


def transpose(rows):
    """Return the transpose of a matrix, a list of rows of the same length."""
    return [list(column) for column in zip(*rows)]


def run_lengths(text):
    """Compress a text: each run of the same letter becomes the letter and the length of the run, as in a3b1."""
    packed, i = "", 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        packed, i = packed + f"{text[i]}{j - i}", j
    return packed


def primes_up_to(limit):
    """Return all prime numbers up to and including the limit, in ascending order."""
    return [n for n in range(2, limit + 1) if all(n % d for d in range(2, int(n**0.5) + 1))]


def best_profit(prices):
    """You buy once and sell later. Return the largest profit for a list of prices by day; 0 if there is none."""
    best, lowest = 0, prices[0]
    for price in prices:
        lowest = min(lowest, price)
        best = max(best, price - lowest)
    return best


def common_prefix(words):
    """Return the longest text that all words in a list begin with."""
    prefix = words[0]
    while not all(word.startswith(prefix) for word in words):
        prefix = prefix[:-1]
    return prefix


def largest_block_sum(numbers):
    """Return the largest sum of a non-empty block of neighbours in a list of integers."""
    best = here = numbers[0]
    for number in numbers[1:]:
        here = max(number, here + number)
        best = max(best, here)
    return best


def group_by_first(words):
    """Return a dictionary from each first letter to the list of the words that begin with it, in their order."""
    groups = {}
    for word in words:
        groups.setdefault(word[0], []).append(word)
    return groups


def collatz_steps(number):
    """Halve an even number; triple an odd one and add 1. Return after how many steps a positive number is 1."""
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def two_that_add(numbers, target):
    """Return the indices [i, j], i < j, of two numbers that add up to the target; the smallest i; None if there are none."""
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] + numbers[j] == target:
                return [i, j]
    return None


def median(numbers):
    """Return the median of a non-empty list of integers; of an even number of them the mean of the middle two."""
    ordered, middle = sorted(numbers), len(numbers) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def is_leap(year):
    """Return whether a year has 366 days: every fourth has, but not every hundredth, except for every four hundredth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def spiral(rows):
    """Return the elements of a matrix on the way around it, clockwise from the top left corner to the inside."""
    rows, seen = [list(row) for row in rows], []
    while rows:
        seen += rows.pop(0)
        rows = [list(row) for row in zip(*rows)][::-1]
    return seen


def roman(number):
    """Write a number from 1 to 3999 in Roman numerals."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    names = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    text = ""
    for value, name in zip(values, names):
        text += name * (number // value)
        number %= value
    return text


def without_duplicates(values):
    """Return the list without repetitions: of equal elements only the first one stays."""
    kept = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return kept


def ways_up(stairs):
    """You climb one or two stairs at a time. Return in how many ways you can climb a number of stairs."""
    one, two = 1, 1
    for _ in range(stairs):
        one, two = two, one + two
    return one


def hamming(first, second):
    """Return at how many places two texts of the same length differ."""
    return sum(a != b for a, b in zip(first, second))


def capitalise(text):
    """Return the text with the first letter of each word in upper case and the others in lower case, one space between."""
    return " ".join(word[0].upper() + word[1:].lower() for word in text.split())


def overlap(first, second):
    """Two intervals are [start, end]. Return the length that they have in common; 0 if none."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def edit_distance(first, second):
    """Return the least number of letters to insert, delete or replace that makes the second word of the first."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        above, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    return row[-1]


def count_islands(rows):
    """A map is a list of texts of # (land) and . (water). Return how many islands it has; land touches along sides."""
    land = {(y, x) for y, row in enumerate(rows) for x, letter in enumerate(row) if letter == "#"}
    islands = 0
    while land:
        islands, waiting = islands + 1, [land.pop()]
        while waiting:
            y, x = waiting.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in land:
                    land.remove(near)
                    waiting.append(near)
    return islands


def evaluate_postfix(tokens):
    """Evaluate an expression in postfix notation: a list of texts, integers and the operators + - *."""
    stack = []
    for token in tokens:
        if token in ("+", "-", "*"):
            b, a = stack.pop(), stack.pop()
            stack.append(a + b if token == "+" else a - b if token == "-" else a * b)
        else:
            stack.append(int(token))
    return stack[0]


def next_day(year, month, day):
    """Return [year, month, day] of the day after a date of the Gregorian calendar."""
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    lengths = [31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    if day < lengths[month - 1]:
        return [year, month, day + 1]
    return [year, month + 1, 1] if month < 12 else [year + 1, 1, 1]


def coins_needed(coins, amount):
    """Return the least number of coins that make an amount, each kind as often as you like; None if it cannot be made."""
    best = [0] + [None] * amount
    for value in range(1, amount + 1):
        fewer = [best[value - coin] for coin in coins if coin <= value and best[value - coin] is not None]
        best[value] = min(fewer) + 1 if fewer else None
    return best[amount]


def moving_average(numbers, width):
    """Return the list of the means of each `width` neighbours in a list of integers."""
    return [sum(numbers[i : i + width]) / width for i in range(len(numbers) - width + 1)]


def longest_palindrome(text):
    """Return the length of the longest block of neighbouring letters that reads the same from both ends; 0 if empty."""
    best = 0
    for i in range(len(text)):
        for j in range(i + 1, len(text) + 1):
            if text[i:j] == text[i:j][::-1]:
                best = max(best, j - i)
    return best


def numbers(rng: random.Random, least: int = 1, most: int = 9, low: int = -20, high: int = 20) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def word(rng: random.Random, least: int = 1, most: int = 8, letters: str = string.ascii_lowercase) -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(least, most)))


def words(rng: random.Random, least: int = 1, most: int = 6, letters: str = string.ascii_lowercase) -> list[str]:
    return [word(rng, letters=letters) for _ in range(rng.randint(least, most))]


def matrix(rng: random.Random) -> list[list[int]]:
    width = rng.randint(1, 5)
    return [[rng.randint(0, 99) for _ in range(width)] for _ in range(rng.randint(1, 5))]


def rotated(rng: random.Random) -> list[str]:
    text = word(rng, 2, letters="abc")
    cut = rng.randrange(len(text))
    return [text, text[cut:] + text[:cut] if rng.random() < 0.6 else word(rng, len(text), len(text), "abc")]


def all_but_one(rng: random.Random) -> list[list[int]]:
    values = list(range(rng.randint(2, 15)))
    values.remove(rng.choice(values))
    rng.shuffle(values)
    return [values]


def postfix(rng: random.Random) -> list[list[str]]:
    tokens = [str(rng.randint(0, 9))]
    for _ in range(rng.randint(1, 4)):
        tokens += [str(rng.randint(0, 9)), rng.choice("+-*")]
    return [tokens]


def beginnings(rng: random.Random) -> list[list[str]]:
    start = word(rng, 0, 4)
    return [[start + rest for rest in words(rng, 1, 4, "ab")]]


def date(rng: random.Random) -> list[int]:
    any_day = [2021, rng.randint(1, 12), rng.randint(1, 28)]
    return rng.choice([[rng.choice([1900, 2000, 2023, 2024]), 2, 28], [2019, 12, 31], any_day, [2022, 4, 30]])


def interval(rng: random.Random) -> list[int]:
    return sorted(rng.sample(range(30), 2))


INPUTS: dict[Callable[..., Any], Draw] = {
    running_sums: lambda rng: [numbers(rng, 0)],
    count_vowels: lambda rng: [" ".join(words(rng, letters="abeioutAEXz"))],
    second_largest: lambda rng: [numbers(rng, 1, 6, 0, 5)],
    is_rotation: rotated,
    digits_sum: lambda rng: [rng.randint(-99999, 99999)],
    longest_run: lambda rng: [numbers(rng, 0, 12, 0, 2)],
    merge_sorted: lambda rng: [sorted(numbers(rng, 0)), sorted(numbers(rng, 0))],
    missing_number: all_but_one,
    caesar: lambda rng: [" ".join(words(rng)) + rng.choice(["", "!", " 12"]), rng.randint(-30, 30)],
    flatten_once: lambda rng: [[numbers(rng, 0, 3) for _ in range(rng.randint(0, 4))]],
    balanced: lambda rng: [word(rng, 0, 7, "()[]{}x") if rng.random() < 0.5 else rng.choice(["(a[b]{})", "([{}])()", "{[(])}"])],
    to_base: lambda rng: [rng.choice([0, rng.randint(1, 5000)]), rng.randint(2, 10)],
    word_lengths: lambda rng: [" ".join(words(rng, 0))],
    rotate_right: lambda rng: [numbers(rng, 0), rng.randint(0, 15)],
    gcd_of: lambda rng: [[rng.randint(1, 9) * factor for factor in [rng.randint(1, 12)] * rng.randint(1, 5)]],
    transpose: lambda rng: [matrix(rng)],
    run_lengths: lambda rng: [word(rng, 0, 14, "ab")],
    primes_up_to: lambda rng: [rng.randint(0, 80)],
    best_profit: lambda rng: [numbers(rng, 1, 9, 1, 30)],
    common_prefix: beginnings,
    largest_block_sum: lambda rng: [numbers(rng)],
    group_by_first: lambda rng: [words(rng, 0, 7, "abc")],
    collatz_steps: lambda rng: [rng.randint(1, 300)],
    two_that_add: lambda rng: [numbers(rng, 2, 8, 0, 12), rng.randint(0, 24)],
    median: lambda rng: [numbers(rng)],
    is_leap: lambda rng: [rng.choice([rng.randint(1600, 2400), rng.randint(16, 24) * 100, rng.randint(400, 600) * 4])],
    spiral: lambda rng: [matrix(rng)],
    roman: lambda rng: [rng.randint(1, 3999)],
    without_duplicates: lambda rng: [numbers(rng, 0, 9, 0, 4)],
    ways_up: lambda rng: [rng.randint(0, 30)],
    hamming: lambda rng: [word(rng, (n := rng.randint(0, 9)), n, "ab"), word(rng, n, n, "ab")],
    capitalise: lambda rng: ["  ".join(words(rng, 1, 4, "abcDEF"))],
    overlap: lambda rng: [interval(rng), interval(rng)],
    edit_distance: lambda rng: [word(rng, 0, 7, "abc"), word(rng, 0, 7, "abc")],
    count_islands: lambda rng: [[word(rng, 6, 6, "#..") for _ in range(rng.randint(1, 6))]],
    evaluate_postfix: postfix,
    next_day: date,
    coins_needed: lambda rng: [rng.sample(range(2, 12), rng.randint(1, 3)), rng.randint(0, 40)],
    moving_average: lambda rng: [numbers(rng, 3, 9), rng.randint(1, 4)],
    longest_palindrome: lambda rng: [word(rng, 0, 10, "ab")],
}  # fmt: skip
"""Problem -> function that draws the arguments of a test."""
