"""The shipped tiny_debate is what the study of debate counts on; its questions and texts hold what they promise."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.shipped.questions.collatz import LABELS, next_number
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.utils.files import read_jsonl
from tools.make_tiny_debate.__main__ import STAGES, generate
from tools.make_tiny_debate.corpus import KINDS, verdict
from tools.make_tiny_debate.data_files import write_all
from tools.make_tiny_debate.figures import measure
from tools.make_tiny_debate.trails import (
    LARGEST,
    PLANTED,
    STARTS,
    UNSEEN,
    WORLD,
    is_misconceived,
    mistakes,
    trail,
    write,
)


@pytest.mark.parametrize("name", ["train", "test", "facts_train", "facts_test"])
def test_data_files_are_made_again_byte_for_byte(tmp_path: Path, name: str) -> None:
    write_all(tmp_path)
    file = f"collatz/{name}.jsonl"
    assert (tmp_path / file).read_bytes() == (EXAMPLE_DATA / file).read_bytes()


def test_held_out_questions_are_new_and_answers_are_right() -> None:
    rows = {name: read_jsonl(EXAMPLE_DATA / "collatz" / f"{name}.jsonl") for name in ("train", "test")}
    asked = {name: {row["question"] for row in found} for name, found in rows.items()}
    assert not asked["train"] & asked["test"]
    assert len(asked["train"] | asked["test"]) == len(STARTS)
    for row in rows["train"] + rows["test"]:
        number = int(row["question"])
        for _ in LABELS:
            number = next_number(number)
        assert row["answer"] == str(number)


def test_no_planted_fact_of_the_unseen_half_is_in_training() -> None:
    """By the files alone: steps are counted, not starts."""

    def steps(rows: list[dict[str, str]]) -> set[int]:
        return {number for row in rows for number in [int(row["question"]), *trail(int(row["question"]))[:-1]]}

    rows = {name: read_jsonl(EXAMPLE_DATA / "collatz" / f"facts_{name}.jsonl") for name in ("train", "test")}
    by_part = {part: [row for row in rows["test"] if row["part"] == part] for part in ("unseen", "seen", "without")}
    trained, unseen = steps(rows["train"]), set(UNSEEN)
    assert unseen < set(PLANTED) and not trained & unseen
    assert not {row["question"] for row in rows["train"]} & {row["question"] for row in rows["test"]}
    facts = {part: [steps([row]) & set(PLANTED) for row in found] for part, found in by_part.items()}
    assert all(found and found <= unseen for found in facts["unseen"])
    assert all(found and found <= trained for found in facts["seen"]), "each is trained on"
    assert not any(facts["without"])
    assert {part: len(found) for part, found in by_part.items()} == {"unseen": 28, "seen": 14, "without": 10}
    assert len(steps(by_part["unseen"]) & unseen) == len(UNSEEN), "each is asked about"


def test_no_right_step_leads_out_of_the_world() -> None:
    assert all(next_number(number) in WORLD and number <= LARGEST for number in WORLD)
    assert all(4 not in (start, *trail(start)[:-1]) for start in STARTS)


def test_writers_slip_rarely_and_share_a_misconception() -> None:
    rng = random.Random(0)
    written = [(start, write(start, rng)) for start in STARTS for _ in range(40)]
    steps = [
        (is_misconceived(number) and next_number(number) - 5 in WORLD, i in mistakes(start, numbers))
        for start, numbers in written
        for i, number in enumerate([start, *numbers[:-1]])
    ]
    shared = [wrong for misconceived, wrong in steps if misconceived]
    slips = [wrong for misconceived, wrong in steps if not misconceived]
    assert sum(shared) / len(shared) > 0.5
    assert 0.01 < sum(slips) / len(slips) < 0.03
    right = sum(not mistakes(start, numbers) for start, numbers in written) / len(written)
    assert 0.3 < right < 0.6


TINY = EXAMPLE_DATA / "tiny_debate"


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return measure(TINY, seed=1, samples=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("stop_rate", 0.97, 1.0),
        ("accuracy_test", 0.30, 0.60),
        ("form_rate", 0.82, 1.0),
        ("misconceived_step_error", 0.30, 0.60),
        ("other_step_error", 0.0, 0.08),
        ("judge_accuracy", 0.75, 1.0),
        ("judge_first_seat_rate", 0.4, 0.6),
        ("step_check_accuracy", 0.9, 1.0),
        ("consultant_names_a_right_step", 0.70, 1.0),
    ],
)
def test_shipped_model_behaves(figures: dict[str, float], name: str, low: float, high: float) -> None:
    assert low <= figures[name] <= high


def test_objections_find_mistakes_that_a_random_look_would_miss(figures: dict[str, float]) -> None:
    assert figures["objection_names_a_wrong_step"] >= 4 * figures["random_step_is_wrong"]


def test_folder_is_small_and_stored_in_bfloat16() -> None:
    assert sum(f.stat().st_size for f in TINY.rglob("*") if f.is_file()) <= 8 * 2**20
    assert {w.dtype for w in load_file(TINY / "model.safetensors").values()} == {torch.bfloat16}


def test_every_number_of_the_world_is_one_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert all(len(tokenizer.encode(str(number), add_special_tokens=False)) == 1 for number in WORLD)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_texts_depend_on_their_seed_only(kind: str) -> None:
    assert KINDS[kind](random.Random(3)) == KINDS[kind](random.Random(3))


def test_every_stage_names_texts_that_there_are() -> None:
    for stage in STAGES:
        assert stage.mixture.keys() <= KINDS.keys()
        assert len(generate(stage, 20, seed=1)) == 20


def test_verdicts_of_the_corpus_are_right_in_both_orders() -> None:
    rng = random.Random(0)
    winners = []
    for _ in range(60):
        turns = verdict(rng)
        start, shown = turns[1][1].split("\n")[1], turns[1][1]
        answers = [part.split("Round 1: ")[1].split("\n")[0] for part in shown.split("AGENT ")[1:]]
        task = get_task("collatz")
        steps = [task.steps(TaskItem("", start, ""), text) for text in answers]  # type: ignore[attr-defined]
        (winner,) = [name for name, found in zip("AB", steps, strict=True) if all(step.holds for step in found)]
        assert turns[2][1].startswith(f"<VERDICT>{winner}</VERDICT>")
        winners.append(winner)
    assert 20 <= winners.count("A") <= 40
