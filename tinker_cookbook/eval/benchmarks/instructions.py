"""Checkers of verifiable instructions: the 25 kinds of IFEval (Zhou et al. 2023, arXiv:2311.07911).

A checker tells whether a text follows an instruction with the dataset's arguments. Words are runs of letters, digits and
underscores. A sentence ends with . ! or ? before white space; the paper uses a tokenizer.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

Arguments = Mapping[str, Any]
Checker = Callable[[str, Arguments], bool]

LANGUAGE = "language:response_language"
"""Needs the package langdetect."""


def _compare(count: int, relation: str, wanted: int) -> bool:
    if relation not in ("at least", "less than"):
        raise DataFormatError(f"relation={relation!r}: must be 'at least' or 'less than'")
    return count >= wanted if relation == "at least" else count < wanted


def _count(text: str, phrase: str) -> int:
    return len(re.findall(re.escape(phrase), text, re.IGNORECASE))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def existence(text: str, asked: Arguments) -> bool:
    """All keywords occur, in any case."""
    return all(_count(text, keyword) for keyword in asked["keywords"])


def frequency(text: str, asked: Arguments) -> bool:
    """A keyword occurs that often."""
    return _compare(_count(text, asked["keyword"].strip()), asked["relation"], asked["frequency"])


def forbidden_words(text: str, asked: Arguments) -> bool:
    """None of the words occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in asked["forbidden_words"])


def letter_frequency(text: str, asked: Arguments) -> bool:
    """A letter occurs that often, in any case."""
    return _compare(text.lower().count(asked["letter"].lower()), asked["let_relation"], asked["let_frequency"])


def number_sentences(text: str, asked: Arguments) -> bool:
    """There are that many sentences."""
    sentences = [part for part in re.split(r"(?<=[.!?])[\"')\]]?\s+", text.strip()) if _words(part)]
    return _compare(len(sentences), asked["relation"], asked["num_sentences"])


def number_words(text: str, asked: Arguments) -> bool:
    """There are that many words."""
    return _compare(len(_words(text)), asked["relation"], asked["num_words"])


def number_paragraphs(text: str, asked: Arguments) -> bool:
    """There are exactly that many paragraphs, separated by ***, none of them empty."""
    paragraphs = _split_at(text, "***")
    return paragraphs is not None and len(paragraphs) == asked["num_paragraphs"]


def _split_at(text: str, divider: str) -> list[str] | None:
    """Split at the divider, without empty parts at the ends; None if an inner part is empty."""
    parts = [part.strip() for part in text.split(divider)]
    parts = parts[0 if parts[0] else 1 :]
    if parts and not parts[-1]:
        parts.pop()
    return parts if all(parts) else None


def nth_paragraph_first_word(text: str, asked: Arguments) -> bool:
    """There are exactly that many paragraphs, separated by empty lines, and the nth begins with the word."""
    paragraphs = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    nth = asked["nth_paragraph"]
    if len(paragraphs) != asked["num_paragraphs"] or not 1 <= nth <= len(paragraphs):
        return False
    first = paragraphs[nth - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", first)[0].lower() == asked["first_word"].lower()


def number_placeholders(text: str, asked: Arguments) -> bool:
    """There are at least that many [placeholders]."""
    return len(re.findall(r"\[[^\]\n]*\]", text)) >= asked["num_placeholders"]


def postscript(text: str, asked: Arguments) -> bool:
    """There is a postscript with this marker: P.S. or P.P.S; spaces between its letters do not matter."""
    marker = re.sub(r"[.\s]", "", asked["postscript_marker"])
    ending = r"\." if asked["postscript_marker"].strip().endswith(".") else ""
    return re.search(r"\b" + r"\.\s?".join(map(re.escape, marker)) + ending, text, re.IGNORECASE) is not None


def number_bullet_lists(text: str, asked: Arguments) -> bool:
    """There are exactly that many lines that begin with * or -."""
    return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-).*$", text, re.MULTILINE)) == asked["num_bullets"]


def constrained_response(text: str, asked: Arguments) -> bool:
    """The text has one of the three answers that the prompts allow."""
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


def number_highlighted_sections(text: str, asked: Arguments) -> bool:
    """There are at least that many *highlighted* or **highlighted** passages, each within a line and not empty."""
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(bool(double.strip() or single.strip()) for double, single in found) >= asked["num_highlights"]


def multiple_sections(text: str, asked: Arguments) -> bool:
    """There are at least that many numbered section headings, as in Section 1."""
    return len(re.findall(rf"{re.escape(asked['section_spliter'])}\s?\d+", text)) >= asked["num_sections"]


def json_format(text: str, asked: Arguments) -> bool:
    """The whole text is JSON, with or without a code block around it."""
    inner = text.strip()
    if inner.startswith("```") and inner.endswith("```") and len(inner) >= 6:
        inner = re.sub(r"^json", "", inner[3:-3].strip(), flags=re.IGNORECASE)
    try:
        json.loads(inner)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str, asked: Arguments) -> bool:
    """There is a title between << and >>, on one line."""
    return any(inner.strip("<> \t") for inner in re.findall(r"<<([^\n>]+)>>", text))


def two_responses(text: str, asked: Arguments) -> bool:
    """There are two different responses, separated by six asterisks."""
    parts = _split_at(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(text: str, asked: Arguments) -> bool:
    """The text begins with the prompt to repeat, in any case."""
    return text.strip().lower().startswith(asked["prompt_to_repeat"].strip().lower())


def end_checker(text: str, asked: Arguments) -> bool:
    """The text ends with the phrase, in any case; a quotation mark at the end does not matter."""
    return text.strip().strip('"').lower().endswith(asked["end_phrase"].strip().lower())


def quotation(text: str, asked: Arguments) -> bool:
    """The whole text is between double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(text: str, asked: Arguments) -> bool:
    """There are that many words in capitals."""
    capital = [word for word in re.findall(r"[\w'-]+", text) if word.isupper()]
    return _compare(len(capital), asked["capital_relation"], asked["capital_frequency"])


def english_capital(text: str, asked: Arguments) -> bool:
    """All letters are capital; the language is not checked."""
    return text.isupper()


def english_lowercase(text: str, asked: Arguments) -> bool:
    """No letter is capital; the language is not checked."""
    return text.islower()


def no_comma(text: str, asked: Arguments) -> bool:
    """There is no comma."""
    return "," not in text


def response_language(text: str, asked: Arguments) -> bool:
    """The text is in this language (ISO 639-1), according to langdetect with a fixed seed; a text without any language
    counts as right, as in the paper's code.
    """
    langdetect: Any = importlib.import_module("langdetect")
    langdetect.DetectorFactory.seed = 0
    try:
        return langdetect.detect(text) == asked["language"]
    except langdetect.LangDetectException:
        return True


CHECKERS: dict[str, Checker] = {
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "combination:repeat_prompt": repeat_prompt,
    "combination:two_responses": two_responses,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:json_format": json_format,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:title": title,
    "keywords:existence": existence,
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": frequency,
    "keywords:letter_frequency": letter_frequency,
    LANGUAGE: response_language,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": number_words,
    "punctuation:no_comma": no_comma,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
}
"""Id of a kind of instruction, as in the dataset -> its checker."""


def check_kinds(kinds: Sequence[str]) -> None:
    """Check that each kind has a checker. Raises DataFormatError."""
    for kind in kinds:
        if kind not in CHECKERS:
            raise DataFormatError(f"instruction {kind!r} has no checker; there are {', '.join(CHECKERS)}")


def check_packages(kinds: Iterable[str]) -> None:
    """Check that these kinds can be graded here. Raises ConfigurationError if langdetect is needed and not installed."""
    if LANGUAGE in kinds and importlib.util.find_spec("langdetect") is None:
        raise ConfigurationError(f"instruction {LANGUAGE} needs the package langdetect: pip install langdetect")


def follows(text: str, kind: str, asked: Arguments) -> bool:
    """Whether a text follows an instruction. An empty text follows none.

    Raises:
        DataFormatError: an argument is missing.
    """
    if not text.strip():
        return False
    try:
        return CHECKERS[kind](text, asked)
    except KeyError as error:
        raise DataFormatError(f"instruction {kind!r}: has no argument {error}; it has {', '.join(asked)}") from error


def loose_variants(text: str) -> list[str]:
    """The text and its variants for the paper's loose accuracy: without the first line, the last line or both, each also
    without asterisks.
    """
    lines = text.split("\n")
    cut = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(part).strip() for part in cut]
    return [text, *texts[1:], *(one.replace("*", "") for one in [text, *texts[1:]])]
