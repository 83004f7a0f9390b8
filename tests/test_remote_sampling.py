"""A local SamplingClient in other processes: the same answers and errors, and how long its snapshot lives."""

import asyncio
import gc
import multiprocessing
import os
import pickle
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tinker

from tests.child import python_path
from tests.waiting import loop_until, until
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_local_backend import EngineClosedError, RequestError, SamplingClient, ServiceClient
from tinker_local_backend.remote_sampling_client import RemoteSamplingClient
from tinker_local_backend.sampler_host import SamplerHandle

MODEL = str(EXAMPLE_DATA / "tiny_chat")
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
PARAMS = tinker.SamplingParams(max_tokens=6, seed=3, stop=[])
ATOL = 1e-5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with ServiceClient(home=tmp_path_factory.mktemp("home")) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model=MODEL).result()


@pytest.fixture(scope="module")
def remote(client: SamplingClient) -> RemoteSamplingClient:
    return elsewhere(client)


def elsewhere(client: SamplingClient) -> RemoteSamplingClient:
    """What another process would get, over the same socket."""
    return RemoteSamplingClient(SamplerHandle.decode(client.get_sampler_handle()))


EVERYTHING: dict[str, Any] = {
    "include_prompt_logprobs": True,
    "topk_prompt_logprobs": 2,
    "topk_sample_logprobs": 3,
    "prompt_alt_tokens_k": 2,
    "prompt_logprobs_last_n": 2,
}


@pytest.mark.parametrize(
    "targets",
    [
        None,
        tinker.TensorData.from_numpy(np.array([[3, 4], [-1, 6], [7, -1]])),
        tinker.TensorData(
            data=[9, 2], dtype="int64", shape=[3, 4], sparse_crow_indices=[0, 0, 1, 2], sparse_col_indices=[1, 3]
        ),
    ],
)
def test_samples_are_those_of_the_client_itself(
    client: SamplingClient, remote: RemoteSamplingClient, targets: tinker.TensorData | None
) -> None:
    expected, found = (
        cast(Any, who.sample(PROMPT, 2, PARAMS, **EVERYTHING, target_prompt_logprobs=targets).result())
        for who in (client, remote)
    )
    for left, right in zip(found.sequences, expected.sequences, strict=True):
        assert (left.tokens, left.stop_reason) == (right.tokens, right.stop_reason) and left.sequence_id
        np.testing.assert_allclose(left.logprobs or [], right.logprobs or [], atol=ATOL)
        np.testing.assert_array_equal(left.topk_logprobs_np.token_ids, right.topk_logprobs_np.token_ids)
    np.testing.assert_allclose(found.prompt_logprobs_np, expected.prompt_logprobs_np, atol=ATOL)
    np.testing.assert_array_equal(found.topk_prompt_logprobs_np.token_ids, expected.topk_prompt_logprobs_np.token_ids)
    assert found.prompt_alt_tokens.tokens.to_numpy().tolist() == expected.prompt_alt_tokens.tokens.to_numpy().tolist()
    if targets is None:
        assert found.target_prompt_logprobs is None
    else:
        arrays = [response.target_prompt_logprobs.to_numpy() for response in (found, expected)]
        np.testing.assert_allclose(*arrays, atol=ATOL)


def test_the_other_methods(client: SamplingClient, remote: RemoteSamplingClient) -> None:
    assert remote.compute_logprobs(PROMPT).result() == pytest.approx(client.compute_logprobs(PROMPT).result(), abs=ATOL)
    assert asyncio.run(remote.compute_logprobs_async(PROMPT, 1))[:3] == [None] * 3
    assert remote.get_base_model() == MODEL
    assert remote.get_tokenizer().encode("one") == client.get_tokenizer().encode("one")


def test_in_its_own_process_it_is_the_client_itself(client: SamplingClient, remote: RemoteSamplingClient) -> None:
    assert pickle.loads(pickle.dumps(client)) is client
    assert SamplingClient.from_sampler_handle(client.get_sampler_handle()) is client
    assert pickle.loads(pickle.dumps(remote)) is client, "it may be pickled on"


def test_only_this_user_reaches_it(client: SamplingClient) -> None:
    folder = Path(SamplerHandle.decode(client.get_sampler_handle()).address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("num_samples", "params", "message"),
    [
        (1, tinker.SamplingParams(max_tokens=10**6), "exceeds the context length"),
        (1, tinker.SamplingParams(max_tokens=1, temperature=-1), "temperature must be"),
        (0, PARAMS, "num_samples must be at least 1"),
        (object(), PARAMS, "not JSON serializable"),
    ],
)
def test_mistakes_are_told_as_in_process(
    remote: RemoteSamplingClient, num_samples: Any, params: tinker.SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        remote.sample(PROMPT, num_samples, params).result()


def test_an_abandoned_request_is_stopped(service: ServiceClient, remote: RemoteSamplingClient) -> None:
    long = tinker.SamplingParams(max_tokens=1000, stop=[], temperature=1000)

    def running() -> int:
        return service._engine.sampler_stats()[MODEL].running

    async def give_up() -> None:
        asking = asyncio.ensure_future(remote.sample(PROMPT, 64, long).result_async())
        await loop_until(running)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(give_up())
    until(lambda: not running())


def test_a_snapshot_lives_while_its_maker_or_who_has_sampled_keeps_it(service: ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=2, seed=1).result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    user, late = elsewhere(snapshot), elsewhere(snapshot)
    before = user.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens
    there = weakref.ref(snapshot)
    del snapshot
    gc.collect()
    assert user.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens == before
    del user
    while there() is not None:
        gc.collect()  # it is dropped, or the test's own limit ends
    with pytest.raises(RequestError, match="keep the SamplingClient there"):
        late.sample(PROMPT, 1, PARAMS).result()


def test_a_closed_engine_is_told(tmp_path: Path) -> None:
    with ServiceClient(home=tmp_path) as service:
        client = service.create_sampling_client(base_model=MODEL).result()
        remote = elsewhere(client)
    with pytest.raises(EngineClosedError, match="was closed"):
        remote.sample(PROMPT, 1, PARAMS).result()
    with pytest.raises(EngineClosedError, match="was closed"):
        pickle.dumps(client)


def test_handles_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is not a sampler handle"):
        SamplingClient.from_sampler_handle("x")
    gone = RemoteSamplingClient(SamplerHandle(str(tmp_path / "socket"), 12345, "x", MODEL))
    with pytest.raises(EngineClosedError, match=r"process 12345.* has ended"):
        gone.sample(PROMPT, 1, PARAMS)


def sample_there(client: SamplingClient, seed: int) -> tuple[int, list[int], list[float]]:
    params = tinker.SamplingParams(max_tokens=6, seed=seed, stop=[])
    sequence = client.sample(PROMPT, 1, params).result().sequences[0]
    return os.getpid(), sequence.tokens, list(sequence.logprobs or [])


@pytest.mark.slow
def test_several_processes_sample_from_one_engine(client: SamplingClient) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        there = list(processes.map(sample_there, [client] * 20, range(20)))
    assert os.getpid() not in {pid for pid, _, _ in there}
    for seed, (_, tokens, logprobs) in enumerate(there):
        _, expected, expected_logprobs = sample_there(client, seed)
        assert tokens == expected
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=ATOL)


OWNER = """
import sys
from tinker_local_backend import ServiceClient
client = ServiceClient(home=sys.argv[2]).create_sampling_client(base_model=sys.argv[1]).result()
print(client.get_sampler_handle(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_the_end_of_the_process_with_the_engine_is_told(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, MODEL, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    assert owner.stdout is not None
    remote: Any = SamplingClient.from_sampler_handle(owner.stdout.readline().strip())
    assert len(remote.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens) == 6
    running = remote.sample(PROMPT, 64, tinker.SamplingParams(max_tokens=1000, stop=[], temperature=1000))
    owner.kill()
    with pytest.raises(EngineClosedError, match=f"process {owner.pid}.* has ended"):
        running.result()
    owner.communicate()
    with pytest.raises(EngineClosedError, match="has ended"):
        remote.sample(PROMPT, 1, PARAMS)
