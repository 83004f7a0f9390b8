"""The vLLM sampler against a stand-in: what it is told, how its answers are taken, its end and its replacement."""

import asyncio
import gc
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tests.engine.helpers import STEP, cross_entropy_datum, prompt
from tests.samplers.conftest import StandIn, vllm_sampler
from tests.samplers.stand_in import CHATTY, DEADLY, LOGPROB, NOT_A_NUMBER, REFUSED, SHORT, SILENT
from tests.waiting import loop_until, until
from tinker_local_backend import (
    Constraint,
    ModelLoadError,
    RequestError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from tinker_local_backend.engine.model.memory_plan import SCORING_TOKENS
from tinker_local_backend.engine.sampling.token_choice import mix_seed
from tinker_local_backend.errors import EngineClosedError, SamplingError
from tinker_local_backend.samplers import choice
from tinker_local_backend.samplers.transport import Accepts
from tinker_local_backend.samplers.vllm_settings import VllmSettings
from tinker_local_backend.samplers.worker_process import engine_arguments, largest_rank

Ask = Callable[..., Any]


class TestCompletions:
    def test_it_is_told_everything_and_its_tokens_come_back(self, ask: Ask, stand_in: StandIn) -> None:
        response = ask([1, 2, 40], samples=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1).result()
        assert [s.tokens for s in response.sequences] == [[41, 42, 43]] * 2
        assert [s.logprobs for s in response.sequences] == [[LOGPROB] * 3] * 2
        assert [s.stop_reason for s in response.sequences] == ["length"] * 2
        assert response.prompt_cache_hit_tokens == 3
        told = stand_in.told("add")
        assert [order["seed"] for order in told] == [mix_seed(5, 0), mix_seed(5, 1)]
        for order in told:
            del order["number"], order["seed"], order["op"]
        assert (
            told
            == [
                dict(
                    prompt=[1, 2, 40],
                    max_tokens=3,
                    temperature=0.7,
                    top_k=5,
                    top_p=0.9,
                    min_p=0.1,
                    stop=[],
                    topk=0,
                    adapter=None,
                    salt="",
                )
            ]
            * 2
        )

    def test_a_stop_token_stays_and_a_stop_string_ends_it(
        self, ask: Ask, sampler: SamplingClient, stand_in: StandIn
    ) -> None:
        (by_token,) = ask([1, 40], stop=[42], max_tokens=9).result().sequences
        assert (by_token.tokens, by_token.stop_reason) == ([41, 42], "stop")
        text = sampler.get_tokenizer().decode([43, 44])
        future = ask([1, 40], stop=[text], max_tokens=200)
        (by_text,) = future.result().sequences
        assert (by_text.tokens, by_text.stop_reason) == ([41, 42, 43, 44], "stop")
        assert len(by_text.logprobs) == 4
        order = stand_in.told("add")[-1]
        until(lambda: [order["number"]] in [told["numbers"] for told in stand_in.told("abort")])

    def test_the_likeliest_tokens_beside_each(self, sampler: SamplingClient) -> None:
        params = tinker.SamplingParams(max_tokens=2, stop=[])
        (sequence,) = sampler.sample(prompt([1, 40]), 1, params, topk_sample_logprobs=2).result().sequences
        assert sequence.topk_logprobs == [[(41, LOGPROB), (900, -2.0)], [(42, LOGPROB), (900, -2.0)]]

    def test_what_is_asked_of_a_prompt_is_the_engines(self, sampler: SamplingClient, stand_in: StandIn) -> None:
        tokens = [3, 1, 4, 1, 5, 9, 2, 6]
        alone = sampler.compute_logprobs(prompt(tokens)).result()
        assert stand_in.told("add") == []
        assert alone[0] is None and all(value is not None and value < 0 for value in alone[1:])
        params = tinker.SamplingParams(max_tokens=2, stop=[])
        response = sampler.sample(
            prompt(tokens), 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
        ).result()
        assert response.prompt_logprobs == pytest.approx(alone)
        topk = response.topk_prompt_logprobs
        assert topk is not None and topk[-1] is not None and len(topk[-1]) == 3
        assert [s.tokens for s in response.sequences] == [[7, 8]] * 2

    def test_progress_is_told(self, sampler: SamplingClient) -> None:
        seen: list[int] = []
        params = tinker.SamplingParams(max_tokens=20, stop=[])
        sampler.sample(
            prompt([1, 40]), 1, params, on_progress=lambda sequences: seen.append(len(sequences[0].tokens))
        ).result()
        assert seen == sorted(seen) and seen[-1] == 20

    def test_a_cancelled_request_is_let_go(self, ask: Ask, stand_in: StandIn) -> None:
        async def give_up() -> None:
            asking = asyncio.ensure_future(ask([SILENT], samples=2).result_async())
            await loop_until(lambda: len(stand_in.told("add")) == 2)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

        asyncio.run(give_up())
        numbers = [order["number"] for order in stand_in.told("add")]
        until(lambda: sorted(i for told in stand_in.told("abort") for i in told["numbers"]) == sorted(numbers))
        assert ask([1, 40]).result().sequences[0].tokens == [41, 42, 43]

    def test_what_it_does_and_how_long_that_took(self, ask: Ask, service: ServiceClient, model: str) -> None:
        ask([1, 40]).result()
        waiting = ask([SILENT], samples=2)
        until(lambda: service._engine.sampler_stats()[model].waiting == 1)
        stats = service._engine.sampler_stats()[model]
        assert stats.longest_wait > 0 and stats.wait_p50 > 0
        waiting.future().cancel()
        until(lambda: service._engine.sampler_stats()[model].waiting == 0)


class TestErrors:
    def test_one_that_it_refuses_fails_alone(self, ask: Ask) -> None:
        good = ask([1, 40])
        with pytest.raises(SamplingError, match="vLLM refused the request: ValueError: no such adapter layout"):
            ask([REFUSED, 1]).result()
        assert good.result().sequences[0].tokens == [41, 42, 43]

    def test_nan_is_a_diverged_adapter(self, ask: Ask) -> None:
        with pytest.raises(RequestError, match="diverged"):
            ask([NOT_A_NUMBER, 40], samples=2).result()

    def test_an_answer_that_is_not_understood_ends_it(self, ask: Ask, stand_in: StandIn) -> None:
        with pytest.raises(SamplingError, match=r"its answer b'vLLM says hello.*' is invalid \(JSONDecodeError"):
            ask([CHATTY]).result()
        assert ask([1, 40]).result().sequences[0].tokens == [41, 42, 43]

    def test_an_end_before_its_time_is_no_completion(self, ask: Ask) -> None:
        with pytest.raises(SamplingError, match=r"ended a completion after 1 tokens \(length\)"):
            ask([SHORT, 40]).result()

    def test_its_death_is_named_and_the_next_request_starts_it_anew(
        self, ask: Ask, stand_in: StandIn, caplog: pytest.LogCaptureFixture
    ) -> None:
        silent = ask([SILENT])
        expected = rf"the vLLM worker \(process {stand_in.pids[0]}\) ended with code 3: the roof fell in"
        with pytest.raises(SamplingError, match=expected):
            ask([DEADLY]).result()
        with pytest.raises(SamplingError, match=expected):
            silent.result()
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "2 requests fail" in record.getMessage() and str(stand_in.pids[0]) in record.getMessage()
        assert ask([1, 40]).result().sequences[0].tokens == [41, 42, 43]
        assert len(set(stand_in.pids)) == 2

    def test_kill_9(self, ask: Ask, stand_in: StandIn) -> None:
        silent = ask([SILENT])
        until(lambda: stand_in.told("add"))
        os.kill(stand_in.pids[0], signal.SIGKILL)
        with pytest.raises(SamplingError, match="was ended by signal SIGKILL"):
            silent.result()
        assert ask([1, 40]).result().sequences[0].tokens == [41, 42, 43]

    def test_what_waits_when_the_service_is_closed(self, ask: Ask, service: ServiceClient, stand_in: StandIn) -> None:
        silent = ask([SILENT])
        service.close()
        with pytest.raises(EngineClosedError):
            silent.result()
        with pytest.raises(ProcessLookupError):
            os.kill(stand_in.pids[0], 0)


def snapshot(training: TrainingClient) -> SamplingClient:
    """After a step, so that it differs from the one before."""
    training.forward_backward([cross_entropy_datum(6, seed=0)], "cross_entropy")
    training.optim_step(STEP)
    return training.save_weights_and_get_sampling_client().result()


class TestAdapters:
    def test_each_snapshot_has_files_and_names_of_its_own(
        self, training: TrainingClient, ask: Ask, stand_in: StandIn
    ) -> None:
        first, second = snapshot(training), snapshot(training)
        for client in (first, second, first):
            ask([1, 40], client).result()
        adapters = [order["adapter"] for order in stand_in.told("add")]
        assert adapters[0] == adapters[2] != adapters[1]
        assert len({number for number, *_ in adapters}) == len({name for _, name, *_ in adapters}) == 2
        for _, name, folder, is_3d in adapters:
            assert not is_3d
            assert Path(folder).name == name
            assert {file.name for file in Path(folder).iterdir()} == {
                "adapter_config.json",
                "adapter_model.safetensors",
            }
            assert json.loads((Path(folder) / "adapter_config.json").read_text())["r"] == 4

    def test_one_that_nobody_has_any_more_is_forgotten(
        self, training: TrainingClient, ask: Ask, stand_in: StandIn
    ) -> None:
        client = snapshot(training)
        ask([1, 40], client).result()
        ((number, _, folder, _),) = [order["adapter"] for order in stand_in.told("add")]
        del client
        gc.collect()
        until(lambda: [told["adapter"] for told in stand_in.told("unload")] == [number])
        until(lambda: not Path(folder).exists())

    def test_with_every_slot_in_use_one_waits(
        self, monkeypatch: pytest.MonkeyPatch, training: TrainingClient, ask: Ask, stand_in: StandIn
    ) -> None:
        sampler = vllm_sampler(training._owner, training._run.model)  # type: ignore[arg-type]
        monkeypatch.setattr(sampler._adapters, "_slots", 1)
        first, second = snapshot(training), snapshot(training)
        silent = ask([SILENT], first)
        later = ask([1, 40], second)
        base = ask([1, 50])
        until(lambda: len(stand_in.told("add")) == 1)
        silent.future().cancel()
        assert later.result().sequences[0].tokens == [41, 42, 43]
        assert base.result().sequences[0].tokens == [51, 52, 53]
        order_of_ops = [line["op"] for line in stand_in.lines if "op" in line and line.get("number", 0) >= 0]
        assert order_of_ops[:4] == ["add", "abort", "unload", "add"]

    def test_the_process_is_replaced_after_so_many(
        self, monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, tmp_path: Path, model: str
    ) -> None:
        monkeypatch.setenv("TINKER_LOCAL_VLLM_RESTART_EVERY", "2")
        with ServiceClient() as service:
            training = service.create_lora_training_client(model, rank=4, seed=0).result()
            clients = [snapshot(training) for _ in range(3)]
            params = tinker.SamplingParams(max_tokens=2, stop=[])
            for client in (clients[0], clients[1], clients[0]):
                client.sample(prompt([1, 40]), 1, params).result()
            assert len(stand_in.pids) == 1
            silent = clients[0].sample(prompt([SILENT]), 1, params)
            third = clients[2].sample(prompt([1, 60]), 1, params)
            until(lambda: len(stand_in.told("add")) == 4)
            assert len(stand_in.pids) == 1  # not while something runs
            silent.future().cancel()
            assert third.result().sequences[0].tokens == [61, 62]
            assert len(stand_in.pids) == 2
            clients[0].sample(prompt([1, 40]), 1, params).result()
            assert len(stand_in.pids) == 2

    def test_a_larger_rank_needs_another_process(self, service: ServiceClient, stand_in: StandIn, model: str) -> None:
        params = tinker.SamplingParams(max_tokens=2, stop=[])
        for rank in (33, 8):
            training = service.create_lora_training_client(model, rank=rank, seed=0).result()
            training.save_weights_and_get_sampling_client().result().sample(prompt([1, 40]), 1, params).result()
        assert [arguments["max_lora_rank"] for arguments in stand_in.arguments] == [32, 64]


class TestStart:
    def test_the_variables_reach_it(
        self, monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, model: str, tmp_path: Path
    ) -> None:
        for name, value in {
            "MAX_LORAS": "3",
            "GPU_MEMORY_UTILIZATION": "0.25",
            "MAX_MODEL_LEN": "100",
            "TENSOR_PARALLEL_SIZE": "2",
            "ENFORCE_EAGER": "1",
        }.items():
            monkeypatch.setenv(f"TINKER_LOCAL_VLLM_{name}", value)
        with ServiceClient() as service:
            client = service.create_sampling_client(base_model=model).result()
            (arguments,) = stand_in.arguments
            assert arguments == {
                "model": model,
                "dtype": "float32",
                "max_model_len": 100,
                "max_loras": 4,  # one to spare
                "max_lora_rank": 32,
                "gpu_memory_utilization": 0.25,
                "tensor_parallel_size": 2,
                "enforce_eager": True,
            }
            params = tinker.SamplingParams(max_tokens=99)
            with pytest.raises(RequestError, match=r"context of vLLM of 100.*raise TINKER_LOCAL_VLLM_MAX_MODEL_LEN"):
                client.sample(prompt([1, 2]), 1, params)

    def test_without_variables(self, sampler: SamplingClient, stand_in: StandIn) -> None:
        (arguments,) = stand_in.arguments
        assert (arguments["max_loras"], arguments["max_model_len"]) == (9, 256)
        settings = VllmSettings.from_environment(sampler._model.device)
        assert engine_arguments(sampler._model, settings, Accepts(600))["max_lora_rank"] == 600
        assert [largest_rank(rank) for rank in (1, 8, 9, 512)] == [8, 8, 16, 512]

    def test_on_a_gpu_its_context_is_what_fits(self, sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch) -> None:
        model: Any = SimpleNamespace(
            name="model", dtype=torch.bfloat16, context_length=40_960, device=torch.device("cuda"), experts=[]
        )
        settings = VllmSettings.from_environment(torch.device("cuda"))
        assert engine_arguments(model, settings, Accepts(32))["max_model_len"] == -1
        assert engine_arguments(model, settings, Accepts(32))["gpu_memory_utilization"] == 0.4
        monkeypatch.setenv("TINKER_LOCAL_VLLM_MAX_MODEL_LEN", "4096")
        chosen = VllmSettings.from_environment(torch.device("cuda"))
        assert engine_arguments(model, chosen, Accepts(32))["max_model_len"] == 4096

    @pytest.mark.parametrize(("asked", "expected"), [(None, SCORING_TOKENS), ("500", 500), ("20000", 20_000)])
    def test_the_engines_own_cache_is_small_beside_it(
        self, monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, model: str, asked: str | None, expected: int
    ) -> None:
        if asked is not None:
            monkeypatch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", asked)
        seen: list[int] = []
        original = choice.new_generator

        def new_generator(base: Any, tokens: int, seed: Any) -> Any:
            seen.append(tokens)
            return original(base, tokens, seed)

        monkeypatch.setattr(choice, "new_generator", new_generator)
        with ServiceClient() as service:
            service.create_sampling_client(base_model=model).result()
        assert seen == [expected]

    def test_a_rank_that_vllm_has_no_room_for_is_refused(self, service: ServiceClient, model: str) -> None:
        training = service.create_lora_training_client(model, rank=513, seed=0).result()
        client = training.save_weights_and_get_sampling_client().result()
        with pytest.raises(RequestError, match="an adapter of rank 513: vLLM takes at most 512"):
            client.sample(prompt([1]), 1, tinker.SamplingParams(max_tokens=1))

    def test_a_constraint_is_refused(self, sampler: SamplingClient) -> None:
        pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
        with pytest.raises(RequestError, match="constraint: vLLM reports logprobs under its mask"):
            sampler.sample(prompt([1]), 1, tinker.SamplingParams(max_tokens=1), constraint=Constraint(regex="a"))

    def test_penalties_are_refused(self, sampler: SamplingClient) -> None:
        asked = SamplingParams(max_tokens=1, presence_penalty=0.5)
        with pytest.raises(RequestError, match="change the logits, and vLLM reports logprobs of the changed ones"):
            sampler.sample(prompt([1]), 1, asked)

    def test_one_that_does_not_start(self, service: ServiceClient, stand_in: StandIn, model: str) -> None:
        stand_in.write(fatal="ValueError: head_dim 16 is not supported")
        with pytest.raises(
            ModelLoadError, match=r"cannot be sampled with vLLM.*ended with code 1: ValueError: head_dim"
        ):
            service.create_sampling_client(base_model=model).result()

    def test_one_that_serves_other_weights(
        self, service: ServiceClient, stand_in: StandIn, model: str, likeliest: list[float]
    ) -> None:
        token, logprob = likeliest[:2]
        stand_in.write(probe=[token, logprob - 0.3, -1.0, -1.0])
        with pytest.raises(ModelLoadError, match=r"it serves other weights or another dtype; serve .* in float32"):
            service.create_sampling_client(base_model=model).result()

    def test_it_leaves_no_folder(
        self, service: ServiceClient, training: TrainingClient, ask: Ask, stand_in: StandIn
    ) -> None:
        ask([1, 40], snapshot(training)).result()
        folder = Path(stand_in.told("add")[-1]["adapter"][2]).parent
        assert folder.exists()
        service.close()
        assert not folder.exists()


class TestRules:
    """What a vLLM reports is found out, and what is not ours is refused."""

    def client(self, service: ServiceClient, stand_in: StandIn, model: str, probe: list[float]) -> SamplingClient:
        stand_in.write(probe=probe)
        return service.create_sampling_client(base_model=model).result()

    def check(self, client: SamplingClient, refused: str, allowed: list[dict], **fields: Any) -> None:
        for params in allowed:
            client.sample(prompt([1, 40]), 1, tinker.SamplingParams(max_tokens=2, stop=[], **params)).result()
        with pytest.raises(RequestError, match=refused):
            client.sample(prompt([1, 40]), 1, tinker.SamplingParams(max_tokens=2, stop=[], **fields))

    def test_raw(self, service: ServiceClient, stand_in: StandIn, model: str, likeliest: list[float]) -> None:
        token, plain = likeliest[:2]
        client = self.client(service, stand_in, model, [token, plain, plain, plain])
        allowed = [{"temperature": 1.0, "top_k": 3, "top_p": 0.5}, {"temperature": 0.0, "top_k": 3}]
        self.check(
            client, r"temperature 0.7: this vLLM.*\(raw_logprobs\); use temperature 1 or 0", allowed, temperature=0.7
        )

    def test_processed(self, service: ServiceClient, stand_in: StandIn, model: str, likeliest: list[float]) -> None:
        token, plain, tempered, _ = likeliest
        client = self.client(service, stand_in, model, [token, plain, tempered, 0.0])
        allowed = [{"temperature": 0.7}, {"temperature": 0.0, "top_k": 3}]
        self.check(
            client, r"top_k 3, top_p 1, min_p 0: this vLLM.*\(processed_logprobs\); use top_k=-1", allowed, top_k=3
        )

    def test_ours(self, ask: Ask, sampler: SamplingClient) -> None:
        allowed = [{"temperature": 0.7, "top_k": 3, "top_p": 0.5}]
        self.check(sampler, r"temperature 0.001 is raised to 0.01", allowed, temperature=0.001)


def test_a_run_says_who_samples(stand_in: StandIn) -> None:
    from tinker_local_backend import environment

    assert environment.describe()["sampler"] == "vllm"
    assert np.isfinite(LOGPROB)
