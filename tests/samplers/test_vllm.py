"""The vLLM sampler against the real thing, on a CPU.

TINKER_TEST_VLLM_PYTHON names the python of the environment that has it; `make test-vllm` makes one.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from transformers import Qwen3Config

from tests.child import ROOT, python_path
from tests.engine.conftest import SHAPE, write_model
from tests.engine.helpers import STEP, cross_entropy_datum, make_training_client, prompt, random_tokens
from tests.samplers.conftest import vllm_sampler
from tests.waiting import until
from tinker_local_backend import ModelLoadError, RequestError, SamplingClient, ServiceClient, TrainingClient
from tinker_local_backend.check_logprobs import compare
from tinker_local_backend.errors import SamplingError

pytestmark = pytest.mark.vllm

KEY = "of-the-server"
LARGEST = 1e-4
"""Difference of a sampled logprob from the trainer's, in float32."""

PROMPTS = [random_tokens(length, seed=length) for length in (3, 40, 9, 150)]


@contextmanager
def sampling_with(**variables: str) -> Iterator[None]:
    """The variables of the sampler, of which the engine reads some when a model is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("TINKER_LOCAL_"):
                patch.delenv(name)
        patch.setenv("TINKER_LOCAL_DEVICE", "cpu")
        for name, value in variables.items():
            patch.setenv(f"TINKER_LOCAL_{name}", value)
        yield


def in_a_process(**variables: str) -> dict[str, str]:
    python = os.environ.get("TINKER_TEST_VLLM_PYTHON")
    assert python, "set TINKER_TEST_VLLM_PYTHON, or use `make test-vllm`"
    return {"SAMPLER": "vllm", "VLLM_PYTHON": python, "VLLM_GPU_MEMORY_UTILIZATION": "0.1"} | variables


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[ServiceClient]:
    """One vLLM for most tests, with room for two adapters."""
    with sampling_with(**in_a_process(VLLM_MAX_LORAS="2")), ServiceClient(home=home) as service:
        yield service


def test_it_knows_every_argument_that_it_is_given() -> None:
    """Also those that a CPU refuses, and sleeping itself; the others are given by all tests here."""
    script = (
        "import dataclasses, json, vllm; "
        "print(json.dumps([[f.name for f in dataclasses.fields(vllm.EngineArgs)], dir(vllm.LLMEngine)]))"
    )
    python = in_a_process()["VLLM_PYTHON"]
    done = subprocess.run([python, "-P", "-c", script], capture_output=True, text=True, check=True)
    names, methods = json.loads(done.stdout.splitlines()[-1])
    assert {"enable_sleep_mode", "enable_moe_shared_loras", "enable_mixed_moe_lora_format"} <= set(names)
    assert {"sleep", "wake_up", "add_lora", "remove_lora", "abort_request", "has_unfinished_requests"} <= set(methods)


@pytest.fixture(scope="module")
def training(service: ServiceClient, model: str) -> TrainingClient:
    return make_training_client(service, model, rank=4)


@pytest.fixture(scope="module")
def own_sampler(
    training: TrainingClient, model: str, home: Path
) -> Iterator[Callable[[SamplingClient], SamplingClient]]:
    """The same snapshot, sampled from by the engine itself."""
    with sampling_with(), ServiceClient(home=home / "own") as other:
        base = other.create_sampling_client(base_model=model).result()

        def make(client: SamplingClient) -> SamplingClient:
            return SamplingClient(other._engine, other, base._model, client._weights)

        yield make


def take_steps(training: TrainingClient, steps: int, seed: int) -> None:
    for i in range(steps):
        training.forward_backward([cross_entropy_datum(20, seed=seed + i)], "cross_entropy")
        training.optim_step(STEP).result()


def snapshot(training: TrainingClient) -> SamplingClient:
    return training.save_weights_and_get_sampling_client().result()


def params(**fields: Any) -> tinker.SamplingParams:
    return tinker.SamplingParams(**{"max_tokens": 16, "stop": [], "seed": 11, **fields})


def off_by(client: SamplingClient, tokens: Sequence[int], response: Any) -> float:
    """Largest difference of the completions' logprobs from the engine's own scores under the client's weights."""
    differences = []
    for sequence in response.sequences:
        scores = client.compute_logprobs(prompt([*tokens, *sequence.tokens])).result()
        own = np.array(scores[len(tokens) :], dtype=np.float64)
        differences.append(float(np.abs(own - sequence.logprobs).max()))
    return max(differences)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 3, "top_p": 0.9},
        {"temperature": 0.0, "top_k": 3},
    ],
    ids=str,
)
class TestLogprobs:
    def test_they_are_the_trainers(self, training: TrainingClient, fields: dict) -> None:
        found = compare(training, snapshot(training), PROMPTS, 4, params(**fields))
        assert found.size == len(PROMPTS) * 4 * 16
        assert found.max() < LARGEST

    def test_a_seed_gives_the_tokens_of_the_engines_own_sampler(
        self, training: TrainingClient, own_sampler: Callable[[SamplingClient], SamplingClient], fields: dict
    ) -> None:
        client = snapshot(training)
        results = []
        for one in (client, own_sampler(client)):
            futures = [one.sample(prompt(tokens), 4, params(**fields)) for tokens in PROMPTS]
            results.append([[s.tokens for s in future.result().sequences] for future in futures])
        assert results[0] == results[1]
        if fields.get("temperature") != 0:
            assert len({tuple(tokens) for tokens in results[0][0]}) == 4


class TestRequests:
    def test_stops_lengths_and_likeliest_tokens_as_the_engines_own_sampler_has_them(
        self, training: TrainingClient, own_sampler: Callable[[SamplingClient], SamplingClient]
    ) -> None:
        client = snapshot(training)
        other = own_sampler(client)
        (free,) = other.sample(prompt(PROMPTS[1]), 1, params()).result().sequences
        text = client.get_tokenizer().decode(free.tokens[4:6])
        for fields in ({"stop": [free.tokens[3]]}, {"stop": [text]}, {"stop": None}, {"max_tokens": 1}):
            ours, theirs = (
                one.sample(prompt(PROMPTS[1]), 2, params(**fields), topk_sample_logprobs=3).result().sequences
                for one in (other, client)
            )
            for a, b in zip(ours, theirs, strict=True):
                assert (a.tokens, a.stop_reason) == (b.tokens, b.stop_reason)
                assert a.topk_logprobs_np is not None and b.topk_logprobs_np is not None
                np.testing.assert_allclose(a.topk_logprobs_np.logprobs, b.topk_logprobs_np.logprobs, atol=LARGEST)
            assert theirs[0].stop_reason == ("length" if fields in ({"max_tokens": 1}, {"stop": None}) else "stop")

    def test_prompt_scores_are_there_with_an_adapter(
        self, training: TrainingClient, own_sampler: Callable[[SamplingClient], SamplingClient]
    ) -> None:
        client = snapshot(training)
        found, expected = (
            one.sample(prompt(PROMPTS[2]), 2, params(), include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
            for one in (client, own_sampler(client))
        )
        assert found.prompt_logprobs == expected.prompt_logprobs
        assert found.topk_prompt_logprobs == expected.topk_prompt_logprobs
        assert [s.tokens for s in found.sequences] == [s.tokens for s in expected.sequences]

    def test_a_context_that_is_full(self, training: TrainingClient) -> None:
        client = snapshot(training)
        tokens = random_tokens(250, seed=1)
        (sequence,) = client.sample(prompt(tokens), 1, params(max_tokens=6)).result().sequences
        assert (len(sequence.tokens), sequence.stop_reason) == (6, "length")

    def test_what_vllm_would_change_is_refused(self, training: TrainingClient) -> None:
        with pytest.raises(RequestError, match=r"temperature 0\.005 is raised to 0\.01"):
            snapshot(training).sample(prompt([1]), 1, params(temperature=0.005))

    def test_a_diverged_adapter(self, service: ServiceClient, model: str) -> None:
        training = make_training_client(service, model, rank=4)
        with torch.no_grad():
            training._run.state.adapter.b["model.layers.0.mlp.up_proj"].fill_(float("nan"))
        with pytest.raises(RequestError, match="diverged"):
            snapshot(training).sample(prompt(PROMPTS[0]), 2, params()).result()
        for tokens in PROMPTS:  # nothing of it is left in the cache
            other = snapshot(make_training_client(service, model, rank=4))
            assert off_by(other, tokens, other.sample(prompt(tokens), 2, params()).result()) < LARGEST


class TestVersions:
    def test_a_snapshot_stays_what_it_was_beside_others_and_the_base_model(
        self, service: ServiceClient, model: str
    ) -> None:
        """Every slot is in use, in one batch with rows of the base model; prompts are longer than a block of the prefix cache."""
        training = make_training_client(service, model, rank=4, seed=3)
        base = service.create_sampling_client(base_model=model).result()
        first = snapshot(training)
        take_steps(training, 4, seed=20)
        second = snapshot(training)
        take_steps(training, 4, seed=40)
        tokens = random_tokens(200, seed=5)
        clients = [base, first, second] * 4
        futures = [client.sample(prompt(tokens), 2, params(seed=i, max_tokens=24)) for i, client in enumerate(clients)]
        for client, future in zip(clients, futures, strict=True):
            assert off_by(client, tokens, future.result()) < LARGEST
        third = snapshot(training)  # one of the others makes room
        for client in (third, first, base, second, third):
            assert off_by(client, tokens, client.sample(prompt(tokens), 2, params()).result()) < LARGEST
        responses = [client.sample(prompt(tokens), 1, params(temperature=0.0)).result() for client in (first, third)]
        assert responses[0].sequences[0].tokens != responses[1].sequences[0].tokens

    def test_a_snapshot_that_nobody_has_leaves_no_files(self, training: TrainingClient) -> None:
        client = snapshot(training)
        client.sample(prompt([1, 2]), 1, params()).result()
        sampler = vllm_sampler(training._owner, training._run.model)  # type: ignore[arg-type]
        folder = sampler._adapters._files[client._weights].folder
        assert (folder / "adapter_model.safetensors").exists()
        del client
        gc.collect()
        training.get_info()
        until(lambda: not folder.exists())


def test_kill_9_during_a_request(home: Path, model: str, caplog: pytest.LogCaptureFixture) -> None:
    with sampling_with(**in_a_process()), ServiceClient(home=home) as service:
        client = service.create_sampling_client(base_model=model).result()
        transport: Any = vllm_sampler(service, model)._transport
        future = client.sample(prompt([1, 2, 3]), 64, params(max_tokens=250))
        client.sample(prompt([1]), 1, params(max_tokens=1)).result()
        os.kill(transport.pid, signal.SIGKILL)
        with pytest.raises(
            SamplingError, match=rf"vLLM worker \(process {transport.pid}\) was ended by signal SIGKILL"
        ):
            future.result()
        assert any(
            str(transport.pid) in record.getMessage() for record in caplog.records if record.levelname == "ERROR"
        )
        response = client.sample(prompt([1, 2, 3]), 2, params()).result()
        assert off_by(client, [1, 2, 3], response) < LARGEST
        assert vllm_sampler(service, model)._transport.pid != transport.pid


def test_restart_every(home: Path, model: str) -> None:
    with sampling_with(**in_a_process(VLLM_RESTART_EVERY="1")), ServiceClient(home=home) as service:
        training = make_training_client(service, model, rank=4)
        pids = []
        for _ in range(2):
            client = snapshot(training)
            assert off_by(client, [1, 2], client.sample(prompt([1, 2]), 2, params()).result()) < LARGEST
            pids.append(vllm_sampler(service, model)._transport.pid)
            take_steps(training, 1, seed=0)
        assert len(set(pids)) == 2


def test_a_model_that_vllm_does_not_take_is_refused_with_its_words(home: Path, tmp_path: Path) -> None:
    small = write_model(Qwen3Config(**{**SHAPE, "head_dim": 16}), tmp_path / "model", seed=0)
    expected = r"cannot be sampled with vLLM: the vLLM worker .* ended with code 1"
    with (
        sampling_with(**in_a_process()),
        ServiceClient(home=home) as service,
        pytest.raises(ModelLoadError, match=expected),
    ):
        service.create_sampling_client(base_model=small).result()


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [os.environ["TINKER_TEST_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--enable-lora",
        "--max-loras",
        "3",
        "--max-lora-rank",
        "8",
    ]
    command += ["--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1"]
    own = {
        "VLLM_API_KEY": KEY,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TINKER_"))}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=inherited | own, stdout=file, stderr=file, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _answers(f"{url}/health") or process.poll() is not None)
            assert process.poll() is None, log.read_text()[-3000:]
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def remote(url: str, model: str, home: Path) -> Iterator[TrainingClient]:
    with (
        sampling_with(SAMPLER="vllm", VLLM_URL=url, VLLM_API_KEY=KEY, VLLM_MAX_LORAS="2", HOME=str(home)),
        ServiceClient() as service,
    ):
        yield make_training_client(service, model, rank=4)


class TestServer:
    """Somebody else's vLLM, with its own sampler."""

    @pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
    def test_logprobs_are_the_trainers(self, remote: TrainingClient, temperature: float) -> None:
        found = compare(remote, snapshot(remote), PROMPTS, 4, params(temperature=temperature))
        assert found.size == len(PROMPTS) * 4 * 16
        assert found.max() < LARGEST

    def test_stops_and_seeds(self, remote: TrainingClient) -> None:
        client = snapshot(remote)
        free, again = (client.sample(prompt(PROMPTS[0]), 2, params()).result().sequences for _ in range(2))
        assert [s.tokens for s in free] == [s.tokens for s in again]
        assert free[0].tokens != free[1].tokens
        stop = free[0].tokens[2]
        (stopped,) = client.sample(prompt(PROMPTS[0]), 1, params(stop=[stop])).result().sequences
        place = free[0].tokens.index(stop)
        assert (stopped.tokens, stopped.stop_reason) == (free[0].tokens[: place + 1], "stop")
        text = client.get_tokenizer().decode(free[0].tokens[4:6])
        (stopped,) = client.sample(prompt(PROMPTS[0]), 1, params(stop=[text])).result().sequences
        assert stopped.stop_reason == "stop" and stopped.tokens == free[0].tokens[: len(stopped.tokens)]

    def test_versions_and_the_base_model(self, remote: TrainingClient, model: str) -> None:
        owner: Any = remote._owner
        base = owner.create_sampling_client(base_model=model).result()
        first = snapshot(remote)
        take_steps(remote, 3, seed=60)
        clients = [base, first, snapshot(remote)] * 3
        futures = [client.sample(prompt(PROMPTS[3]), 2, params(seed=i)) for i, client in enumerate(clients)]
        for client, future in zip(clients, futures, strict=True):
            assert off_by(client, PROMPTS[3], future.result()) < LARGEST

    def test_what_it_reports_otherwise_is_refused(self, remote: TrainingClient) -> None:
        with pytest.raises(RequestError, match=r"top_k 5.*\(processed_logprobs\); use top_k=-1"):
            snapshot(remote).sample(prompt([1]), 1, params(top_k=5))

    def test_an_adapter_of_too_large_a_rank(self, remote: TrainingClient, model: str) -> None:
        owner: Any = remote._owner
        large = make_training_client(owner, model, rank=16)
        with pytest.raises(SamplingError, match=r"rank 16.*start the server with --enable-lora, --max-lora-rank"):
            snapshot(large).sample(prompt([1]), 1, params()).result()

    def test_its_adapters_are_unloaded_at_the_end(self, url: str, model: str, home: Path) -> None:
        def served() -> set[str]:
            return {
                entry["id"]
                for entry in httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {KEY}"}).json()["data"]
            }

        before = served()
        with sampling_with(SAMPLER="vllm", VLLM_URL=url, VLLM_API_KEY=KEY, HOME=str(home / "other")):
            with ServiceClient() as service:
                snapshot(make_training_client(service, model, rank=4)).sample(prompt([1]), 1, params()).result()
                own = served() - before
            assert len(own) == 2  # one of them is that of the base model
            assert not own & served()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def test_a_run_learns(tmp_path: Path) -> None:
    """The shipped recipe, sampled by vLLM: rewards rise, and the sampler agrees with the trainer."""
    variables = {f"TINKER_LOCAL_{name}": value for name, value in in_a_process(HOME=str(tmp_path / "home")).items()}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_LOCAL_")}
    done = subprocess.run(
        [sys.executable, "-m", "recipes.rl_basic", "max_steps=6", "eval_every=0", f"log_path={tmp_path / 'run'}"],
        env=inherited | variables | {"PYTHONPATH": python_path()},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["env/all/reward/total"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])
    assert max(abs(row["optim/kl_sample_train_v1"]) for row in rows) < LARGEST
