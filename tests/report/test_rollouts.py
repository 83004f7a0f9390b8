"""Rollouts as a report shows them: an index, tokens with their numbers, and what a text is found in."""

from pathlib import Path

import numpy as np
import pytest

from tests.report.made import said, write_run, write_step
from tinker_cookbook.report.rollouts import EXCERPT, INDEX_COLUMNS, index_step, search, step_groups, words_of
from tinker_cookbook.report.runs import RunData, open_runs
from tinker_cookbook.stores.rollouts import read_rollouts
from tinker_cookbook.stores.training_store import VOCABULARY_BASE_NAME


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    folder = write_run(tmp_path / "run", {}, [{"step": 0, "a": 1.0}])
    write_step(
        folder, 0, [[("2 + 2?", "four", 1.0), ("2 + 2?", "Grüße 漢字", 0.0)], [("hm", "yes", 0.5), ("hm", "no", 0.25)]]
    )
    write_step(folder, 3, [[("hm", "other", 1.0), ("hm", "<script>", 0.0)]])
    return open_runs([str(folder)])[0]


def test_the_index_has_a_line_per_rollout(run: RunData) -> None:
    assert run.steps() == [0, 3]
    index = index_step(run, 0, words_of(run))
    assert tuple(index) == INDEX_COLUMNS
    assert index["group"] == [0, 0, 1, 1]
    assert index["member"] == [0, 1, 0, 1]
    assert index["reward"] == [1.0, 0.0, 0.5, 0.25]
    assert index["advantage"] == [0.5, -0.5, 0.125, -0.125]
    assert index["tokens"] == [len(said(text).tokens) for text in ("four", "Grüße 漢字", "yes", "no")]
    assert index["turns"] == [1] * 4
    assert index["text"] == ["four", "Grüße 漢字", "yes", "no"]
    assert {name: len(values) for name, values in index_step(run, 1, words_of(run)).items()} == dict.fromkeys(
        INDEX_COLUMNS, 0
    )


def test_a_line_has_how_its_replies_begin(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {}, [])
    write_step(folder, 0, [[("hm", "a  line\nand another", 1.0), ("hm", "long " * 200, 0.0), ("hm", "", 0.0)]])
    run = open_runs([str(folder)])[0]
    short, long, empty = index_step(run, 0, words_of(run))["text"]
    assert (short, empty) == ("a line and another", "")
    assert long == ("long " * 200)[:EXCERPT]


def test_the_first_groups_are_those_that_are_asked_for(run: RunData) -> None:
    assert set(step_groups(run, 0, words_of(run), most=1)) == {0}
    assert set(step_groups(run, 0, words_of(run), most=9)) == {0, 1} == set(step_groups(run, 0, words_of(run)))


def test_tokens_join_to_the_text_and_carry_their_numbers(run: RunData) -> None:
    groups = step_groups(run, 0, words_of(run))
    assert sorted(groups) == [0, 1]
    turn = groups[0][1]["turns"][0]
    assert turn["prompt"] == "2 + 2?"
    assert "".join(turn["tokens"]) == "Grüße 漢字"
    ids = said("Grüße 漢字").tokens
    assert turn["ids"] == ids
    assert turn["sampled"] == [-0.25 * (i + 1) for i in range(len(ids))]
    assert turn["trainer"] == [-0.25 * (i + 1) - 0.5 for i in range(len(ids))]
    stored = read_rollouts(run.folder / "iteration_000000" / "rollouts.parquet")[1][1]["advantages"]
    assert np.allclose(turn["advantage"], stored, rtol=1e-4)
    assert all(value < 0 for value in turn["advantage"])
    assert set(step_groups(run, 0, words_of(run), [1])) == {1}


def test_without_a_vocabulary_ids_are_shown(run: RunData) -> None:
    (run.folder / VOCABULARY_BASE_NAME).unlink()
    turn = step_groups(run, 0, words_of(run))[0][0]["turns"][0]
    assert turn["tokens"] == [f"⟨{i}⟩" for i in said("four").tokens]


def test_text_is_found_in_prompts_and_replies_whatever_the_case(run: RunData) -> None:
    words = words_of(run)
    assert dict(search(run, words, "GRÜSSE", [0, 3])) == {0: [(0, 1)], 3: []}
    assert dict(search(run, words, "hm", [0, 3])) == {0: [(1, 0), (1, 1)], 3: [(0, 0), (0, 1)]}
