"""stable_reinforce: the weights of its formula, and data that must be what the engine sampled."""

import dataclasses
import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest
import tinker
import torch

from benchmarks.ours import sampled_datum
from tests.engine.helpers import STEP, gradients, make_training_client, policy_datum, prompt
from tests.engine.test_losses_functions import column, policy_inputs, value_and_gradient
from tinker_local_backend import RequestError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.engine.training.losses import LOSSES, RatioStats
from tinker_local_backend.engine.training.provenance import SampleMemory

LOSS = "stable_reinforce"
PROMPT = (5, 6, 7, 8)
PARAMS = tinker.SamplingParams(max_tokens=6, seed=3)

# Two sequences: ratios of trainer to sampler, of which .4 and 6 are masked and 3 is truncated; and one whose mean log ratio is
# ln 4. The last row was not sampled.
RATIOS = (0.4, 0.6, 1.5, 3.0, 6.0, 4.0, 4.0, 1.0)
ADVANTAGES = (1.0, 2.0, -1.0, 0.5, 1.0, 1.0, -1.0, 0.0)
SEQUENCES = [[0], [0], [0], [0], [0], [1], [1], [1]]
LP = column(-1.0, -2.0, -3.0, -0.5, -4.0, -1.0, -2.0, -9.0)


def inputs() -> dict[str, torch.Tensor]:
    q = LP - column(*RATIOS).log()
    q[-1] = 0.0
    return policy_inputs(q, column(*ADVANTAGES), sequence_index=torch.tensor(SEQUENCES))


class TestFormula:
    def test_value_and_gradient(self) -> None:
        """-w * A, for both: a sign, an inverse ratio or a masked token that trains would change them."""
        value, gradient = value_and_gradient(LOSS, LP, inputs())
        expected = column(0.0, -1.2, 1.5, -1.0, 0.0, 0.0, 0.0, 0.0)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient, expected)

    @pytest.mark.parametrize("turned", ["inverse ratio", "sign"])
    def test_the_golden_value_tells_the_formula_from_its_mirror_images(self, turned: str) -> None:
        given = inputs()
        if turned == "sign":
            given["advantages"] = -given["advantages"]
        else:
            given["logprobs"] = torch.where(given["logprobs"] != 0, 2 * LP - given["logprobs"], 0.0)
        value, _ = value_and_gradient(LOSS, LP, given)
        assert not torch.allclose(value, column(0.0, -1.2, 1.5, -1.0, 0.0, 0.0, 0.0, 0.0))

    def test_a_truncated_token_keeps_a_bounded_gradient(self) -> None:
        """min(r, 2) * A as a surrogate would have none."""
        _, gradient = value_and_gradient(LOSS, LP, inputs())
        assert gradient[3].item() == -2.0 * 0.5
        _, lower = value_and_gradient(LOSS, LP, inputs(), weight_cap=0.5)
        torch.testing.assert_close(lower, column(0.0, -1.0, 0.5, -0.25, 0.0, 0.0, 0.0, 0.0))

    def test_each_bound_is_its_own(self) -> None:
        _, tokens = value_and_gradient(LOSS, LP, inputs(), token_ratio_low=0.3, token_ratio_high=7.0)
        torch.testing.assert_close(tokens, column(-0.4, -1.2, 1.5, -1.0, -2.0, 0.0, 0.0, 0.0))
        _, sequences = value_and_gradient(LOSS, LP, inputs(), sequence_log_ratio_bound=math.log(4.0) + 1e-9)
        torch.testing.assert_close(sequences, column(0.0, -1.2, 1.5, -1.0, 0.0, -2.0, 2.0, 0.0))
        mean = sum(math.log(ratio) for ratio in RATIOS[:5]) / 5  # masked tokens count
        _, none = value_and_gradient(LOSS, LP, inputs(), sequence_log_ratio_bound=abs(mean) - 1e-9)
        assert not none.any()

    def test_a_sequence_that_became_unlikely_is_masked_too(self) -> None:
        given = policy_inputs(LP[:2] + 1.1, column(1.0, 1.0))
        _, gradient = value_and_gradient(LOSS, LP[:2], given, token_ratio_low=0.0)
        assert not gradient.any()

    def test_on_policy_it_is_importance_sampling(self) -> None:
        given = policy_inputs(LP - 1e-3, column(*ADVANTAGES))
        for found, wanted in zip(
            value_and_gradient(LOSS, LP, given), value_and_gradient("importance_sampling", LP, given), strict=True
        ):
            assert torch.equal(found, wanted)

    def test_what_overflows_is_masked(self) -> None:
        given = policy_inputs(column(-500.0, -1.0, -1.0).float(), column(-1.0, 1.0, 1.0).float())
        lp = column(-1.0, -math.inf, -1.0).float()
        value, gradient = value_and_gradient(LOSS, lp, given, sequence_log_ratio_bound=1e9)
        assert not value.any() and not gradient.any()  # their mean is infinite
        value, gradient = value_and_gradient(LOSS, lp[:1], policy_inputs(given["logprobs"][:1], column(1.0).float()))
        assert not value.any() and not gradient.any()

    def test_metrics(self) -> None:
        stats = RatioStats(LOSSES[LOSS])
        stats.add(LP, inputs(), LOSSES[LOSS].config)
        metrics = stats.metrics(LOSSES[LOSS].config)
        assert metrics["clipped_fraction:mean"] == pytest.approx(1 / 7)
        assert metrics["masked_fraction:mean"] == pytest.approx(4 / 7)
        assert metrics["masked_sequences:sum"] == 1.0
        assert metrics["ratio:max"] == pytest.approx(6.0)


@pytest.fixture(scope="module")
def client(service: ServiceClient, tied_model: str) -> TrainingClient:
    return make_training_client(service, tied_model)


def sampled(sampler: SamplingClient, count: int = 2) -> Sequence[tinker.SampledSequence]:
    return sampler.sample(prompt(PROMPT), count, PARAMS).result().sequences


def recorder(client: TrainingClient) -> SamplingClient:
    return client.save_weights_and_get_sampling_client(record_stability_info=True).result()


def datum_of(sequence: tinker.SampledSequence, advantage: float = 1.0) -> tinker.Datum:
    return sampled_datum(PROMPT, sequence, advantage)


def changed(one: tinker.Datum, key: str, position: int, by: float) -> tinker.Datum:
    array = one.loss_fn_inputs[key].to_numpy().copy()
    array[position] += by
    return dataclasses.replace(one, loss_fn_inputs={**one.loss_fn_inputs, key: tinker.TensorData.from_numpy(array)})


def respanned(one: tinker.Datum, **changes: object) -> tinker.Datum:
    """With the sampled run of the targets changed."""
    assert one.loss_fn_input_spans is not None
    first, last = one.loss_fn_input_spans
    return dataclasses.replace(one, loss_fn_input_spans=[first, dataclasses.replace(last, **changes)])


class TestProvenance:
    def test_what_was_sampled_trains_and_is_forgotten(self, service: ServiceClient, client: TrainingClient) -> None:
        memory = client._run.engine.samples
        before = len(memory)
        good, bad = sampled(recorder(client))
        assert len(memory) == before + 2
        output = client.forward_backward(
            [datum_of(good), datum_of(bad, -1.0)], LOSS, {"verify_provenance": True}
        ).result()
        assert output.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-4) and any(
            matrix.any() for matrix in gradients(client).values()
        )
        assert len(memory) == before + 2  # a second pass before the step may use them
        client.optim_step(STEP).result()
        assert len(memory) == before
        client.forward([datum_of(good)], LOSS).result()
        with pytest.raises(
            RequestError, match=r"data\[0\]: model_input\[0:4\]: this engine has no record of sequence .* trained on"
        ):
            client.forward([datum_of(good)], LOSS, {"verify_provenance": 1}).result()

    def test_a_client_that_does_not_record_leaves_nothing(self, client: TrainingClient) -> None:
        before = len(client._run.engine.samples)
        sampled(client.save_weights_and_get_sampling_client().result())
        assert len(client._run.engine.samples) == before

    def test_what_is_not_true_is_refused(self, client: TrainingClient) -> None:
        one, other = (datum_of(sequence) for sequence in sampled(recorder(client)))
        first, tokens = len(PROMPT) - 1, one.model_input.to_ints()
        wrong_prompt = dataclasses.replace(one, model_input=prompt([*tokens[:2], 9, *tokens[3:]]))
        assert other.loss_fn_input_spans is not None
        cases = [
            (
                changed(one, "logprobs", first + 1, 1e-6),
                r"loss_fn_inputs\[3:9\]: position 1 has .*, but logprobs\[1\] of",
            ),
            (changed(one, "target_tokens", first, 1), r"position 0 has \d+, but tokens\[0\] of sequence"),
            (wrong_prompt, r"model_input\[0:4\]: position 2 has 9, but prompt\[2\] of sequence .* is 7"),
            (
                changed(one, "advantages", 0, 0.5),
                r"\[0:3\] comes from a prompt according to its provenance, but has advantages",
            ),
            (respanned(one, offset=1), r"its provenance is tokens 1 to 7 of sequence .*, which has 6"),
            (respanned(one, length=5), r"provenance of loss_fn_inputs covers 8 positions of 9"),
            (
                dataclasses.replace(one, loss_fn_input_spans=other.loss_fn_input_spans),
                r"but tokens\[\d\] of sequence",
            ),
            (
                dataclasses.replace(one, model_input_spans=None, loss_fn_input_spans=None),
                r"data\[1\] has no provenance, which this loss needs: .* record_stability_info=True",
            ),
        ]
        for bad, message in cases:
            with pytest.raises(RequestError, match=message):
                client.forward([other, bad], LOSS).result()
        client.forward(
            [other, changed(one, "target_tokens", 0, 3)], LOSS
        ).result()  # inside the prompt: carries no loss

    def test_other_losses_take_any_provenance(self, client: TrainingClient) -> None:
        one = datum_of(sampled(recorder(client), 1)[0])
        client.forward([changed(one, "logprobs", len(PROMPT), -0.5)], "importance_sampling").result()

    def test_a_sampler_of_a_checkpoint_records_too(self, service: ServiceClient, client: TrainingClient) -> None:
        path = client.save_weights_for_sampler("recorded").result().path
        model = client.get_info().model_data.model_name
        samplers = [
            service.create_sampling_client(path, record_stability_info=True).result(),
            service.create_sampling_client(path, model, record_stability_info=True).result(),
            service.create_sampling_client(base_model=model, record_stability_info=True).result(),
            client.create_sampling_client(path, record_stability_info=True).result(),
        ]
        data = [datum_of(sampled(sampler, 1)[0]) for sampler in samplers]
        client.forward(data, LOSS, {"verify_provenance": 1, "sequence_log_ratio_bound": 1e9}).result()
        with pytest.raises(RequestError, match=r"is of base model .*, not 'other'"):
            service.create_sampling_client(path, "other")

    def test_the_line_on_its_formula_is_said_once_a_run(
        self, service: ServiceClient, tied_model: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        fresh = make_training_client(service, tied_model)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                fresh.forward([policy_datum(6, 0)], LOSS).result()
        assert [record.message for record in caplog.records if "formula is not published" in record.message] == [
            "stable_reinforce: this is the local engine's own loss of that name; the hosted service's formula is not published"
        ]


def sequence_of(name: str, length: int) -> tinker.SampledSequence:
    return tinker.SampledSequence(
        stop_reason="stop",
        sequence_id=name,
        tokens_np=np.arange(length, dtype=np.int32),
        logprobs_np=np.zeros(length, dtype=np.float32),
    )


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = SampleMemory(limit=3 * (4 * 2 + 8 * 10))
    for i in range(5):
        memory.add([1, 2], [sequence_of(str(i), 10)], [[]])
    assert [memory.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    memory.add([1, 2], [sequence_of("3", 10)], [[]])  # sent again: it counts once, and is the newest
    memory.remove(["2", "unknown"])
    memory.add([1, 2], [sequence_of("5", 10)], [[]])
    assert [memory.get(str(i)) is not None for i in range(6)] == [False, False, False, True, True, True]
