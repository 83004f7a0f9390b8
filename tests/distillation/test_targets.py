"""Teacher targets: against a plain float64 reference on the tiny model, and their alignment and weights on any input."""

import asyncio

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker.types import SampleResponse
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs
from transformers import AutoModelForCausalLM

from tests.drawn import examples
from tests.fakes import FakeSamplingClient, seeded_reply
from tinker_cookbook import backends
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation.targets import (
    TeacherScores,
    renormalised,
    score_batch,
    score_datum,
    soft_target_datum,
    soft_target_metrics,
)
from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL = str(EXAMPLE_DATA / "tiny_chat")
K = 7


def make_datum(tokens: list[int], weights: list[float]) -> tinker.Datum:
    """N = len(tokens) - 1 positions with these weights."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": tinker.TensorData.from_numpy(np.array(weights, dtype=np.float32)),
        },
    )


def conversations(count: int) -> list[tinker.Datum]:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name="qwen3_instruct", max_length=None, batch_size=count
    )
    path = str(EXAMPLE_DATA / "conversations.jsonl")
    return FromConversationFileBuilder(common_config=common, file_path=path)()[0].get_batch(0)


def tokens_of(datum: tinker.Datum) -> list[int]:
    return [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]


class TestAgainstAPlainReference:
    @pytest.fixture
    def reference_TV(self) -> list[torch.Tensor]:
        """float64 log-probabilities of what follows each input, by transformers alone."""
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).double().eval()
        with torch.no_grad():
            return [
                model(torch.tensor([datum.model_input.to_ints()])).logits[0].log_softmax(-1)
                for datum in conversations(3)
            ]

    def test_targets_weights_loss_and_metrics(self, reference_TV: list[torch.Tensor]) -> None:
        data = conversations(3)

        async def run():
            service = backends.create_service_client("local")
            teacher = await service.create_sampling_client(base_model=MODEL)
            student = await service.create_lora_training_client(MODEL, rank=4, seed=0)
            batch = await score_batch([teacher], [(0, datum) for datum in data], K, concurrency=2)
            return batch, await student.forward(batch.soft_data(), "cross_entropy")

        batch, output = asyncio.run(run())
        loss, kls, weights = 0.0, 0.0, 0.0
        for datum, soft, scores, logprobs_NV in zip(data, batch.soft_data(), batch.scores, reference_TV, strict=True):
            top = logprobs_NV.topk(K, dim=-1)
            np.testing.assert_allclose(scores.logprobs_NK, top.values.numpy(), atol=2e-5)
            tokens_NK = soft.loss_fn_inputs["target_tokens"].to_numpy()
            np.testing.assert_array_equal(tokens_NK, top.indices.numpy())
            q_NK = top.values.softmax(-1).numpy()
            w_N = datum.loss_fn_inputs["weights"].to_numpy().astype(np.float64)
            np.testing.assert_allclose(soft.loss_fn_inputs["weights"].to_numpy(), w_N[:, None] * q_NK, atol=1e-6)
            # The fresh student is the teacher: its loss is the teacher's own cross-entropy over the K tokens.
            nll_N = -(q_NK * top.values.numpy()).sum(1)
            loss += float((w_N * nll_N).sum())
            kls += float((w_N * (nll_N + (q_NK * np.log(q_NK)).sum(1))).sum())
            weights += float(w_N.sum())
        assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        metrics = batch.report(output)
        assert metrics["train/nll"] == pytest.approx(loss / weights, rel=1e-5)
        assert metrics["train/kl"] == pytest.approx(kls / weights, rel=1e-4)
        # With the student equal to the teacher, what is left of the KL is the mass outside the top k.
        assert metrics["train/kl"] > 0 and metrics["train/teacher_mass"] < 1

    def test_with_the_whole_vocabulary_the_kl_to_oneself_is_zero(self) -> None:
        async def run() -> dict[str, float]:
            service = backends.create_service_client("local")
            teacher = await service.create_sampling_client(base_model=MODEL)
            student = await service.create_lora_training_client(MODEL, rank=4, seed=0)
            vocabulary = len(teacher.get_tokenizer())
            batch = await score_batch([teacher], [(0, datum) for datum in conversations(2)], vocabulary, 64)
            return batch.report(await student.forward(batch.soft_data(), "cross_entropy"))

        metrics = asyncio.run(run())
        assert metrics["train/kl"] == pytest.approx(0.0, abs=1e-5)
        assert metrics["train/teacher_mass"] == pytest.approx(1.0, abs=1e-5)


tokens_and_weights = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 40), min_size=n + 1, max_size=n + 1),
        st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=n, max_size=n),
    )
)


class TestAlignment:
    @given(tokens_and_weights, st.integers(1, 5))
    @examples(50)
    def test_position_i_gets_what_the_teacher_says_of_token_i_plus_1(
        self, example: tuple[list[int], list[float]], k: int
    ) -> None:
        tokens, weights = example
        datum = make_datum(tokens, weights)
        client = FakeSamplingClient(0, seeded_reply, [], [])

        async def ask() -> TeacherScores:
            return await score_datum(client, datum, k)

        scores = asyncio.run(ask())
        assert client.sampled[0].prompt == tokens
        soft = soft_target_datum(datum, scores)
        # The fake calls t, t + 1, ... likeliest where token t stands.
        expected = [[token + j for j in range(k)] for token in tokens[1:]]
        assert soft.loss_fn_inputs["target_tokens"].to_numpy().tolist() == expected
        assert soft.model_input.to_ints() == tokens[:-1]
        weights_NK = soft.loss_fn_inputs["weights"].to_numpy()
        assert weights_NK.dtype == np.float32 and soft.loss_fn_inputs["target_tokens"].dtype == "int64"
        np.testing.assert_allclose(weights_NK.sum(axis=1), weights, atol=1e-6)
        halves = 0.5 ** np.arange(1, k + 1)
        np.testing.assert_allclose(weights_NK, np.outer(weights, halves / halves.sum()), atol=1e-6)

    @given(st.lists(st.lists(st.floats(-30, 0), min_size=3, max_size=3), min_size=1, max_size=5))
    def test_renormalised_probabilities_keep_their_ratios(self, logprobs: list[list[float]]) -> None:
        q = renormalised(TeacherScores(np.zeros((len(logprobs), 3), dtype=np.int64), np.array(logprobs)))
        np.testing.assert_allclose(q.sum(axis=1), 1.0)
        np.testing.assert_allclose(np.log(q[:, 0] / q[:, 1]), np.subtract(*np.array(logprobs).T[:2]), atol=1e-9)


class TestBadAnswers:
    def ask(self, topk: TopkLogprobs | None) -> None:
        class Broken(FakeSamplingClient):
            def sample(self, *arguments, **options):
                async def answer() -> SampleResponse:
                    return SampleResponse(sequences=[], topk_prompt_logprobs_np=topk)

                return answer()

        asyncio.run(score_datum(Broken(0, seeded_reply, [], []), make_datum([1, 2, 3], [1.0, 1.0]), 2))

    def test_no_top_k(self) -> None:
        with pytest.raises(DataValidationError, match=r"shape None, expected \(3, 2\)"):
            self.ask(None)

    def test_wrong_shape(self) -> None:
        with pytest.raises(DataValidationError, match=r"shape \(2, 2\), expected \(3, 2\)"):
            self.ask(TopkLogprobs(np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32)))

    @pytest.mark.parametrize("filler", [MASK_LOGPROB, np.nan])
    def test_a_position_without_probabilities(self, filler: float) -> None:
        logprobs = np.full((3, 2), -1.0, dtype=np.float32)
        logprobs[2] = filler
        with pytest.raises(DataValidationError, match="no probabilities for token 2 of 3"):
            self.ask(TopkLogprobs(np.ones((3, 2), np.int32), logprobs))

    def test_metrics_without_weight_or_of_another_shape(self) -> None:
        scores = TeacherScores(np.zeros((2, 2), dtype=np.int64), np.full((2, 2), -1.0))
        with pytest.raises(DataValidationError, match="sum to 0"):
            soft_target_metrics([make_datum([1, 2, 3], [0.0, 0.0])], [scores], [np.zeros((2, 2))])
        with pytest.raises(DataValidationError, match=r"shape \(2,\) for targets of shape \(2, 2\)"):
            soft_target_metrics([make_datum([1, 2, 3], [1.0, 0.0])], [scores], [np.zeros(2)])
