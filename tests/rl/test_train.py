"""The reinforcement learning loop on the fakes: what it submits and when, what it logs, saves, evaluates and refuses."""

import asyncio
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tests.fakes import FakeServiceClient, FakeTrainingClient, Pending, fake_logprob, said
from tests.rl.loop import NumberDatasetBuilder, NumberEnv, WhichWeights, make_config, rows, run, trains_nothing, untimed
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.rl import train
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.rl.config import AsyncConfig, StreamMinibatchConfig
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.off_policy import OffPolicyCorrection
from tinker_cookbook.rl.rollout_limits import RolloutLimits, TerminationRewardPolicy
from tinker_cookbook.rl.types import StepResult, Trajectory, Transition
from tinker_cookbook.runs import session
from tinker_cookbook.runs.progress import Progress


def datums(count: int) -> list[tinker.Datum]:
    turns = [Transition(tinker.ModelInput.from_ints([1, 2]), said([10 + i]), 0.0, True) for i in range(count)]
    return [datum for t in turns for datum in trajectory_to_data(Trajectory([t], t.ob), 1.0)]


class TestTrainStep:
    def test_all_is_submitted_before_anything_is_awaited(self, service: FakeServiceClient) -> None:
        client = service.create_lora_training_client("m")
        trainer = service.trainers[0]
        service.calls.clear()
        logprobs = asyncio.run(train.train_step(datums(5), trainer, 0.5, 2, "importance_sampling"))
        assert client is not None
        assert service.calls[:4] == ["submit forward_backward", "submit optim_step"] * 2
        assert service.calls[4:] == ["await forward_backward", "await optim_step"] * 2
        assert [len(passed.data) for passed in trainer.passes] == [3, 2]
        # In the order of the data, across substeps.
        assert [tensor.tolist()[-1] for tensor in logprobs] == pytest.approx([fake_logprob(10 + i) for i in range(5)])

    def test_the_mask_stays_here(self, service: FakeServiceClient) -> None:
        service.create_lora_training_client("m")
        data = datums(2)
        asyncio.run(train.train_step(data, service.trainers[0], 0.5, 1, "importance_sampling"))
        (passed,) = service.trainers[0].passes
        assert [set(datum.loss_fn_inputs) for datum in passed.data] == [{"target_tokens", "logprobs", "advantages"}] * 2
        assert all("mask" in datum.loss_fn_inputs for datum in data)

    def test_loss_config_and_adam_arrive(self, service: FakeServiceClient) -> None:
        service.create_lora_training_client("m")
        trainer = service.trainers[0]
        config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
        asyncio.run(train.train_step(datums(1), trainer, 0.25, 1, "ppo", config, grad_clip_norm=2.0))
        assert (trainer.passes[0].loss_fn, trainer.passes[0].config) == ("ppo", config)
        (adam,) = trainer.adam
        assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (0.25, 0.9, 0.95, 1e-8)
        assert adam.grad_clip_norm == 2.0

    def test_sums_add_up_over_substeps(self, service: FakeServiceClient) -> None:
        service.create_lora_training_client("m")
        metrics: dict[str, float | int | str] = {}
        asyncio.run(train.train_step(datums(5), service.trainers[0], 0.5, 2, "ppo", metrics=metrics))
        assert metrics == {
            "train/num_substeps": 2,
            "train/loss_sum": 5.0,
            "train/ratio": 1.0,
            "optim/grad_norm": 1.0,
        }


class TestSteps:
    def test_each_batch_is_sampled_from_the_weights_of_all_steps_before(
        self, service: FakeServiceClient, tmp_path: Path
    ) -> None:
        run(make_config(tmp_path))
        weights_of_batch = {(call.prompt[2], call.weights) for call in service.sampled}
        assert weights_of_batch == {(0, 0), (1, 1), (2, 2), (3, 3)}
        assert service.created == [("lora", make_config(tmp_path).model_name, 32, 0)]
        assert service.trainers[0].weights == 4

    def test_an_adapter_may_leave_the_mlps_out(self, service: FakeServiceClient, tmp_path: Path) -> None:
        run(make_config(tmp_path, train_mlp=False, max_steps=1))
        assert service.created == [("lora", make_config(tmp_path).model_name, 32, 0, "without mlp")]

    def test_forward_backward_and_optim_step_go_out_together(self, service: FakeServiceClient, tmp_path: Path) -> None:
        run(make_config(tmp_path))
        calls = [call for call in service.calls if "forward_backward" in call or "optim_step" in call]
        step = ["submit forward_backward", "submit optim_step", "await forward_backward", "await optim_step"]
        assert calls == step * 4

    def test_ppo_and_its_config_reach_the_trainer(self, service: FakeServiceClient, tmp_path: Path) -> None:
        config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
        run(make_config(tmp_path, loss_fn="ppo", loss_fn_config=config, max_steps=1))
        assert [(p.loss_fn, p.config) for p in service.trainers[0].passes] == [("ppo", config)]

    @pytest.mark.parametrize("pacing", [{}, {"stream_minibatch_config": StreamMinibatchConfig(num_minibatches=2)}])
    def test_a_schedule_reaches_the_optimizer_and_the_row(
        self, service: FakeServiceClient, tmp_path: Path, pacing: dict[str, Any]
    ) -> None:
        run(make_config(tmp_path, lr_schedule="linear", lr_warmup_steps=1, **pacing))
        rates = [row["optim/lr"] for row in rows(tmp_path)]
        assert rates == pytest.approx([0.25, 0.5, 0.5 * 2 / 3, 0.5 / 3])
        assert [params.learning_rate for params in service.trainers[0].adam] == pytest.approx(rates)

    def test_metrics_of_a_step(self, service: FakeServiceClient, tmp_path: Path) -> None:
        run(make_config(tmp_path))
        written = rows(tmp_path)
        assert [row["step"] for row in written] == [row["progress/batch"] for row in written] == [0, 1, 2, 3]
        assert [row["progress/done_frac"] for row in written] == [0.25, 0.5, 0.75, 1.0]
        first = [token for call in service.sampled if call.prompt[2] == 0 for token in service.reply(call)]
        row = written[0]
        assert row["optim/lr"] == 0.5
        assert row["env/all/reward/total"] == row["env/all/first"] == pytest.approx(sum(first) / len(first))
        assert row["env/all/total_episodes"] == row["env/all/total_turns"] == row["env/all/total_ac_tokens"] == 12
        assert row["env/all/total_ob_tokens"] == 36 and row["env/all/turns_per_episode"] == 1.0
        assert row["env/even/total_episodes"] == 8 and row["env/odd/total_episodes"] == 4
        # Sampler and trainer of the fake agree on every logprob of an action.
        assert row["optim/kl_sample_train_v1"] == row["optim/kl_sample_train_v2"] == 0.0
        assert row["optim/entropy"] > 0 and row["optim/grad_norm"] == 1.0
        assert {"time/total", "time/sampling", "time/train"} <= row.keys()

    @pytest.mark.parametrize(
        "pacing",
        [
            {},
            {"stream_minibatch_config": StreamMinibatchConfig(num_minibatches=2)},
            {"async_config": AsyncConfig(max_steps_off_policy=1)},
        ],
    )
    def test_the_clock_of_a_run_begins_before_its_first_step(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pacing: dict[str, Any]
    ) -> None:
        monkeypatch.setattr(session, "Progress", partial(Progress, clock=lambda: float(len(service.sampled))))
        run(make_config(tmp_path, NumberDatasetBuilder(batches=1), **pacing))
        assert [row["progress/seconds"] for row in rows(tmp_path)] == [12.0]

    def test_groups_are_accounted_for(self, service: FakeServiceClient, tmp_path: Path) -> None:
        run(make_config(tmp_path, NumberDatasetBuilder(groups=5, constant_groups=2)))
        for row in rows(tmp_path):
            parts = [row[f"groups/{part}"] for part in ("trained", "filtered", "stale", "failed")]
            assert row["groups/sampled"] == sum(parts) == 5
            assert row["groups/trained"] <= 3 and row["groups/filtered"] >= 2
            assert row["env/all/by_group/frac_all_good"] >= 0.4

    def test_tags_stay_with_their_groups_when_some_are_removed(
        self, service: FakeServiceClient, tmp_path: Path
    ) -> None:
        dataset = NumberDatasetBuilder(batches=6, groups=2, constant_groups=1)
        run(make_config(tmp_path, dataset, remove_constant_reward_groups=True, on_zero_advantages="skip"))
        for row in rows(tmp_path):
            assert row["env/even/by_group/frac_mixed"] == 0 and row["env/even/reward/total"] == 1
            assert row["env/odd/total_episodes"] == 4
        assert any(row["env/odd/by_group/frac_mixed"] == 1 for row in rows(tmp_path))

    def test_rejection_trains_on_equal_rewards_too(self, service: FakeServiceClient, tmp_path: Path) -> None:
        constant = NumberDatasetBuilder(batches=1, groups=2, constant_groups=2)
        run(make_config(tmp_path, constant, advantage=AdvantageConfig(baseline="constant")))
        assert rows(tmp_path)[0]["groups/trained"] == 2 and service.trainers[0].weights == 1


class TestErrors:
    """What is kept of a run that an error ends, and that the error is the one that is seen."""

    def test_a_row_that_cannot_be_written_leaves_no_checkpoint_beyond_it(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        optim_step = FakeTrainingClient.optim_step

        def diverged(client: FakeTrainingClient, params: tinker.AdamParams) -> Any:
            optim_step(client, params)
            norm = float("nan") if client.weights == 3 else 1.0
            return Pending("optim_step", tinker.types.OptimStepResponse(metrics={"grad_norm": norm}), [])

        monkeypatch.setattr(FakeTrainingClient, "optim_step", diverged)
        with pytest.raises(DataValidationError, match="grad_norm"):
            run(make_config(tmp_path, save_every=2))
        assert [record["batch"] for record in rows(tmp_path, "checkpoints.jsonl")] == [2]
        monkeypatch.setattr(FakeTrainingClient, "optim_step", optim_step)
        run(make_config(tmp_path, save_every=2))
        assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
        assert service.trainers[1].weights == 4

    def test_a_save_that_fails_too_is_logged_and_does_not_take_its_place(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(self: NumberEnv, action: list[int], *, extra: Any = None) -> Any:
            if self.prompt.to_ints()[2] == 2:
                raise OSError("the cause")
            return await step(self, action, extra=extra)

        def broken(*arguments: Any, **options: Any) -> Any:
            raise ConnectionError("no route")

        step = NumberEnv.step
        monkeypatch.setattr(NumberEnv, "step", fail)
        monkeypatch.setattr(FakeTrainingClient, "save_state", broken)
        with pytest.raises(OSError, match="the cause"):
            run(make_config(tmp_path))
        assert "no route" in (tmp_path / "logs.log").read_text()

    def test_an_evaluation_that_fails_at_the_end_costs_no_step(
        self, service: FakeServiceClient, tmp_path: Path
    ) -> None:
        class Fragile(WhichWeights):
            broken = True

            async def __call__(self, sampling_client: Any) -> dict[str, float]:
                if sampling_client.weights == 4 and self.broken:
                    raise OSError("the judge is gone")
                return await super().__call__(sampling_client)

        settings: dict[str, Any] = {"eval_every": 2, "advantage": AdvantageConfig(baseline="role")}
        run(make_config(tmp_path / "whole", evaluator_builders=[WhichWeights], **settings))
        config = make_config(tmp_path / "run", evaluator_builders=[Fragile], **settings)
        with pytest.raises(OSError, match="the judge"):
            run(config)
        assert [record["batch"] for record in rows(tmp_path / "run", "checkpoints.jsonl")] == [4]
        Fragile.broken = False
        run(config)
        assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
        assert [trainer.weights for trainer in service.trainers] == [4, 4, 4] and service.trainers[2].passes == []
        whole, final = (rows(tmp_path / name, "checkpoints.jsonl")[-1] for name in ("whole", "run"))
        assert final["final"] and final["role_baselines"] == whole["role_baselines"]
        run(config)  # now it is complete
        assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
        assert len(rows(tmp_path / "run", "checkpoints.jsonl")) == 2


class TestOffPolicyCorrection:
    def test_metrics_and_records_keep_the_logprobs_of_when_it_was_sampled(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = FakeTrainingClient._output

        def shifted(client: FakeTrainingClient, data: list[tinker.Datum]) -> tinker.ForwardBackwardOutput:
            found = output(client, data)
            for outputs in found.loss_fn_outputs:
                outputs["logprobs"] = tinker.TensorData.from_numpy(outputs["logprobs"].to_numpy() + np.float32(0.25))
            return found

        monkeypatch.setattr(FakeTrainingClient, "_output", shifted)
        correction = OffPolicyCorrection(cap=2.0)
        run(
            make_config(
                tmp_path, max_steps=1, off_policy_correction=correction, compute_post_kl=True, write_records=True
            )
        )
        (row,) = rows(tmp_path)
        assert row["off_policy/ratio_mean"] == pytest.approx(math.exp(0.25), rel=1e-5)
        assert row["optim/kl_sample_train_v1"] == pytest.approx(-0.25, rel=1e-5)
        assert row["optim/ratio_max"] == pytest.approx(math.exp(0.25), rel=1e-5)  # raw, whatever a loss clips
        assert row["optim/kl_by_depth/0"] == pytest.approx(0.25**2 / 2, rel=1e-5) and row["optim/kl_alarm"] == 1
        assert (
            "step 0: the KL between sampler and trainer is above kl_alarm=0.01" in (tmp_path / "logs.log").read_text()
        )
        assert row["optim/kl_pre_post_v1"] == 0  # the fake's samplers all agree
        (passed,) = service.trainers[0].passes
        record = json.loads((tmp_path / "training_step_0001.json").read_text())
        for datum, trained in zip(record["training_data"], passed.data, strict=True):
            token = datum["target_tokens"][-1]
            assert datum["sampling_logprobs"][-1] == pytest.approx(fake_logprob(token), rel=1e-6)
            assert trained.loss_fn_inputs["logprobs"].tolist()[-1] == pytest.approx(fake_logprob(token) + 0.25)
            assert datum["advantages"] == pytest.approx(trained.loss_fn_inputs["advantages"].tolist(), rel=1e-6)
            ratio = datum["advantages"][-1] / datum["metadata"]["centered_reward"]
            assert ratio == pytest.approx(math.exp(0.25), rel=1e-5)


class TestEvaluation:
    def test_before_the_step_and_of_the_final_weights(self, service: FakeServiceClient, tmp_path: Path) -> None:
        evaluator = WhichWeights()
        dataset = NumberDatasetBuilder(batches=5, with_test=True)
        run(make_config(tmp_path, dataset, eval_every=2, evaluator_builders=[lambda: evaluator]))
        assert evaluator.seen == [0, 2, 4, 5]
        evaluated = {row["step"]: row["eval/weights"] for row in rows(tmp_path) if "eval/weights" in row}
        assert evaluated == {0: 0, 2: 2, 4: 4, 5: 5}
        assert {row["step"] for row in rows(tmp_path) if "test/env/all/reward/total" in row} == {0, 2, 4, 5}
        assert rows(tmp_path)[-1]["progress/done_frac"] == 1.0

    def test_never_with_zero(self, service: FakeServiceClient, tmp_path: Path) -> None:
        evaluator = WhichWeights()
        run(make_config(tmp_path, evaluator_builders=[lambda: evaluator]))
        assert evaluator.seen == [] and [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]

    def test_at_the_temperature_of_training(self, service: FakeServiceClient, tmp_path: Path) -> None:
        dataset = NumberDatasetBuilder(batches=1, with_test=True)
        config = {"temperature": 0.5}
        run(make_config(tmp_path, dataset, eval_every=1, temperature=0.5, loss_fn_config=config))
        assert {call.params.temperature for call in service.sampled} == {0.5}
        assert service.trainers[0].passes[0].config == config

    def test_from_the_tokens_that_training_samples_from(self, service: FakeServiceClient, tmp_path: Path) -> None:
        dataset = NumberDatasetBuilder(batches=1, with_test=True)
        run(make_config(tmp_path, dataset, eval_every=1, top_k=3, top_p=0.9, min_p=0.2))
        assert len(service.sampled) > 2
        asked = [call.params for call in service.sampled]
        assert {(params.top_k, params.top_p, getattr(params, "min_p", None)) for params in asked} == {(3, 0.9, 0.2)}

    def test_with_the_termination_policy_of_training(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def unending(self: NumberEnv, action: list[int], *, extra: Any = None) -> StepResult:
            return StepResult(1.0, False, self.prompt, [0])

        monkeypatch.setattr(NumberEnv, "step", unending)
        monkeypatch.setattr(NumberEnv, "rollout_limits", RolloutLimits(max_turns=2), raising=False)
        termination = TerminationRewardPolicy(zero_reward_on_limit=True)
        dataset = NumberDatasetBuilder(batches=1, with_test=True)
        with trains_nothing():
            run(make_config(tmp_path, dataset, eval_every=1, termination=termination))
        row = rows(tmp_path)[0]
        assert row["test/env/all/stop/max_turns"] == row["env/all/stop/max_turns"] == 1
        assert row["test/env/all/reward/total"] == row["env/all/reward/total"] == 0


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("save_every", "batches"), [(2, [2, 4, 5]), (5, [5]), (0, [5]), (1, [1, 2, 3, 4, 5]), (9, [5])]
    )
    def test_cadence_and_final_record(
        self, service: FakeServiceClient, tmp_path: Path, save_every: int, batches: list[int]
    ) -> None:
        run(make_config(tmp_path, NumberDatasetBuilder(batches=5), save_every=save_every))
        records = rows(tmp_path, "checkpoints.jsonl")
        assert [record["batch"] for record in records] == batches
        assert [record["name"] for record in records] == [*(f"{batch:06d}" for batch in batches[:-1]), "final"]
        assert [record.get("final", False) for record in records] == [False] * (len(batches) - 1) + [True]
        for record in records:
            # `batch` is the next one to run: the weights have seen exactly the batches before it.
            assert service.saved[record["state_path"]] == service.saved[record["sampler_path"]] == record["batch"]
        assert service.ttl[records[-1]["state_path"]] is None

    def test_start_from_given_weights(self, service: FakeServiceClient, tmp_path: Path) -> None:
        service.saved["tinker://other/weights/x"] = 7
        run(make_config(tmp_path, max_steps=1, load_checkpoint_path="tinker://other/weights/x"))
        assert service.created == [("state", "tinker://other/weights/x")]
        assert {call.weights for call in service.sampled} == {7}


class TestRefusals:
    def refused(self, service: FakeServiceClient, config: train.Config) -> str:
        """The message; nothing was created or written."""
        with pytest.raises(ConfigurationError) as raised:
            run(config)
        assert service.created == [] and service.calls == [] and not Path(config.log_path).exists()
        return str(raised.value)

    def test_sampling_and_scoring_at_different_temperatures(self, service: FakeServiceClient, tmp_path: Path) -> None:
        message = self.refused(service, make_config(tmp_path / "run", temperature=0.7))
        assert "temperature=0.7" in message and "loss_fn_config temperature=1.0" in message
        assert "set loss_fn_config={'temperature': 0.7}" in message
        config = make_config(tmp_path / "run", loss_fn_config={"temperature": 0.7})
        assert "temperature=1.0" in self.refused(service, config)

    def test_the_hosted_trainer_knows_no_temperature(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-none")
        hosted: dict[str, Any] = {"backend": "tinker", "model_name": "Qwen/Qwen3-8B"}
        message = self.refused(service, make_config(tmp_path / "run", temperature=0.7, **hosted))
        assert "set temperature=1.0" in message
        message = self.refused(service, make_config(tmp_path / "run", min_p=0.1, **hosted))
        assert "min_p=0.1: the hosted service does not offer it" in message and "backend=local" in message
        matched = make_config(tmp_path / "run", temperature=0.7, loss_fn_config={"temperature": 0.7}, **hosted)
        assert "only the local engine supports" in self.refused(service, matched)

    def test_unknown_loss(self, service: FakeServiceClient, tmp_path: Path) -> None:
        message = self.refused(service, make_config(tmp_path / "run", loss_fn="reinforce"))
        assert "loss_fn='reinforce'" in message and "ppo" in message

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 1.5, "clip_high_threshold": 0.5}}, "is above"),
            ({"loss_fn": "dro", "loss_fn_config": {"beta": -1.0}}, "beta=-1.0"),
            ({"loss_fn": "ppo", "loss_fn_config": {"clip_high_threshold": float("nan")}}, "clip_high_threshold=nan"),
            ({"loss_fn": "dro", "off_policy_correction": OffPolicyCorrection()}, "leave off_policy_correction out"),
            (
                {"kl_penalty_coef": 0.1, "kl_reference_config": train.KLReferenceConfig(base_model="/no/such/model")},
                "kl_reference_config: model '/no/such/model'",
            ),
        ],
    )
    def test_what_would_fail_only_once_a_model_is_loaded(
        self, service: FakeServiceClient, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        assert message in self.refused(service, make_config(tmp_path / "run", **changes))

    @pytest.mark.parametrize(
        "changes", [{"grad_clip_norm": -1.0}, {"ttl_seconds": 0}, {"kl_penalty_coef": -0.1}, {"rolling_ttl_seconds": 0}]
    )
    def test_numbers_out_of_range(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(changes))):
            make_config(tmp_path / "run", **changes)

    @pytest.mark.parametrize(
        "changes", [{"ttl_seconds": 60}, {"rolling_ttl_seconds": 60, "rolling_save_every": 1}, {"ttl_seconds": 10**9}]
    )
    def test_a_life_of_checkpoints_that_the_hosted_service_does_not_give(
        self, service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
    ) -> None:
        monkeypatch.setenv("TINKER_API_KEY", "tml-none")
        hosted: dict[str, Any] = {"backend": "tinker", "model_name": "Qwen/Qwen3-8B"}
        message = self.refused(service, make_config(tmp_path / "run", **hosted, **changes))
        assert f"{next(iter(changes))}={next(iter(changes.values()))}" in message

    @pytest.mark.parametrize("max_steps", [0, -1])
    def test_nothing_to_train_on(self, service: FakeServiceClient, tmp_path: Path, max_steps: int) -> None:
        assert "nothing to train on" in self.refused(service, make_config(tmp_path / "run", max_steps=max_steps))


def test_every_nth_step_is_drawn(service: FakeServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(make_config(tmp_path / "drawn", span_chart_every=2))
    monkeypatch.setattr(backends, "create_service_client", lambda *_: FakeServiceClient())
    run(make_config(tmp_path / "plain"))
    drawn = sorted(path.parent.name for path in (tmp_path / "drawn").glob("*/timing_gantt.html"))
    assert drawn == ["iteration_000000", "iteration_000002"] and not [*(tmp_path / "plain").glob("*/timing_gantt.html")]
    page = (tmp_path / "drawn" / "iteration_000002" / "timing_gantt.html").read_text()
    assert page.count("<text ") >= 3 and "<title>sampling: " in page and "<title>total: " in page
    assert untimed(tmp_path / "drawn") == untimed(tmp_path / "plain")
