"""SDPO: whose reply is shown to whose teacher, and the advantage that follows from it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tests.distillation.test_sdft import is_teacher, make_config, run
from tests.fakes import FakeServiceClient, Pending, SampleCall, said
from tests.rl.handmade import array, group, trajectory, turn
from tests.rl.loop import TINY, rows
from tinker_cookbook import backends
from tinker_cookbook.distillation.demonstrations import build_policy_gradient_datums
from tinker_cookbook.distillation.sdpo import FEEDBACK_LOG_KEY, first_success, teacher_hint
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = get_renderer("qwen3_instruct", get_tokenizer(TINY))
(END,) = (stop for stop in RENDERER.get_stop_sequences() if isinstance(stop, int))


def tokens(text: str) -> list[int]:
    return [*RENDERER.tokenizer.encode(text, add_special_tokens=False), END]


class TestWhoIsShownWhat:
    def made(self, rewards: list[float], trained: list[bool] | None = None):
        found = group(rewards, trained)
        for i, member in enumerate(found.trajectories_G):
            member.transitions[-1].ac = said(tokens(f"reply {i}"))
        return found

    def test_a_failed_reply_is_shown_the_first_successful_one(self) -> None:
        made = self.made([0.0, 1.0, 1.0, 0.5])
        assert [teacher_hint(made, i, RENDERER, 1.0) for i in range(4)] == ["reply 1", None, None, "reply 1"]

    def test_a_rejected_success_is_none(self) -> None:
        made = self.made([0.0, 1.0], trained=[True, False])
        assert first_success(made, 1.0) is None and teacher_hint(made, 0, RENDERER, 1.0) is None

    def test_without_a_success_it_is_shown_what_the_environment_said(self) -> None:
        made = self.made([0.0, 0.0])
        made.trajectories_G[1].transitions[-1].logs[FEEDBACK_LOG_KEY] = "the loop never ends"
        assert [teacher_hint(made, i, RENDERER, 1.0) for i in range(2)] == [None, "the loop never ends"]


class Teacher:
    """Finds every token of a reply twice as likely as the student did."""

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Any:
        return Pending("compute_logprobs", [None, *[-1.0 + float(np.log(2))] * (prompt.length - 1)], [])


def test_what_the_teacher_finds_likelier_is_pushed_up() -> None:
    """log teacher - log student: +log 2 everywhere. The sign of the inverse would push it down."""
    (datum,) = trajectory_to_data(trajectory(turn([1, 2], said([7, 8, 9]))), 0.0)
    student = np.where(array(datum, "mask") > 0, -1.0, 0.0).astype(np.float32)
    datum.loss_fn_inputs["logprobs"] = tinker.TensorData.from_numpy(student)
    teacher: Any = Teacher()
    prompts = [tinker.ModelInput.from_ints([5, 5, 5, 5])]
    (changed,), _ = asyncio.run(
        build_policy_gradient_datums([datum], [{"group_idx": 0, "traj_idx": 0}], teacher, prompts)
    )
    assert array(changed, "advantages").tolist() == pytest.approx([0.0, *[np.log(2)] * 3], abs=1e-6)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    """The second member of each group succeeds: its reply begins with token 60, which is its reward."""

    def reply(call: SampleCall) -> list[int]:
        return [60 if call.prompt[1] == 1 else 40, 41, 42]

    fake = FakeServiceClient(reply)
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake


def test_in_a_run_the_failed_half_learns_from_the_other(service: FakeServiceClient, tmp_path: Path) -> None:
    template = "{question}={golden_answer}"
    config = make_config(
        tmp_path,
        max_steps=1,
        demonstrations="rollouts",
        success_reward=60.0,
        demo_template=template,
        skip_first_n_tokens=0,
    )
    run(config)
    asked = [call.prompt for call in service.sampled if is_teacher(call)]
    shown = RENDERER.tokenizer.decode([60, 41, 42])
    wanted = [
        RENDERER.build_generation_prompt([{"role": "user", "content": f"Q0.{g}={shown}"}]).to_ints() for g in range(2)
    ]
    assert [prompt[: len(one)] for prompt, one in zip(asked, wanted, strict=True)] == wanted
    assert [prompt[len(one) :] for prompt, one in zip(asked, wanted, strict=True)] == [[40, 41, 42]] * 2
    # Four replies of three tokens to prompts of three; the teachers' prompts with a reply each.
    assert rows(tmp_path)[0]["tokens/sampled"] == 12
    assert rows(tmp_path)[0]["tokens/prefill_uncached"] == 12 + sum(len(prompt) for prompt in asked)
    assert rows(tmp_path)[0]["sdpo/trained_replies"] == 2 and rows(tmp_path)[0]["sdpo/groups_with_success"] == 2


def test_where_all_succeed_nothing_trains(service: FakeServiceClient, tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=2, demonstrations="rollouts", success_reward=1.0)
    with pytest.raises(Exception, match="trained nothing"):
        run(config)
    assert not any(is_teacher(call) for call in service.sampled)
