"""Comparisons from files and datasets to datums: what is read, what is refused and where, and what trains."""

import json
from pathlib import Path
from typing import Any

import chz
import datasets
import pytest

from recipes.preference.data import ComparisonConfig, comparison_source
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError, DataValidationError
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import (
    ChatDatasetBuilderFromComparisons,
    ComparisonBuilderFromHF,
    ComparisonBuilderFromJsonl,
    ComparisonDatasetBuilder,
    read_comparisons,
)
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.renderers import Message, TrainOnWhat
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def line(label: str = "A", a: str = "Yes.", b: str = "No.", prompt: str = "Is it?") -> dict[str, Any]:
    comparison = {
        "prompt_conversation": [said("user", prompt)],
        "completion_A": [said("assistant", a)],
        "completion_B": [said("assistant", b)],
    }
    return {"comparison": comparison, "label": label}


def write(path: Path, *lines: dict[str, Any] | str) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in lines))
    return str(path)


def common(**changes: Any) -> ChatDatasetBuilderCommonConfig:
    base = {
        "model_name_for_tokenizer": TINY,
        "renderer_name": "qwen3_instruct",
        "max_length": 512,
        "batch_size": 2,
    }
    return ChatDatasetBuilderCommonConfig(**{**base, **changes})


def texts(data: list, key: str = "weights") -> list[str]:
    """The trained text of each datum."""
    tokenizer = get_tokenizer(TINY)
    found = []
    for datum in data:
        targets, weights = (datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", key))
        found.append(tokenizer.decode(targets[weights > 0].tolist()))
    return found


class TestLabels:
    def test_swapping_exchanges_the_sides_and_keeps_the_judgement(self) -> None:
        comparison = Comparison([said("user", "q")], [said("assistant", "a")], [said("assistant", "b")])
        for label, other in (("A", "B"), ("B", "A"), ("Tie", "Tie")):
            labeled = LabeledComparison(comparison, label)  # pyright: ignore[reportArgumentType]
            swapped = labeled.swap()
            assert swapped.label == other and swapped.comparison.completion_A == comparison.completion_B
            assert swapped.swap() == labeled
            assert (swapped.chosen, swapped.rejected) == (labeled.chosen, labeled.rejected)
        assert LabeledComparison(comparison, "B").chosen == [said("assistant", "b")]
        assert LabeledComparison(comparison, "B").rejected == [said("assistant", "a")]
        assert LabeledComparison(comparison, "Tie").chosen is None

    def test_another_label_is_refused(self) -> None:
        with pytest.raises(DataFormatError, match="label='C': must be one of A, B, Tie"):
            LabeledComparison(Comparison([], [], []), "C")  # pyright: ignore[reportArgumentType]


class TestJsonl:
    def test_the_shipped_file_is_read_and_split(self) -> None:
        path = str(EXAMPLE_DATA / "comparisons.jsonl")
        train, test = ComparisonBuilderFromJsonl(train_path=path, test_size=32).get_labeled_comparisons()
        assert test is not None and (len(train), len(test)) == (112, 32)
        questions = [json.dumps(one.comparison.prompt_conversation) for one in [*train, *test]]
        assert len(set(questions)) == 144
        again, _ = ComparisonBuilderFromJsonl(train_path=path, test_size=32).get_labeled_comparisons()
        assert again == train

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({"comparison": line()["comparison"]}, r":2: label=None: must be one of A, B, Tie"),
            ({**line(), "label": "C"}, r":2: label='C': must be one of A, B, Tie"),
            ({**line(), "comparison": "?"}, r":2: 'comparison' is '\?' and not an object"),
            ({"comparison": {"completion_B": []}, "label": "A"}, r":2: there is no 'prompt_conversation'"),
            (
                {"comparison": {**line()["comparison"], "completion_B": []}, "label": "A"},
                r":2: 'completion_B' must be a list with at least one",
            ),
            (
                {"comparison": {**line()["comparison"], "completion_A": [{"role": "assistant"}]}, "label": "A"},
                r":2: completion_A\[0\]: the key 'content' is missing",
            ),
        ],
    )
    def test_a_bad_line_is_named_with_its_place(self, tmp_path: Path, bad: dict | str, message: str) -> None:
        path = write(tmp_path / "pairs.jsonl", line(), bad)
        with pytest.raises(DataFormatError, match=message) as raised:
            read_comparisons(path)
        assert str(raised.value).startswith(f"{path}:2: ") and "expected {" in str(raised.value)

    def test_splits_that_cannot_be(self, tmp_path: Path) -> None:
        path = write(tmp_path / "pairs.jsonl", line(), line())
        with pytest.raises(ConfigurationError, match=r"test_size=2 leaves nothing to train on: .* has 2 rows"):
            ComparisonBuilderFromJsonl(train_path=path, test_size=2).get_rows()
        with pytest.raises(ConfigurationError, match="their own test set; set test_size=0"):
            ComparisonBuilderFromJsonl(train_path=path, test_path=path, test_size=1).get_rows()


class TestHuggingFace:
    def source(self, tmp_path: Path, rows: list[dict], **fields: Any) -> ComparisonBuilderFromHF:
        split = datasets.Dataset.from_list(rows)
        datasets.DatasetDict({"train": split}).save_to_disk(str(tmp_path / "set"))
        return ComparisonBuilderFromHF(dataset=str(tmp_path / "set"), shuffle_seed=None, **fields)

    @pytest.mark.parametrize("form", ["text", "messages", "whole conversations", "no prompt column"])
    def test_all_forms_give_the_same_comparison(self, tmp_path: Path, form: str) -> None:
        prompt, chosen, rejected = said("user", "Q?"), said("assistant", "good"), said("assistant", "bad")
        row: dict[str, Any] = {
            "text": {"prompt": "Q?", "chosen": "good", "rejected": "bad"},
            "messages": {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]},
            "whole conversations": {"prompt": "Q?", "chosen": [prompt, chosen], "rejected": [prompt, rejected]},
            "no prompt column": {"chosen": [prompt, chosen], "rejected": [prompt, rejected]},
        }[form]
        fields = {"prompt_column": None} if form == "no prompt column" else {}
        train, _ = self.source(tmp_path, [row], **fields).get_labeled_comparisons()
        (labeled,) = train
        assert labeled.comparison.prompt_conversation == [prompt]
        assert (labeled.chosen, labeled.rejected) == ([chosen], [rejected])

    def test_the_chosen_reply_stands_at_either_side(self, tmp_path: Path) -> None:
        rows = [{"prompt": f"{i}?", "chosen": "good", "rejected": "bad"} for i in range(40)]
        train, _ = self.source(tmp_path, rows).get_labeled_comparisons()
        assert 10 < sum(one.label == "A" for one in train) < 30

    @pytest.mark.parametrize(
        ("row", "fields", "message"),
        [
            ({"prompt": "q", "chosen": "a"}, {}, "there is no column 'rejected'; it has chosen, prompt"),
            ({"prompt": "q", "chosen": "a", "rejected": " "}, {}, "column 'rejected' must be text or a list"),
            ({"chosen": "a", "rejected": "b"}, {"prompt_column": None}, "no common prefix; name prompt_column"),
            ({"prompt": "q", "chosen": [{"role": "user", "content": "q"}], "rejected": [{"role": "user", "content": "q"}]},
             {}, "'chosen' has nothing after the prompt"),
            ({"prompt": "q", "chosen": [said("system", "s"), said("user", "q"), said("assistant", "a")], "rejected": "b"},
             {}, "'chosen' and 'prompt' have different prompts: after their common prefix comes a system message"),
            ({"chosen": [said("system", "s"), said("user", "q"), said("assistant", "a")],
              "rejected": [said("system", "s"), said("user", "r"), said("assistant", "b")]},
             {"prompt_column": None}, "'chosen' and the other reply have different prompts: .* a user message"),
        ],
    )  # fmt: skip
    def test_a_bad_row_is_named(self, tmp_path: Path, row: dict, fields: dict, message: str) -> None:
        with pytest.raises(DataFormatError, match=message) as raised:
            self.source(tmp_path, [row], **fields).get_rows()
        assert "[train][0]" in str(raised.value)

    def test_a_split_that_is_not_there(self, tmp_path: Path) -> None:
        source = self.source(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b"}], test_split="test")
        with pytest.raises(ConfigurationError, match=r"\[test\]: there is no such split; use one of train"):
            source.get_rows()


class TestPairs:
    def test_chosen_and_rejected_alternate_and_ties_are_left_out(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "p.jsonl", line("A", "a1", "b1"), line("Tie"), line("B", "a2", "b2"), line("A", "a3", "b3")
        )
        source = ComparisonBuilderFromJsonl(train_path=path, shuffle_seed=None)
        dataset, test = DPODatasetBuilderFromComparisons(common_config=common(), comparison_builder=source)()
        assert test is None and len(dataset) == 2
        assert [text.removesuffix("<|im_end|>") for text in texts(dataset.get_batch(0))] == ["a1", "b1", "b2", "a2"]
        assert len(dataset.get_batch(1)) == 2
        dataset.set_epoch(3)
        data = [datum for i in range(2) for datum in dataset.get_batch(i)]
        chosen = [text.removesuffix("<|im_end|>") for text in texts(data[::2])]
        assert sorted(chosen) == ["a1", "a3", "b2"]
        prompts = [datum.model_input.to_ints()[:3] for datum in data]
        assert prompts[::2] == prompts[1::2]

    def test_only_ties(self, tmp_path: Path) -> None:
        source = ComparisonBuilderFromJsonl(train_path=write(tmp_path / "p.jsonl", line("Tie")))
        with pytest.raises(ConfigurationError, match="all training comparisons are ties"):
            DPODatasetBuilderFromComparisons(common_config=common(), comparison_builder=source)()

    @pytest.mark.parametrize(
        ("row", "max_length", "message"),
        [
            (line("A", "same", "same"), 512, "chosen and rejected are the same"),
            (line("A", "Yes. " * 20 + "1", "Yes. " * 20 + "2"), 30, "are the same 30 tokens with max_length=30"),
            (line("A", prompt="long " * 40), 30, "max_length=30 leaves no token of the chosen reply"),
        ],
    )
    def test_a_pair_that_teaches_nothing_is_named(
        self, tmp_path: Path, row: dict, max_length: int, message: str
    ) -> None:
        path = write(tmp_path / "p.jsonl", line(), row)
        source = ComparisonBuilderFromJsonl(train_path=path, shuffle_seed=None)
        builder = DPODatasetBuilderFromComparisons(
            common_config=common(max_length=max_length), comparison_builder=source
        )
        with pytest.raises(DataValidationError, match=message) as raised:
            builder()[0].get_batch(0)
        assert f"{path}:2" in str(raised.value)


class TestPreferenceModelExamples:
    def test_both_orders_train_the_label_alone(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.jsonl", line("B"), line("Tie"))
        source = ComparisonBuilderFromJsonl(train_path=path, shuffle_seed=None)
        settings = common(batch_size=4)
        dataset, _ = ChatDatasetBuilderFromComparisons(common_config=settings, comparison_builder=source, swap=True)()
        data = dataset.get_batch(0)
        assert [text.removesuffix("<|im_end|>") for text in texts(data)] == ["B", "A", "Tie", "Tie"]
        first = get_tokenizer(TINY).decode(data[0].model_input.to_ints())
        assert first.index("Reply A:\nYes.") < first.index("Reply B:\nNo.") and "user: Is it?" in first
        assert data[0].loss_fn_inputs["weights"].to_numpy().sum() == pytest.approx(1)

    def test_one_order_is_what_is_not_asked_otherwise(self, tmp_path: Path) -> None:
        source = ComparisonBuilderFromJsonl(train_path=write(tmp_path / "p.jsonl", line("B")))
        builder = ChatDatasetBuilderFromComparisons(common_config=common(), comparison_builder=source)
        assert [text.removesuffix("<|im_end|>") for text in texts(builder()[0].get_batch(0))] == ["B"]

    def test_a_comparison_whose_label_would_be_cut_off(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.jsonl", line())
        builder = ChatDatasetBuilderFromComparisons(
            common_config=common(max_length=20), comparison_builder=ComparisonBuilderFromJsonl(train_path=path)
        )
        with pytest.raises(DataFormatError, match="max_length=20 would cut off its label") as raised:
            builder()[0].get_batch(0)
        assert str(raised.value).startswith(f"{path}:1: ")

    def test_options_that_do_not_apply_are_refused(self) -> None:
        source = ComparisonBuilderFromJsonl(train_path="p.jsonl")
        with pytest.raises(ConfigurationError, match="a preference model trains on the label"):
            ChatDatasetBuilderFromComparisons(
                common_config=common(train_on_what=TrainOnWhat.ALL_TOKENS), comparison_builder=source
            )
        for builder in (ChatDatasetBuilderFromComparisons, DPODatasetBuilderFromComparisons):
            with pytest.raises(ConfigurationError, match="leave split_rewritten out"):
                builder(common_config=common(split_rewritten=True), comparison_builder=source)


@chz.chz
class RowsOfAScript(ComparisonDatasetBuilder):
    """As scripts write them: rows of their own, split and shuffled by themselves, some of which are left out."""

    test_size: int = 2

    def get_train_and_test_datasets(self) -> Any:
        rows = datasets.Dataset.from_list([{"i": i} for i in range(6)])
        return rows.skip(self.test_size), rows.take(self.test_size)

    def example_to_labeled_comparison(self, example: Any) -> LabeledComparison | None:
        if example["i"] == 4:
            return None
        replies = [said("assistant", f"{side}{example['i']}") for side in "ab"]
        return LabeledComparison(Comparison([said("user", "?")], [replies[0]], [replies[1]]), "A")


class TestScripts:
    def test_their_rows_keep_their_order_and_their_split(self) -> None:
        train, test = RowsOfAScript().get_labeled_comparisons()
        assert [row.comparison.completion_A[0]["content"] for row in train] == ["a2", "a3", "a5"]
        assert test is not None and [row.comparison.completion_B[0]["content"] for row in test] == ["b0", "b1"]
        assert [row.place for row in RowsOfAScript().get_rows()[0]] == [f"RowsOfAScript[train][{i}]" for i in (0, 1, 3)]

    def test_a_source_without_rows_says_what_it_lacks(self) -> None:
        with pytest.raises(NotImplementedError, match="must define read, or get_train_and_test_datasets"):
            ComparisonDatasetBuilder().get_rows()


@pytest.mark.parametrize("key", ["dataset", "test_dataset"])
def test_a_file_that_is_absent_is_named_by_the_key_that_was_typed(key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{key}='none\.jsonl': there is no such file"):
        comparison_source(chz.replace(ComparisonConfig(), **{key: "none.jsonl"}))
