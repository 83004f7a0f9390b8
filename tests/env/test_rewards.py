"""What a reply is worth: golden numbers of each reward function, mixtures of them, and how a reply is read."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from tests.env.scoring import score
from tinker_cookbook.env.reward_functions import (
    REWARDS,
    OfSolution,
    RewardSpec,
    compression,
    exact_match,
    fluency,
    length_penalty,
    rouge,
)
from tinker_cookbook.env.rewards import Weighted, read_value
from tinker_cookbook.env.task import TaskItem, parse_confidence, parse_solution
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, RewardError
from tinker_cookbook.utils.misc_utils import resolved

ARTICLE = "x" * 1000
TEN_WORDS = "one two three four five six seven eight nine ten."


class TestFunctions:
    @pytest.mark.parametrize(
        ("length", "expected"), [(0, 0.0), (1, 0.01), (50, 0.5), (100, 1.0), (200, 0.5), (1000, 0.1), (4000, 0.025)]
    )
    def test_compression_is_best_at_a_tenth(self, length: int, expected: float) -> None:
        assert compression("s" * length, ARTICLE, "") == pytest.approx(expected)

    def test_of_a_short_question_a_character_is_the_unit(self) -> None:
        assert compression("s", "", "") == compression("s", "q", "") == pytest.approx(0.1)
        assert compression("s", "qq", "") == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("solution", "reference"),
        [
            ("the cat sat", "the cat sat"),
            ("the cats were sitting", "the cat was sitting on the mat"),
            ("nothing alike", "the cat sat"),
            ("", "the cat sat"),
            ("Sitting, cats!", "cat sits"),
            ("was", "wa"),  # words of three letters stay as they are
        ],
    )
    def test_rouge_is_rouge_l_f1_with_stemming(self, solution: str, reference: str) -> None:
        expected = RougeScorer(["rougeL"], use_stemmer=True).score(reference, solution)["rougeL"].fmeasure
        assert rouge(solution, ARTICLE, reference) == pytest.approx(expected)

    def test_rouge_golden(self) -> None:
        # Longest common subsequence 2 of 3 and 4 words: precision 2/3, recall 2/4.
        assert rouge("the cat slept", "", "the cat sat down") == pytest.approx(4 / 7)

    @pytest.mark.parametrize(
        ("length", "expected"),
        [(0, 0.0), (25, 0.5), (50, 1.0), (300, 1.0), (500, 1.0), (750, 0.5), (1000, 0.0), (5000, 0.0)],
    )
    def test_length_penalty(self, length: int, expected: float) -> None:
        assert length_penalty("s" * length, "", "") == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("solution", "expected"),
        [
            ("", 0.0),
            ("...", 0.0),
            (TEN_WORDS, 0.5),  # one sentence of ten words
            (f"{TEN_WORDS} {TEN_WORDS}", 1.0),
            ("Short. Also short.", 0.5),
            ("Too short", 0.0),
            (" ".join([TEN_WORDS] * 5), 1.0),
            (" ".join([TEN_WORDS] * 6), 0.5),  # too many sentences
            (" ".join(["word"] * 40), 0.5),
            (" ".join(["word"] * 9), 0.0),
            (" ".join(["word"] * 41) + ". " + " ".join(["word"] * 41) + ".", 0.5),
            ("It is 3.5 degrees", 0.0),  # a point within a number ends no sentence
        ],
    )
    def test_fluency(self, solution: str, expected: float) -> None:
        assert fluency(solution, "", "") == expected

    @pytest.mark.parametrize(
        ("solution", "reference", "expected"),
        [("12", "12", 1.0), (" Paris ", "paris", 1.0), ("12.", "12", 0.0), ("", "12", 0.0), ("012", "12", 0.0)],
    )
    def test_exact_match(self, solution: str, reference: str, expected: float) -> None:
        assert exact_match(solution, "", reference) == expected

    @given(st.text(max_size=300), st.text(max_size=300), st.text(min_size=1, max_size=50))
    def test_every_reward_is_between_0_and_1(self, solution: str, question: str, reference: str) -> None:
        for name, function in REWARDS.items():
            if name == "embedding":
                continue  # needs a package
            assert 0.0 <= function(solution, question, reference) <= 1.0, name


class TestSpec:
    def test_weighted_mean_with_each_function_s_own_value(self) -> None:
        spec = RewardSpec.parse("compression:0.5, rouge:0.3")
        reward, scores = asyncio.run(spec("the cat slept", "y" * 260, "the cat sat down", ""))
        assert scores == pytest.approx({"compression": 0.5, "rouge": 4 / 7})
        assert reward == pytest.approx((0.5 * 0.5 + 0.3 * 4 / 7) / 0.8)

    def test_one_function_needs_no_weight(self) -> None:
        assert RewardSpec.parse("exact_match") == RewardSpec((Weighted("exact_match", 1.0, OfSolution(exact_match)),))
        assert asyncio.run(RewardSpec.parse("exact_match:7")("12", "", "12", ""))[0] == 1.0

    @pytest.mark.parametrize("solution", [None, ""])
    def test_without_a_solution_all_is_zero(self, solution: str | None) -> None:
        expected = (0.0, {"compression": 0.0, "fluency": 0.0})
        assert asyncio.run(RewardSpec.parse("compression,fluency")(solution, "q", "", "")) == expected

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            (
                "compresion:0.5",
                "'compresion' is unknown; use exact_match, compression, rouge, tfidf, embedding, length_penalty, fluency",
            ),
            ("", "is unknown"),
            ("rouge:0.5,", "is unknown"),
            ("rouge:much", "'much' is not a weight; write rouge:0.5"),
            ("rouge:", "'' is not a weight"),
            ("rouge:0", "weight of rouge must be positive"),
            ("rouge:-1", "weight of rouge must be positive"),
            ("rouge:nan", "weight of rouge must be positive"),
            ("rouge:inf", "weight of rouge must be positive"),
            ("rouge:0.5,rouge:0.5", "names a function twice"),
        ],
    )
    def test_mistakes_name_the_part_and_the_fix(self, text: str, complaint: str) -> None:
        with pytest.raises(ConfigurationError) as raised:
            RewardSpec.parse(text)
        assert "reward_fn=" in str(raised.value) and complaint in str(raised.value)


class TestOwn:
    """Functions of one's own: what they are given, and what is said when they fail."""

    REPLY = "I think so. <SOLUTION> 4 </SOLUTION>"

    def worth(self, function: Callable[..., Any], reply: str = REPLY) -> float:
        item = TaskItem("1", "2 + 2?", "4")
        return asyncio.run(resolved(get_task("qa", function).score(item, reply))).reward

    def test_who_asks_for_the_solution_gets_it(self) -> None:
        def solved(question: str, reply: str, answer: str, solution: str | None = None) -> float:
            return 1.0 if solution == answer and reply == self.REPLY else 0.25 if solution is None else 0.5

        async def solved_too(question: str, reply: str, answer: str, *, solution: str | None) -> float:
            return solved(question, reply, answer, solution)

        for function in (solved, solved_too):
            assert self.worth(function) == 1.0
            assert self.worth(function, "4") == 0.25
            assert self.worth(function, "<SOLUTION>5</SOLUTION>") == 0.5

    def test_a_second_parameter_of_that_name_stays_the_reply(self) -> None:
        def old(question: str, solution: str, answer: str) -> float:
            return float(solution == self.REPLY)

        assert self.worth(old) == 1.0

    def test_one_that_fails_is_named_with_its_line_and_what_it_was_given(self) -> None:
        def broken(question: str, reply: str, answer: str) -> float:
            raise KeyError("grade")

        with pytest.raises(RewardError) as raised:
            self.worth(broken)
        told = str(raised.value)
        assert told.startswith("reward_fn broken failed: KeyError: 'grade' (test_rewards.py, line ")
        assert "it was given question: str '2 + 2?'" in told and "answer: str '4'" in told


class TestReturned:
    """What a function may give back."""

    def test_a_number_or_a_number_and_metrics(self) -> None:
        assert read_value("reward_fn f", "f", True) == (1.0, {"f": 1.0})
        assert read_value("reward_fn f", "f", (0.5, {"a": 2, "b": False})) == (0.5, {"f": 0.5, "f/a": 2.0, "f/b": 0.0})
        assert read_value("reward_fn f", "f", (0.5, {})) == (0.5, {"f": 0.5})

    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            ((0.5, None), "reward_fn f: f is (0.5, None); it must be a finite number"),
            ((0.5, 1.0), "reward_fn f: f is (0.5, 1.0); it must be a finite number"),
            ((0.5, {}, {}), "reward_fn f: f is (0.5, {}, {}); it must be a finite number"),
            ((math.inf, {}), "reward_fn f: f is inf; it must be a finite number"),
            ((0.5, {"a": "1"}), "reward_fn f: f/a is '1'; it must be a finite number"),
            ("1", "reward_fn f: f is '1'; it must be a finite number"),
            (b"1", "reward_fn f: f is b'1'; it must be a finite number"),
            ([1.0], "reward_fn f: f is [1.0]; it must be a finite number"),
        ],
    )
    def test_anything_else_is_shown(self, returned: Any, said: str) -> None:
        with pytest.raises(DataValidationError) as raised:
            read_value("reward_fn f", "f", returned)
        assert str(raised.value) == said


class TestReading:
    @pytest.mark.parametrize(
        ("text", "solution"),
        [
            ("<SOLUTION>12</SOLUTION>", "12"),
            ("so <SOLUTION>\n two\nlines \n</SOLUTION> ok", "two\nlines"),
            ("<SOLUTION>1</SOLUTION><SOLUTION>2</SOLUTION>", "1"),
            ("<SOLUTION></SOLUTION>", ""),
            ("<SOLUTION>12", None),
            ("<solution>12</solution>", None),
            ("12", None),
        ],
    )
    def test_solution(self, text: str, solution: str | None) -> None:
        assert parse_solution(text) == solution

    @pytest.mark.parametrize(
        ("text", "confidence"),
        [
            ("<CONFIDENCE>0.25</CONFIDENCE>", 0.25),
            ("<CONFIDENCE> .5 </CONFIDENCE>", 0.5),
            ("<CONFIDENCE>1</CONFIDENCE>", 1.0),
            ("<CONFIDENCE>0</CONFIDENCE>", 0.0),
            ("<CONFIDENCE>1.01</CONFIDENCE>", None),
            ("<CONFIDENCE>-0.5</CONFIDENCE>", None),
            ("<CONFIDENCE>90%</CONFIDENCE>", None),
            ("<CONFIDENCE>high</CONFIDENCE>", None),
            ("0.5", None),
        ],
    )
    def test_confidence(self, text: str, confidence: float | None) -> None:
        assert parse_confidence(text) == confidence


class TestTasks:
    def test_qa_scores_a_reply(self) -> None:
        scored = score(get_task("qa"), TaskItem("i", "What is 7 + 5?", "12"), "Sure: <SOLUTION>12</SOLUTION>")
        assert (scored.reward, scored.correct) == (1.0, True)
        assert scored.metrics == {"correct": 1.0, "parsed": 1.0, "task_reward": 1.0, "reward/exact_match": 1.0}

    def test_qa_without_tags_is_wrong(self) -> None:
        scored = score(get_task("qa"), TaskItem("i", "What is 7 + 5?", "12"), "12")
        assert (scored.reward, scored.correct, scored.metrics["parsed"]) == (0.0, False, 0.0)

    def test_summary_has_a_reward_and_no_right(self) -> None:
        item = TaskItem("i", "y" * 260, "the cat sat down")
        scored = score(get_task("summary"), item, "<SOLUTION>the cat slept</SOLUTION>")
        assert scored.correct is None and scored.reward == pytest.approx((0.5 * 0.5 + 0.3 * 4 / 7) / 0.8)
        assert scored.metrics["summary_len"] == 13 and scored.metrics["article_len"] == 260
        assert scored.metrics["compression_ratio"] == pytest.approx(0.05)
        assert {"reward/compression", "reward/rouge", "task_reward", "parsed"} <= scored.metrics.keys()

    def test_a_judge_of_summaries_sees_the_first_2000_characters(self) -> None:
        task = get_task("summary")
        assert task.judge_context(TaskItem("i", "a" * 3000, "r")) == "a" * 2000
        assert get_task("qa").judge_context(TaskItem("i", "q" * 3000, "r")) == "q" * 3000

    def test_unknown_task(self) -> None:
        with pytest.raises(
            ConfigurationError,
            match=r"task='poetry' is unknown; use code, code_inputs, .*summary",
        ):
            get_task("poetry")
