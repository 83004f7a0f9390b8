"""Rows of decisions and forecasts, their datums, and what is held out."""

import json
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.debate.arena import make_renderer
from tinker_cookbook.data.rows import Row
from tinker_cookbook.decisions.data import (
    DATASETS,
    DECISION,
    EXPECTED,
    Decision,
    DecisionDatasetBuilder,
    decision_datums,
    load_rows,
    read_decision,
    split_decisions,
)
from tinker_cookbook.decisions.forecasts import (
    ForecastDatasetBuilder,
    read_forecast,
    reliability,
    split_by_date,
    verification,
)
from tinker_cookbook.decisions.shipped import marbles, rain
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.renderers import Message, TrainOnWhat
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

RENDERER = make_renderer("qwen3_instruct")
COIN = {"question": "Heads or tails?", "choices": ["heads", "tails"]}


def read(**content: Any) -> Decision:
    return read_decision(Row("here", 0, content))


class TestRows:
    def test_an_outcome_by_its_text_or_its_number(self) -> None:
        assert read(**COIN, outcome="tails").target == read(**COIN, outcome=1).target == (0.0, 1.0)
        assert read(**COIN, probabilities=[0.25, 0.75]).target == (0.25, 0.75)
        assert read(**COIN, outcome=0).messages == (Message(role="user", content="Heads or tails?"),)

    def test_messages_in_place_of_a_question(self) -> None:
        given = [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "Well?"}]
        row = read(messages=given, choices=["a", "b"], outcome="a")
        assert [message["content"] for message in row.messages] == ["Be fair.", "Well?"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"question": "?", "choices": ["a"], "outcome": 0}, "at least two texts"),
            ({"question": "?", "choices": ["a", "a"], "outcome": 0}, "given twice"),
            ({**COIN}, "either 'outcome' or 'probabilities'"),
            ({**COIN, "outcome": 0, "probabilities": [1, 0]}, "either 'outcome' or 'probabilities'"),
            ({**COIN, "outcome": "edge"}, "none of"),
            ({**COIN, "outcome": 2}, "none of"),
            ({**COIN, "outcome": True}, "its number, got True"),
            ({**COIN, "probabilities": [0.5, 0.6]}, "add up to 1"),
            ({**COIN, "probabilities": [1.5, -0.5]}, "add up to 1"),
            ({**COIN, "probabilities": [1.0]}, "a list of 2 numbers"),
            ({"choices": ["a", "b"], "outcome": 0}, "has no 'question'"),
            ({"messages": "hi", "choices": ["a", "b"], "outcome": 0}, "'messages' must be a list"),
        ],
    )
    def test_what_is_none(self, content: dict[str, Any], message: str) -> None:
        with pytest.raises(DataFormatError, match=message):
            read(**content)

    def test_a_file_names_the_line(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in ({**COIN, "outcome": 0}, {**COIN, "outcome": 5})))
        with pytest.raises(DataFormatError, match=r"mine.jsonl:2: 'outcome' is 5"):
            load_rows(str(file), read_decision, EXPECTED, DATASETS)

    def test_a_function_and_an_unknown_name(self) -> None:
        train, test = load_rows(lambda: [{**COIN, "outcome": 0}], read_decision, EXPECTED, DATASETS)
        assert len(train) == 1 and test == []
        with pytest.raises(ConfigurationError, match="marbles"):
            load_rows("marble", read_decision, EXPECTED, DATASETS)


class TestDatums:
    ROW = Decision((Message(role="user", content="Which?"),), ("red", "dark blue", "red wine"), (0.25, 0.75, 0.0))

    def test_a_datum_for_each_choice_with_its_end(self) -> None:
        """The end counts, so that a choice that another one begins with is not more likely for it."""
        datums = decision_datums(self.ROW, RENDERER, None)
        scored = []
        for datum in datums:
            weights = datum.loss_fn_inputs["weights"].tolist()
            ids = [i for i, w in zip(datum.loss_fn_inputs["target_tokens"].tolist(), weights, strict=True) if w]
            scored.append(decode_tokens(RENDERER.tokenizer, ids))
        assert scored == [f"{choice}<|im_end|>" for choice in self.ROW.choices]
        assert [datum.loss_fn_inputs[DECISION].tolist() for datum in datums] == [
            [3, 0, 0.25],
            [3, 1, 0.75],
            [3, 2, 0.0],
        ]

    def test_they_are_the_tokens_of_a_conversation(self) -> None:
        (first, *_) = decision_datums(self.ROW, RENDERER, None)
        reply: Message = {"role": "assistant", "content": "red"}
        whole, _ = RENDERER.build_supervised_example([*self.ROW.messages, reply], TrainOnWhat.LAST_ASSISTANT_MESSAGE)
        assert [*first.model_input.to_ints(), first.loss_fn_inputs["target_tokens"].tolist()[-1]] == whole.to_ints()

    def test_taken_apart_again(self) -> None:
        data = [*decision_datums(self.ROW, RENDERER, None), *decision_datums(read(**COIN, outcome=1), RENDERER, None)]
        plain, targets = split_decisions(data)
        assert targets == [[0.25, 0.75, 0.0], [0.0, 1.0]]
        assert all(set(datum.loss_fn_inputs) == {"target_tokens", "weights"} for datum in plain)
        for wrong in (data[:4], data[1:], data[::-1], plain):
            with pytest.raises(DataValidationError):
                split_decisions(wrong)

    def test_no_choice_is_cut_off(self) -> None:
        with pytest.raises(DataValidationError, match="raise max_length=4"):
            decision_datums(self.ROW, RENDERER, 4)


def settings(batch_size: int = 8) -> ChatDatasetBuilderCommonConfig:
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer="tiny_chat", renderer_name="qwen3_instruct", max_length=None, batch_size=batch_size
    )


class TestShipped:
    def test_no_held_out_bag_is_trained_on(self) -> None:
        train, test = marbles()
        assert {row["question"] for row in train}.isdisjoint(row["question"] for row in test)
        assert marbles() == (train, test), "always the same"
        of_bag = [row["outcome"] for row in train if row["question"].startswith("9 red, 1 blue")]
        assert len(of_bag) in (0, 40) and (not of_bag or of_bag.count("red") > 25)

    def test_batches_are_whole_decisions(self) -> None:
        train, test = DecisionDatasetBuilder(common_config=settings(), dataset="marbles")()
        assert test is not None and len(train.get_batch(0)) == 16
        assert len(split_decisions(train.get_batch(0))[1]) == 8

    def test_a_dataset_without_test_rows_is_divided(self) -> None:
        rows = [{**COIN, "outcome": i % 2} for i in range(40)]
        train, test = DecisionDatasetBuilder(common_config=settings(), dataset=lambda: rows, test_size=8).sides()
        assert (len(train), len(test)) == (32, 8)

    def test_rain_comes_as_often_as_its_probability_says(self) -> None:
        rows = rain()
        wet = [row["outcome"] for row in rows]
        expected = sum(row["probability"] for row in rows) / len(rows)
        assert sum(wet) / len(wet) == pytest.approx(expected, abs=0.03) and len(rows) == 4000


class TestForecasts:
    ROWS: ClassVar = [
        read_forecast(Row("x", 0, {"question": "?", "date": f"2025-01-{day:02d}", "outcome": day % 2 == 0}))
        for day in range(1, 11)
    ]

    def test_the_last_dates_are_held_out(self) -> None:
        train, test = split_by_date(self.ROWS, None)
        assert max(row.asked for row in train) < min(row.asked for row in test) == date(2025, 1, 9)
        train, test = split_by_date(self.ROWS, date(2025, 1, 4))
        assert (len(train), len(test)) == (3, 7)

    @pytest.mark.parametrize("cutoff", [date(2024, 1, 1), date(2026, 1, 1)])
    def test_a_cutoff_that_leaves_a_side_empty(self, cutoff: date) -> None:
        with pytest.raises(ConfigurationError, match="choose a date between 2025-01-01 and 2025-01-10"):
            split_by_date(self.ROWS, cutoff)

    @pytest.mark.parametrize(("given", "outcome"), [(True, True), ("no", False), (1, True), ("False", False)])
    def test_outcomes(self, given: Any, outcome: bool) -> None:
        row = read_forecast(Row("x", 0, {"question": "?", "date": "2025-01-01T10:00", "outcome": given}))
        assert row.outcome is outcome and row.asked == date(2025, 1, 1)
        assert row.decision.target == (float(outcome), float(not outcome))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"outcome": "maybe"}, "true or false"),
            ({"date": "May"}, "as 2025-03-01"),
            ({"probability": 2}, "from 0 to 1"),
        ],
    )
    def test_what_is_none(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(DataFormatError, match=message):
            read_forecast(Row("x", 0, {"question": "?", "date": "2025-01-01", "outcome": True} | change))

    @pytest.mark.parametrize(
        ("keys", "message"),
        [({"cutoff": "June"}, "must be a date"), ({"cutoff": "2025-01-01", "test_dataset": "x.jsonl"}, "one of them")],
    )
    def test_mistakes(self, keys: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            ForecastDatasetBuilder(common_config=settings(), dataset="rain", **keys)

    def test_verification_by_hand(self) -> None:
        rows = self.ROWS[:2]  # no, yes
        scores = verification([0.25, 0.75], rows, 0.5)
        assert scores["brier"] == pytest.approx(2 * 0.25**2) and scores["reference_brier"] == pytest.approx(0.5)
        assert scores["skill"] == pytest.approx(0.75) and scores["gain"] == pytest.approx(0.375)
        assert "known_brier" not in scores

    def test_reliability_has_a_row_for_each_bin(self) -> None:
        table = reliability([0.05, 0.31, 0.33, 1.0], self.ROWS[:4])
        assert [row[:3] for row in table] == [
            ["0.0 to 0.1", "1", "0.05"],
            ["0.3 to 0.4", "2", "0.32"],
            ["0.9 to 1.0", "1", "1.00"],
        ]
        assert table[1][3].startswith("0.50 [")
