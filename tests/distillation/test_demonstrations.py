"""What a teacher with a demonstration thinks of a reply: which tokens, where, how much; and the losses that follow."""

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import examples
from tests.fakes import FakeSamplingClient, fake_logprob, seeded_reply
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation import demonstrations
from tinker_cookbook.distillation.datasets import PromptOnlyEnv
from tinker_cookbook.distillation.demonstrations import (
    Demonstration,
    DemonstrationDataset,
    build_policy_gradient_datums,
    build_sdft_teacher_prompt,
    build_topk_distillation_datums,
    compute_sdft_advantages,
    reverse_kl_custom_loss,
)
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.data_processing import DatumMetadata
from tinker_cookbook.rl.problem_env import OneTurnGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = str(EXAMPLE_DATA / "tiny_chat")
PROMPTS = [tinker.ModelInput.from_ints([60, 61, 62, 63, 64]), tinker.ModelInput.from_ints([70, 71])]
META: list[DatumMetadata] = [{"group_idx": 0, "traj_idx": 0}, {"group_idx": 1, "traj_idx": 0}]


def sampled(prompt: Sequence[int], reply: Sequence[int]) -> tinker.Datum:
    """A datum of reinforcement learning: the reply's logprobs are -0.5, -0.6, ..."""
    tokens, context = [*prompt, *reply], len(prompt) - 1
    arrays = {
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "logprobs": np.array([0.0] * context + [-0.5 - 0.1 * i for i in range(len(reply))], dtype=np.float32),
        "advantages": np.zeros(len(tokens) - 1, dtype=np.float32),
        "mask": np.array([0.0] * context + [1.0] * len(reply), dtype=np.float32),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={key: tinker.TensorData.from_numpy(value) for key, value in arrays.items()},
    )


DATA = [sampled([1, 2, 3], [10, 11, 12, 13, 14, 15]), sampled([4, 5], [20, 21, 22, 23])]


def teacher() -> FakeSamplingClient:
    """Its likeliest tokens are the one before, the next number, and so on, each half as likely as the one before it."""
    return FakeSamplingClient(0, seeded_reply, [], [])


def soft(**settings: Any) -> tuple[list[tinker.Datum], dict[str, float], FakeSamplingClient]:
    client = teacher()
    data, metrics = asyncio.run(build_topk_distillation_datums(DATA, META, client, PROMPTS, topk=3, **settings))
    return data, metrics, client


def arrays(datum: tinker.Datum) -> tuple[list[list[int]], list[list[float]]]:
    inputs = datum.loss_fn_inputs
    return inputs["target_tokens"].to_numpy().tolist(), np.round(inputs["weights"].to_numpy().astype(float), 4).tolist()


NOTHING, HALVED = [0, 0, 0], [0.5714, 0.2857, 0.1429]


class TestTargets:
    def test_the_teacher_reads_the_reply_after_its_own_prompt(self) -> None:
        _, _, client = soft()
        assert [call.prompt for call in client.sampled] == [
            [60, 61, 62, 63, 64, 10, 11, 12, 13, 14, 15],
            [70, 71, 20, 21, 22, 23],
        ]
        assert {call.params.max_tokens for call in client.sampled} == {1}

    def test_its_likeliest_tokens_become_targets_from_the_fourth_token_on(self) -> None:
        (first, second), metrics, _ = soft()
        # The fake's likeliest token at a place of the prompt is the very token there.
        assert arrays(first) == (
            [NOTHING] * 5 + [[13, 14, 15], [14, 15, 16], [15, 16, 17]],
            [NOTHING] * 5 + [HALVED] * 3,
        )
        assert arrays(second) == ([NOTHING] * 4 + [[23, 24, 25]], [NOTHING] * 4 + [HALVED])
        assert first.model_input.to_ints() == [1, 2, 3, 10, 11, 12, 13, 14]
        entropy = -sum(p * math.log(p) for p in (4 / 7, 2 / 7, 1 / 7))
        assert metrics.pop("sdft/mean_teacher_entropy") == pytest.approx(entropy, rel=1e-6)
        assert metrics == {
            "sdft/teacher_truncated_count": 0,
            "sdft/num_datums": 2,
            "sdft/topk": 3,
            "sdft/total_completion_tokens": 10,
            "sdft/total_completion_positions": 4,
        }

    def test_tokens_that_the_student_lacks_are_left_out(self) -> None:
        (first, second), metrics, _ = soft(vocab_size=16, skip_first_n_tokens=0)
        assert arrays(first)[0][-3:] == [[13, 14, 15], [14, 15, 0], [15, 0, 0]]
        assert arrays(first)[1][-3:] == [HALVED, [0.6667, 0.3333, 0], [1, 0, 0]]
        assert arrays(second) == ([NOTHING] * 5, [NOTHING] * 5)
        assert metrics["sdft/total_completion_positions"] == 6

    def test_a_reply_is_cut_to_the_teachers_context(self) -> None:
        (first, second), metrics, client = soft(max_context_length=9, skip_first_n_tokens=0)
        assert [len(call.prompt) for call in client.sampled] == [9, 6]
        assert [bool(sum(row)) for row in arrays(first)[1]] == [False] * 2 + [True] * 4 + [False] * 2
        assert sum(map(sum, arrays(second)[1])) == pytest.approx(4, abs=1e-3)
        assert (metrics["sdft/teacher_truncated_count"], metrics["sdft/total_completion_tokens"]) == (1, 8)

    def test_a_reply_that_is_too_short_is_not_asked_about(self) -> None:
        (first, second), metrics, client = soft(skip_first_n_tokens=4)
        assert len(client.sampled) == 1 and metrics["sdft/total_completion_positions"] == 2
        assert arrays(second) == ([NOTHING] * 5, [NOTHING] * 5) and arrays(first)[0][-1] == [15, 16, 17]
        _, metrics, client = soft(skip_first_n_tokens=9)
        assert client.sampled == [] and metrics["sdft/mean_teacher_entropy"] == 0.0

    def test_several_replies_in_one_datum_are_refused(self) -> None:
        datum = sampled([1, 2], [3, 4, 5, 6])
        datum.loss_fn_inputs["mask"] = tinker.TensorData.from_numpy(np.array([0, 1, 0, 1, 1], dtype=np.float32))
        with pytest.raises(DataValidationError, match="datum 0 has 3 sampled tokens that are not one reply"):
            asyncio.run(build_topk_distillation_datums([datum], META[:1], teacher(), PROMPTS))


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum(-1)


class TestReverseKL:
    @examples(30)
    @given(st.integers(0, 2**31), st.booleans())
    def test_it_is_the_kl_among_the_known_tokens(self, seed: int, with_padding: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        q = torch.rand(4, 3, generator=generator) + 0.05
        if with_padding:
            q[2, 1:] = 0
        q = q / q.sum(-1, keepdim=True)
        q[0] = 0
        logprobs = torch.randn(4, 3, generator=generator).sub(2).requires_grad_()
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]),
            loss_fn_inputs={"weights": tinker.TensorData.from_torch(q)},
        )
        loss, metrics = reverse_kl_custom_loss([datum], [logprobs])
        loss.backward()
        expected = torch.zeros(())
        reference = logprobs.detach().clone().requires_grad_()
        for row in (1, 2, 3):
            known = q[row] > 0
            expected = expected + kl(reference[row][known].softmax(-1), q[row][known])
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        assert logprobs.grad is not None and reference.grad is not None
        torch.testing.assert_close(logprobs.grad, reference.grad, atol=1e-6, rtol=1e-5)
        assert metrics["sdft/reverse_kl_positions"] == 3
        assert metrics["sdft/reverse_kl_mean"] == pytest.approx(loss.item() / 3, abs=1e-6)

    def test_what_it_says_of_itself(self) -> None:
        (first, _), _, _ = soft()
        logprobs = torch.log(torch.tensor([[0.1, 0.2, 0.1]])).repeat(8, 1)
        loss, metrics = reverse_kl_custom_loss([first], [logprobs])
        expected = 3 * float(kl(torch.tensor([0.25, 0.5, 0.25]), torch.tensor([4 / 7, 2 / 7, 1 / 7])))
        assert float(loss) == pytest.approx(expected, rel=1e-5) == metrics["sdft/reverse_kl_loss"]
        assert metrics["sdft/student_entropy_mean"] == pytest.approx(1.5 * math.log(2), rel=1e-5)

    def test_without_a_target_there_is_no_loss(self) -> None:
        data, _, _ = soft(skip_first_n_tokens=9)
        with pytest.raises(DataValidationError, match="no position has a target"):
            reverse_kl_custom_loss(data, [torch.zeros(8, 3), torch.zeros(5, 3)])


class TestPolicyGradient:
    def test_the_advantage_is_how_much_likelier_a_token_is_to_the_teacher(self) -> None:
        (first, second), metrics = asyncio.run(build_policy_gradient_datums(DATA, META, teacher(), PROMPTS, 7))
        teachers = [fake_logprob(token) for token in (10, 11, 20, 21, 22, 23)]
        students = [-0.5, -0.6, -0.5, -0.6, -0.7, -0.8]
        expected = [a - b for a, b in zip(teachers, students, strict=True)]
        advantages = [datum.loss_fn_inputs["advantages"].to_numpy().tolist() for datum in (first, second)]
        assert advantages[0] == pytest.approx([0, 0, *expected[:2], 0, 0, 0, 0])
        assert advantages[1] == pytest.approx([0, *expected[2:]])
        assert DATA[0].loss_fn_inputs["advantages"].to_numpy().tolist() == [0] * 8
        assert metrics["sdft/mean_advantage"] == pytest.approx(sum(expected) / 6)
        assert metrics["sdft/mean_teacher_lp"] == pytest.approx(sum(teachers) / 6)
        assert metrics["sdft/mean_student_lp"] == pytest.approx(sum(students) / 6)
        assert metrics["sdft/teacher_truncated_count"] == 1

    def test_or_in_place(self) -> None:
        own = [sampled([1, 2, 3], [10, 11, 12, 13, 14, 15]), sampled([1, 2], [20, 21, 22, 23])]
        expected, told = asyncio.run(build_policy_gradient_datums(own, META, teacher(), PROMPTS, 7))
        assert asyncio.run(compute_sdft_advantages(own, META, teacher(), PROMPTS, 7)) == told
        for datum, other in zip(own, expected, strict=True):
            values = datum.loss_fn_inputs["advantages"].to_numpy()
            assert values.any() and values.tolist() == other.loss_fn_inputs["advantages"].to_numpy().tolist()

    def test_a_context_without_room_is_said(self) -> None:
        with pytest.raises(DataValidationError, match="max_context_length=2 leaves no room"):
            asyncio.run(build_policy_gradient_datums(DATA, META, teacher(), PROMPTS, 2))


class TestPrompts:
    def test_the_question_comes_with_its_demonstration(self) -> None:
        tokenizer = get_tokenizer(MODEL)
        renderer = get_renderer("qwen3_instruct", tokenizer)
        prompt = build_sdft_teacher_prompt(
            "1 + {x}?", "{2}", renderer, "Be brief.", "{golden_answer} is for {question}"
        )
        text = str(tokenizer.decode(prompt.to_ints()))
        assert (
            "<|im_start|>system\nBe brief.<|im_end|>" in text
            and "<|im_start|>user\n{2} is for 1 + {x}?<|im_end|>" in text
        )
        assert text.endswith("<|im_start|>assistant\n")
        plain = tokenizer.decode(build_sdft_teacher_prompt("Why?", "Because.", renderer).to_ints())
        assert "system" not in plain and plain.index("Why?") < plain.index("Because.")

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{question}", r"has the fields \['question'\]"),
            ("{question} {golden_answer} {json}", r"\['golden_answer', 'json', 'question'\]"),
            ("{question} {golden_answer} {", "double braces that are literal text"),
        ],
    )
    def test_a_template_without_its_fields_is_refused(self, template: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            demonstrations.check_template(template)

    def test_the_default_has_them(self) -> None:
        demonstrations.check_template(demonstrations.DEFAULT_DEMO_TEMPLATE)


def test_demonstrations_come_in_batches_with_their_questions() -> None:
    renderer = get_renderer("qwen3_instruct", get_tokenizer(MODEL))
    groups: list[EnvGroupBuilder] = [
        OneTurnGroupBuilder(partial(PromptOnlyEnv, f"q{i}", renderer), 1) for i in range(5)
    ]
    items = [Demonstration(f"q{i}", f"a{i}", group) for i, group in enumerate(groups)]
    plain = DemonstrationDataset(items, groups_per_batch=3)
    assert len(plain) == 2
    assert plain.get_batch(1) == (groups[3:], ["q3", "q4"], ["a3", "a4"])
    shuffled = DemonstrationDataset(items, groups_per_batch=4, num_groups=10, seed=1)
    drawn = [shuffled.get_batch(i) for i in range(len(shuffled))]
    assert [len(builders) for builders, _, _ in drawn] == [4, 4, 2]
    questions = [question for _, batch, _ in drawn for question in batch]
    assert sorted(questions[:5]) == sorted(questions[5:]) == [f"q{i}" for i in range(5)]
    assert questions[:5] != questions[5:]
    for builders, asked, answers in drawn:
        assert (
            [groups.index(builder) for builder in builders]
            == [int(q[1:]) for q in asked]
            == [int(a[1:]) for a in answers]
        )
    with pytest.raises(IndexError, match="batch 3 of a dataset with 3 batches"):
        shuffled.get_batch(3)
