"""The loop of self-distillation: who reads what, who learns what, and that the student comes to answer as if it were shown."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.distillation import sdft as recipe
from tests.fakes import FakeServiceClient, SampleCall
from tests.rl.loop import TINY, NumberDataset, rows
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.distillation import sdft
from tinker_cookbook.exceptions import ConfigurationError, UntrainedRunError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.stores.rollouts import read_rollouts
from tinker_cookbook.tokenizer_utils import get_tokenizer


class NumberQuestions:
    """Two groups of two in each batch; the questions are the numbers of batch and group."""

    def __init__(self, batches: int = 4):
        self._environments = NumberDataset(batches, groups=2, members=2, constant_groups=0)

    def get_batch(self, index: int) -> tuple[Sequence[EnvGroupBuilder], list[str], list[str]]:
        groups = self._environments.get_batch(index)
        return groups, [f"Q{index}.{g}" for g in range(2)], [f"A{index}.{g}" for g in range(2)]

    def __len__(self) -> int:
        return len(self._environments)


def long_reply(call: SampleCall) -> list[int]:
    """Five tokens that tell the weights."""
    return [40 + call.weights, 41, 42, 43, 44]


def is_teacher(call: SampleCall) -> bool:
    return call.params.max_tokens == 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    fake = FakeServiceClient(long_reply)
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


def make_config(log_path: Path, **changes: Any) -> sdft.Config:
    settings = {
        "log_path": str(log_path),
        "model_name": TINY,
        "recipe_name": "test",
        "renderer_name": "qwen3_instruct",
        "max_tokens": 8,
        "topk": 3,
        "eval_every": 0,
        "save_every": 0,
        **changes,
    }
    return sdft.Config(**settings)


async def train(config: sdft.Config, batches: int = 4, test: Any = None) -> None:
    await sdft.main(config, NumberQuestions(batches), test)


def run(config: sdft.Config, batches: int = 4, test: Any = None) -> None:
    asyncio.run(train(config, batches, test))


def test_the_student_answers_and_the_teacher_reads_that_with_its_demonstration(
    service: FakeServiceClient, tmp_path: Path
) -> None:
    run(make_config(tmp_path, max_steps=2, system_prompt="Be brief.", demo_template="{question}={golden_answer}"))
    tokenizer = get_tokenizer(TINY)
    renderer = get_renderer("qwen3_instruct", tokenizer)
    students = [call for call in service.sampled if not is_teacher(call)]
    teachers = [call for call in service.sampled if is_teacher(call)]
    assert [call.prompt for call in students[:4]] == [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert {call.weights for call in students[:4]} == {0} and {call.weights for call in students[4:]} == {1}
    assert {call.weights for call in teachers} == {0}, "the teacher stays what it was at the start"
    for i, call in enumerate(teachers[:4]):
        shown = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Q0.{i // 2}=A0.{i // 2}"},
        ]
        prompt = renderer.build_generation_prompt(shown).to_ints()  # type: ignore[arg-type]
        assert call.prompt == [*prompt, *long_reply(students[i])]
    trainer = service.trainers[0]
    assert [len(step.data) for step in trainer.passes] == [4, 4]
    assert {step.loss_fn for step in trainer.passes} == {"cross_entropy"}
    targets = trainer.passes[0].data[0].loss_fn_inputs["target_tokens"].to_numpy()
    assert targets.shape == (7, 3) and targets[-2:].tolist() == [[43, 44, 45], [44, 45, 46]] and not targets[:-2].any()


def test_a_row_says_what_was_sampled_and_what_was_learnt(service: FakeServiceClient, tmp_path: Path) -> None:
    run(make_config(tmp_path, max_steps=1))
    (row,) = rows(tmp_path)
    assert row["sdft/total_completion_tokens"] == 20 and row["sdft/total_completion_positions"] == 8
    assert row["env/all/total_episodes"] == 4 and row["env/all/reward/total"] == 40
    # The fake's loss is the number of datums.
    assert row["sdft/kl"] == pytest.approx(4 / 8 - row["sdft/mean_teacher_entropy"])
    assert {"time/sampling", "time/teacher", "time/train", "optim/lr", "progress/done_frac"} <= row.keys()


def test_every_rollout_of_a_step_is_written_unless_the_key_says_otherwise(
    service: FakeServiceClient, tmp_path: Path
) -> None:
    run(make_config(tmp_path / "run", max_steps=2))
    about, turns = read_rollouts(tmp_path / "run" / "iteration_000001" / "rollouts.parquet")
    assert about["run"]["step"] == 1 and len(turns) == 4
    sampled = [call.prompt for call in service.sampled if call.weights == 1]
    assert [turn["prompt"].tolist() for turn in turns] == sampled[:4]
    assert sum(len(turn["sampled_logprobs"]) for turn in turns) == 20
    assert all(turn["advantages"] is None and turn["sampling_client_step"] == 1 for turn in turns)
    run(make_config(tmp_path / "none", max_steps=1, write_records=False))
    assert not [*(tmp_path / "none").glob("iteration_*")]


def test_reverse_kl_is_a_loss_of_our_own(service: FakeServiceClient, tmp_path: Path) -> None:
    run(make_config(tmp_path, max_steps=1, reverse=True))
    assert [step.loss_fn for step in service.trainers[0].passes] == ["custom"]
    (row,) = rows(tmp_path)
    assert row["sdft/reverse_kl_positions"] == 8 and row["sdft/reverse_kl_loss"] > 0


def test_without_top_tokens_it_is_a_policy_gradient(service: FakeServiceClient, tmp_path: Path) -> None:
    # To the fakes the teacher finds every token as likely as the student did, so that nothing is learnt.
    with pytest.raises(UntrainedRunError, match="is over and trained nothing"):
        run(make_config(tmp_path, max_steps=1, topk=0, loss_fn="importance_sampling", num_substeps=2))
    passes = service.trainers[0].passes
    assert [(step.loss_fn, len(step.data)) for step in passes] == [("importance_sampling", 2)] * 2
    inputs = passes[0].data[0].loss_fn_inputs
    assert set(inputs) == {"target_tokens", "logprobs", "advantages"}
    (row,) = rows(tmp_path)
    assert row["sdft/mean_advantage"] == 0 and row["sdft/mean_student_lp"] < 0
    assert row["train/loss"] == 4 / 4


def test_the_teacher_may_follow_the_student(service: FakeServiceClient, tmp_path: Path) -> None:
    run(make_config(tmp_path, teacher_sync_every=2, save_every=3, ttl_seconds=77))
    weights = [call.weights for call in service.sampled if is_teacher(call)]
    assert weights == [0] * 8 + [2] * 8
    (path,) = [path for path in service.saved if "teacher" in path]
    assert service.ttl[path] == 77
    records = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert [record["reference"]["path"] for record in records] == [path, path]


def test_a_resumed_run_has_the_teacher_it_had(service: FakeServiceClient, tmp_path: Path) -> None:
    run(make_config(tmp_path, teacher_sync_every=2, max_steps=3))
    before = len(service.sampled)
    run(make_config(tmp_path, teacher_sync_every=9, max_steps=4))
    assert [call.weights for call in service.sampled[before:] if is_teacher(call)] == [2] * 4
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("test", [NumberDataset(1, 2, 1, 0), NumberQuestions(1)], ids=["environments", "questions"])
def test_held_out_questions_are_answered_first_and_last(service: FakeServiceClient, tmp_path: Path, test: Any) -> None:
    run(make_config(tmp_path, max_steps=2, eval_every=2), test=test)
    found = {
        row["step"]: row["test/env/all/reward/total"] for row in rows(tmp_path) if "test/env/all/reward/total" in row
    }
    assert found == {0: 40, 2: 42}


def test_a_batch_of_replies_too_short_to_learn_from_is_skipped(service: FakeServiceClient, tmp_path: Path) -> None:
    with pytest.raises(UntrainedRunError):
        run(make_config(tmp_path, skip_first_n_tokens=5))
    assert "step 0: none of 4 replies has more than skip_first_n_tokens=5" in (tmp_path / "logs.log").read_text()
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


def test_a_batch_whose_parts_do_not_match_is_refused(service: FakeServiceClient, tmp_path: Path) -> None:
    class Uneven(NumberQuestions):
        def get_batch(self, index: int) -> tuple[Sequence[EnvGroupBuilder], list[str], list[str]]:
            groups, questions, answers = super().get_batch(index)
            return groups, questions, answers[:1]

    with pytest.raises(ConfigurationError, match="batch 0 has 2 groups, 2 questions and 1 golden answers"):
        asyncio.run(sdft.main(make_config(tmp_path), Uneven()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"renderer_name": None}, "name the student's renderer"),
        ({"demo_template": "{question}"}, "demo_template has the fields"),
        ({"teacher_sync_every": 0}, "teacher_sync_every=0: must be at least 1"),
        ({"loss_fn": "ppo"}, "loss_fn='ppo' learns from advantages, topk=3"),
        ({"topk": 0}, "topk=0 learns from advantages, which loss_fn='cross_entropy' does not take"),
        ({"topk": 0, "loss_fn": "ppo", "reverse": True}, "reverse=True needs topk > 0"),
        ({"topk": 0, "loss_fn": "ppo", "temperature": 0.5}, "set temperature=1.0"),
        ({"topk": 5000}, "topk=5000 is more than the 1536 tokens"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_opened(
    service: FakeServiceClient, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(make_config(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists() and service.calls == []


def test_the_context_bounds_what_the_teacher_reads(
    service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(make_config(tmp_path / "a", max_steps=1, skip_first_n_tokens=0))
    longest = max(len(call.prompt) for call in service.sampled if is_teacher(call))
    monkeypatch.setattr(sdft.model_info, "get_context_length", lambda _: longest)
    run(make_config(tmp_path / "b", max_steps=1, skip_first_n_tokens=0))
    (row,) = rows(tmp_path / "b")
    # One place is for the token that the teacher must sample.
    assert row["sdft/teacher_truncated_count"] == 4 and row["sdft/total_completion_tokens"] == 16


@pytest.fixture
def local_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))


@pytest.mark.slow
@pytest.mark.usefixtures("local_engine")
def test_the_student_learns_to_answer_as_if_it_were_shown(tmp_path: Path) -> None:
    argv = ["warm_up_steps=40", "max_steps=10", "groups_per_batch=16", "test_size=40", "eval_every=10"]
    run_recipe(recipe.CLIConfig, recipe.main, argv=[f"log_path={tmp_path / 'log'}", *argv])
    found = rows(tmp_path / "log")
    distances = [row["sdft/kl"] for row in found if "sdft/kl" in row]
    assert 0 < sum(distances[-3:]) < 0.7 * sum(distances[:3])
    correct = [row["test/env/all/correct"] for row in found if "test/env/all/correct" in row]
    assert correct[-1] > correct[0] + 0.1


@pytest.mark.usefixtures("local_engine")
@pytest.mark.parametrize("key", ["reverse=true", "topk=0"])
def test_the_engine_takes_the_other_losses(key: str, tmp_path: Path) -> None:
    """Three steps at one rate lower the distance of a fixed batch: every question is asked in every step."""
    argv = [
        "warm_up_steps=0",
        "max_steps=3",
        "groups_per_batch=8",
        "group_size=4",
        "eval_every=0",
        "learning_rate=3e-3",
    ]
    argv += [key, *(["loss_fn=importance_sampling"] if key == "topk=0" else [])]
    data = tmp_path / "eight.jsonl"
    data.write_text("".join(json.dumps({"question": f"What is {i} + 2?", "answer": i + 2}) + "\n" for i in range(8)))
    run_recipe(recipe.CLIConfig, recipe.main, argv=[f"log_path={tmp_path / 'log'}", f"dataset={data}", *argv])
    name, sign = {"reverse=true": ("sdft/reverse_kl_mean", 1), "topk=0": ("sdft/mean_advantage", -1)}[key]
    distances = [sign * row[name] for row in rows(tmp_path / "log")]
    assert len(distances) == 3 and 0 < distances[-1] < distances[0]
