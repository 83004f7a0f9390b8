"""What must hold of the checkers of IFEval: each tells a text that follows its instruction from one that does not."""

from typing import Any

import pytest

from tinker_cookbook.eval.benchmarks import instructions
from tinker_cookbook.eval.benchmarks.instructions import CHECKERS, LANGUAGE, check_kinds, check_packages, follows
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError

CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "keywords:existence": [({"keywords": ["cat", "C++"]}, ["A Cat in c++"], ["a cat", "a dog in C+"])],
    "keywords:frequency": [
        ({"keyword": "cat", "relation": "at least", "frequency": 2}, ["Cat, cat"], ["cat"]),
        ({"keyword": "cat", "relation": "less than", "frequency": 2}, ["cat", "dog"], ["cat cat"]),
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["cat"]}, ["category"], ["The CAT.", "a cat"])],
    "keywords:letter_frequency": [
        ({"letter": "e", "let_relation": "at least", "let_frequency": 3}, ["Eee"], ["ee"]),
        ({"letter": "!", "let_relation": "less than", "let_frequency": 1}, ["no"], ["yes!"]),
    ],
    "length_constraints:number_sentences": [
        (
            {"relation": "at least", "num_sentences": 2},
            ["One. Two!", 'He said "No." Then left.'],
            ["Version 2.5 is out."],
        ),
        ({"relation": "less than", "num_sentences": 2}, ["One"], ["One? Two."]),
    ],
    "length_constraints:number_words": [
        ({"relation": "at least", "num_words": 3}, ["one two, three"], ["one - two", "one two"]),
        ({"relation": "less than", "num_words": 3}, ["one two"], ["one two three"]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["a\n***\nb", "***\na\n\nb\n***\nc\n***"],
            ["a\n\nb", "a\n***\n***\nb", "a***b***c", "a"],
        )
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
            ["a\n\nWeekend, at last", 'a\n\n"weekend" it is'],
            ["weekend\n\nb", "a\n\nweekends", "a\n\nb\n\nweekend", "a\n\nthe weekend", "a\nweekend"],
        )
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, ["[name], [address]", "[a][b]"], ["[name]", "(a) (b)", "[a\n] b ]"])
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, ["Yours\nP.S. one more", "p. s. more"], ["PS more", "Yours", "stop.s."]),
        ({"postscript_marker": "P.P.S"}, ["Bye\nP.P.S and"], ["Bye\nP.S. and"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* a\n* b", "Things:\n - a\n - b"],
            ["* a", "* a\n* b\n* c", "**bold** a\n**bold** b", "1. a\n2. b"],
        )
    ],
    "detectable_format:constrained_response": [
        ({}, ["My answer is yes.", "Well. My answer is maybe."], ["My answer is Yes", "yes", "My answer is perhaps."])
    ],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, ["*a* and *b*", "**a** and *b*"], ["*a*", "**a**", "* a\n* b\n", "**** *a*", "* * * *"])
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Section", "num_sections": 2},
            ["Section 1\na\nSection 2\nb"],
            ["Section 1", "SECTION 1\nSECTION 2", "Section one, Section two"],
        )
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[1]\n```"],
            ["{'a': 1}", 'Here: {"a": 1}', "```json\n```", "[" * 9999],
        )
    ],
    "detectable_format:title": [({}, ["<<A poem>>\nx"], ["< A poem >", "<<>>", "<< >>", "<<a\nb>>", "# A poem"])],
    "combination:two_responses": [
        ({}, ["a******b", "a\n******\nb\n******"], ["a", "a******a", "a******b******c", "a***b"])
    ],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": "Why is it?"}, ["why is it?\nBecause."], ["Because. Why is it?", "Why is"])
    ],
    "startend:end_checker": [
        ({"end_phrase": "The end."}, ["So. the END.", '"Bye. The end."'], ["The end. Or not", "end."])
    ],
    "startend:quotation": [({}, ['"All of it."', ' "a" '], ['"', '"a', "'a'", 'a "b"'])],
    "change_case:capital_word_frequency": [
        (
            {"capital_relation": "at least", "capital_frequency": 2},
            ["A BIG dog", "WELL-KNOWN NASA"],
            ["A dog", "Big Dog"],
        ),
        ({"capital_relation": "less than", "capital_frequency": 1}, ["Big dog"], ["BIG dog"]),
    ],
    "change_case:english_capital": [({}, ["ALL OF IT, 3!"], ["ALL OF it", "123"])],
    "change_case:english_lowercase": [({}, ["all of it, 3!"], ["All of it", "123"])],
    "punctuation:no_comma": [({}, ["none; here"], ["one, here"])],
}


@pytest.mark.parametrize("kind", CASES)
def test_texts_that_follow_and_texts_that_do_not(kind: str) -> None:
    for asked, right, wrong in CASES[kind]:
        assert [text for text in right if not follows(text, kind, asked)] == []
        assert [text for text in wrong if follows(text, kind, asked)] == []
        assert not follows(" \n", kind, asked)


def test_every_kind_has_cases() -> None:
    assert len(CHECKERS) == 25 and {*CHECKERS} - {*CASES} == {LANGUAGE}


def test_the_language_is_left_to_langdetect(monkeypatch: pytest.MonkeyPatch) -> None:
    class Langdetect:
        LangDetectException = LookupError

        class DetectorFactory:
            seed = None

        @staticmethod
        def detect(text: str) -> str:
            if text.isdecimal():
                raise LookupError
            return "de" if "der" in text else "en"

    monkeypatch.setattr(instructions.importlib, "import_module", lambda name: Langdetect)
    assert follows("der Hund", LANGUAGE, {"language": "de"}) and Langdetect.DetectorFactory.seed == 0
    assert not follows("the dog", LANGUAGE, {"language": "de"})
    assert follows("123", LANGUAGE, {"language": "de"})


def test_what_cannot_be_graded_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataFormatError, match=r"'count:unique'.*startend:quotation"):
        check_kinds(["punctuation:no_comma", "count:unique"])
    with pytest.raises(DataFormatError, match=r"no argument 'keywords'; it has keyword$"):
        follows("a", "keywords:existence", {"keyword": "a"})
    with pytest.raises(DataFormatError, match="relation='at most'"):
        follows("a", "length_constraints:number_words", {"relation": "at most", "num_words": 1})
    monkeypatch.setattr(instructions.importlib.util, "find_spec", lambda name: None)
    check_packages(["punctuation:no_comma"])
    with pytest.raises(ConfigurationError, match="pip install langdetect"):
        check_packages([LANGUAGE])


def test_loose_variants_drop_lines_and_asterisks() -> None:
    assert set(instructions.loose_variants("Sure:\n**a**\nBye")) == {
        "Sure:\n**a**\nBye",
        "**a**\nBye",
        "Sure:\n**a**",
        "**a**",
        "Sure:\na\nBye",
        "a\nBye",
        "Sure:\na",
        "a",
    }
