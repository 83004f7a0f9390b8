"""The shipped tiny_debate is what the study of debate counts on; its questions and texts hold what they promise."""

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from recipes.common import max_tokens_for
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.debate.dispute import narrow
from tinker_cookbook.debate.transcript import Turn
from tinker_cookbook.env.shipped.questions.collatz import LENGTHS, OBJECTION_REQUEST, labels_of, next_number
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.utils.files import read_jsonl
from tools.make_tiny_debate.__main__ import STAGES, CLIConfig, generate, keys_of
from tools.make_tiny_debate.corpus import KINDS, Writers, answer_text, verdict
from tools.make_tiny_debate.data_files import rows_of, write_all
from tools.make_tiny_debate.disputes import bisection, conversations, estimates
from tools.make_tiny_debate.figures import measure, task_of
from tools.make_tiny_debate.trails import (
    HALVES,
    LARGEST,
    PLANTED,
    STARTS,
    STEPS,
    WORLD,
    is_misconceived,
    mistakes,
    trail,
    write,
)


def folder_of(steps: int) -> Path:
    return EXAMPLE_DATA / "collatz" / ("" if steps == STEPS else str(steps))


def test_data_files_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    write_all(tmp_path)
    shipped = {file.relative_to(EXAMPLE_DATA): file for file in (EXAMPLE_DATA / "collatz").rglob("*.jsonl")}
    made = {file.relative_to(tmp_path): file for file in tmp_path.rglob("*.jsonl")}
    assert made.keys() == shipped.keys() and len(made) == 16
    for name, file in made.items():
        assert file.read_bytes() == shipped[name].read_bytes(), name


@pytest.mark.parametrize("steps", LENGTHS)
def test_held_out_questions_are_new_and_answers_are_right(steps: int) -> None:
    rows = {name: read_jsonl(folder_of(steps) / f"{name}.jsonl") for name in ("train", "test")}
    asked = {name: {row["question"] for row in found} for name, found in rows.items()}
    assert not asked["train"] & asked["test"]
    assert len(asked["train"] | asked["test"]) == len(STARTS)
    for row in rows["train"] + rows["test"]:
        number = int(row["question"])
        for _ in range(steps):
            number = next_number(number)
        assert row["answer"] == str(number)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("length", [6, 12])
def test_no_planted_fact_of_the_unseen_half_is_in_training(length: int, name: str) -> None:
    """By the files alone: steps are counted, not starts."""

    def steps(row: dict[str, str]) -> list[int]:
        return [int(row["question"]), *trail(int(row["question"]), length)[:-1]]

    train, test = (read_jsonl(folder_of(length) / f"{name}_{of}.jsonl") for of in ("train", "test"))
    trained = {number for row in train for number in steps(row)}
    unseen, seen = set(HALVES[name]), set(PLANTED) - set(HALVES[name])
    assert not trained & unseen and not {row["question"] for row in train} & {row["question"] for row in test}
    asked: dict[str, int] = {}
    for row in test:
        planted = [number for number in steps(row) if number in PLANTED]
        part, _, fact = row["part"].partition(":")
        asked[part] = asked.get(part, 0) + 1
        assert fact == (str(planted[0]) if planted else "")
        assert {"unseen": unseen, "seen": seen & trained, "without": set[int]()}[part] >= set(planted)
        assert bool(planted) == (part != "without")
    assert asked["unseen"] >= 18 and asked["seen"] == 8 and asked["without"] == 10
    assert {row["part"] for row in test} >= {f"unseen:{fact}" for fact in unseen - {154}}, "each is asked about"


@pytest.mark.parametrize("length", [6, 12])
def test_each_planted_fact_is_unseen_in_one_split(length: int) -> None:
    assert sorted(fact for half in HALVES.values() for fact in half) == sorted(PLANTED)
    asked = [read_jsonl(folder_of(length) / f"{name}_test.jsonl") for name in HALVES]
    first, second = ({row["question"] for row in rows if not row["part"].startswith("seen")} for rows in asked)
    assert not first & second


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


TEXTS = ("aca975", "7c45bb", "ed2c16", "5e2a33")


def test_the_text_of_the_shipped_model_is_what_it_was() -> None:
    """Its first conversations of each stage, of which every other one is made by going on."""
    texts = [repr(generate(stage, 200, seed=0)).encode() for stage in STAGES]
    assert tuple(hashlib.sha256(text).hexdigest()[:6] for text in texts) == TEXTS
    assert CLIConfig().writers == Writers() and keys_of(CLIConfig(out_dir="anywhere")) == ""


class TestLengths:
    @pytest.mark.parametrize("steps", LENGTHS)
    def test_questions_are_the_same_and_each_task_reads_its_own_answers(self, steps: int) -> None:
        questions = [row["question"] for row in rows_of(steps)["test"]]
        assert questions == [row["question"] for row in rows_of(STEPS)["test"]]
        rng, task, by = random.Random(1), task_of(steps), Writers(steps)
        (_, request), (_, question), (_, answer) = KINDS["answer"](rng, by)
        found = task.steps(TaskItem("", question, ""), answer)
        assert found is not None and len(found) == steps and request == task.system_prompt
        assert [task_of(other).steps(TaskItem("", question, ""), answer) for other in LENGTHS if other != steps] == [
            None
        ] * 3
        last = found[-1].name
        assert task.named_step(f"{last} is wrong: 5 makes 16.") == last
        assert task.named_step(f"{labels_of(steps + 1)[-1]} is wrong.") is None

    @pytest.mark.parametrize("steps", LENGTHS)
    def test_an_answer_of_any_length_slips_as_often(self, steps: int) -> None:
        rng = random.Random(2)
        answers = [(start, write(start, rng, misconception_rate=0.0, steps=steps)) for start in STARTS * 20]
        slips = sum(len(mistakes(start, numbers)) for start, numbers in answers) / len(answers)
        assert slips == pytest.approx(0.24, abs=0.03)

    @pytest.mark.parametrize(("steps", "skill"), [(6, 0.95), (12, 0.5), (48, 0.2)])
    def test_objections_are_as_skilled_as_they_are_told_to_be(self, steps: int, skill: float) -> None:
        rng, by, task = random.Random(3), Writers(steps, skill), task_of(steps)
        hits = []
        while len(hits) < 500:
            _, (_, question), _, (_, shown), (_, said) = KINDS["debate"](rng, by)
            theirs = shown.removeprefix(OBJECTION_REQUEST.partition("{")[0]).partition("\n")[0]
            found = task.steps(TaskItem("", question, ""), theirs)
            assert found is not None
            wrong = {step.name for step in found if not step.holds}
            if wrong:
                hits.append(task.named_step(said) in wrong)
        assert sum(hits) / len(hits) == pytest.approx(skill + (1 - skill) * 1.5 / steps, abs=0.06)

    def test_the_context_and_the_vocabulary_grow_with_the_answer(self) -> None:
        made = {steps: CLIConfig(steps=steps, out_dir="x") for steps in LENGTHS}
        assert [(one.longest, one.size_of_vocabulary) for one in made.values()] == [
            (1024, 656), (1024, 656), (2048, 680), (4096, 728),
        ]  # fmt: skip
        assert keys_of(made[24]) == " out_dir=x steps=24"
        assert keys_of(CLIConfig(seed=2, objection_skill=0.5, out_dir="x")) == " out_dir=x seed=2 objection_skill=0.5"

    @pytest.mark.parametrize("steps", LENGTHS)
    def test_a_reply_has_room_for_the_answer_unasked(self, steps: int, tmp_path: Path) -> None:
        config = json.loads((TINY / "config.json").read_text())
        context = CLIConfig(steps=steps).longest
        (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        longest = max_tokens_for(str(tmp_path))
        assert longest == {6: 64, 12: 64, 24: 128, 48: 256}[steps]
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        answers = [answer_text(trail(start, steps)) for start in STARTS]
        assert max(len(tokenizer.encode(text, add_special_tokens=False)) for text in answers) < longest

    @pytest.mark.parametrize("keys", [{"steps": 13}, {"objection_skill": 1.5}, {"share": 0.0}])
    def test_what_cannot_be_made(self, keys: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(keys))):
            CLIConfig(**keys)  # type: ignore[arg-type]


class TestDisputes:
    """The conversations that teach a model to be asked more than once."""

    @pytest.mark.parametrize("steps", LENGTHS)
    def test_an_examiner_comes_to_a_wrong_step_by_the_requests_of_the_protocol(self, steps: int) -> None:
        rng, task, by, hits = random.Random(4), task_of(steps), Writers(steps, objection_skill=1.0), 0
        for _ in range(40):
            _, (_, question), _, (_, shown), *rest = bisection(rng, by)
            item = TaskItem("", question, "")
            found = task.steps(item, shown.partition("\n")[2].partition("\n")[0])
            assert found is not None
            said = [text for role, text in rest if role == "assistant"]
            turns = [Turn([], text, text) for text in said]
            narrowed = [narrow(task, item, found, turns[:count]) for count in range(len(turns) + 1)]
            assert [one.is_over for one in narrowed] == [False] * len(turns) + [True]
            asked = [text for role, text in rest if role == "user"]
            lefts = [(one.left[0].name, one.left[-1].name) for one in narrowed[1:-1]]
            assert asked == [task.narrowing_request.format(first=first, last=last) for first, last in lefts]
            named = narrowed[-1].named
            assert named is not None and len(turns) <= (steps - 1).bit_length()
            hits += not named.holds or all(step.holds for step in found)
        assert hits == 40

    def test_an_estimator_doubts_most_what_is_wrong(self) -> None:
        rng, task, by = random.Random(5), task_of(STEPS), Writers(objection_skill=1.0)
        for _ in range(60):
            *_, (_, question), _, (_, shown), (_, said) = estimates(rng, by)
            item = TaskItem("", question, "")
            found = task.steps(item, shown.partition("\n")[2].partition("\n")[0])
            assert found is not None
            given = task.estimates(item, found, said)
            assert given is not None and min(given) < 1
            assert all((estimate <= 0.2) == (not step.holds) for step, estimate in zip(found, given, strict=True))

    def test_half_is_what_the_model_knows(self) -> None:
        made = conversations(400, 0, Writers())
        assert made == conversations(400, 0, Writers())
        new = [any("are left" in text or text.endswith("%") for _, text in turns) for turns in made]
        assert sum(new) == pytest.approx(200, abs=40)
