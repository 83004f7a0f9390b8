"""Programs that keep an older SDK."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serving import KEY, TINY_CHAT, Serving
from tests.waiting import HANG_SECONDS

pytestmark = [pytest.mark.server, pytest.mark.network]

CORE = """
import sys
import numpy as np, tinker
url, key, model = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key=key)
client = service.create_lora_training_client(model, rank=4, seed=1)
tokens = list(range(40, 52))
inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(11, dtype=np.float32)}
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()},
)
first = client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
assert client.forward([datum], "cross_entropy").result().metrics["loss:sum"] < first
path = client.save_state("saved").result().path
sampler = client.save_weights_and_get_sampling_client()
prompt = tinker.ModelInput.from_ints(tokens)
reply = sampler.sample(
    prompt, 2, tinker.SamplingParams(max_tokens=4, seed=1), include_prompt_logprobs=True, topk_prompt_logprobs=2
).result()
assert len(reply.sequences) == 2 and len(reply.prompt_logprobs) == len(reply.topk_prompt_logprobs) == 12
assert sampler.compute_logprobs(prompt).result()[0] is None
service.create_training_client_from_state_with_optimizer(path).forward([datum], "cross_entropy").result()
print("version", tinker.__version__)
"""


@pytest.mark.parametrize("version", ["0.25.0", "0.24.1"])
def test_the_core_of_an_older_sdk(tmp_path: Path, version: str) -> None:
    pytest.importorskip("fastapi", reason="the extra `server` is not installed")
    folder = tmp_path / "sdk"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"tinker=={version}"]
    subprocess.run(install, check=True)
    with Serving(tmp_path / "home") as serving:
        command = [sys.executable, "-W", "ignore", "-c", CORE, serving.url, KEY, TINY_CHAT]
        env = {**os.environ, "PYTHONPATH": str(folder), "TINKER_TELEMETRY": "0"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=tmp_path)
    assert done.stdout.split() == ["version", version], done.stderr
