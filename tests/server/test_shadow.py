"""Over the wire the shadow of gradient_intuition leaves the main client as it is, bit for bit."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.fakes import ScriptedCompleter
from tests.server.serving import TINY_CHAT, Serving
from tinker_cookbook.env.shipped.model_aware.shadow import Shadow, answer_datum
from tinker_cookbook.rl.run_clients import RunClients
from tinker_cookbook.tokenizer_utils import get_tokenizer

STEP = tinker.AdamParams(learning_rate=1e-3)
ANSWERS = ("4", "Six, I think.", "Blue")


def encode(text: str) -> list[int]:
    return list(get_tokenizer(TINY_CHAT).encode(text, add_special_tokens=False))


def datum(prompt: str, answer: str) -> tinker.Datum:
    return answer_datum(encode(prompt), encode(answer))


def train(client: tinker.TrainingClient, answer: str) -> None:
    client.forward_backward([datum("What is 2 + 2?", answer)], "cross_entropy").result()
    client.optim_step(STEP).result()


def saved_files(home: Path, path: str) -> dict[str, bytes]:
    """Weights, optimizer state and pending gradients of a saved state, as the server wrote them."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    folder = home / "runs" / run_id / kind / name
    found = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert found.keys() >= {"adapter_model.safetensors", "optimizer.safetensors"}, list(folder.iterdir())
    return found


def story(sdk: tinker.ServiceClient, home: Path, shadow_steps: int) -> tuple[list[dict[str, bytes]], Any, list[float]]:
    """What becomes of a client of seed 7: its states before and after a step, samples, and what its shadow found."""
    main = sdk.create_lora_training_client(TINY_CHAT, rank=4, seed=7).result()
    train(main, "Four.")
    snapshot = main.save_weights_and_get_sampling_client().result()
    clients = RunClients(ScriptedCompleter({}), snapshot, sdk, main, TINY_CHAT)  # type: ignore[arg-type]
    shadow, found = Shadow(clients), list[float]()
    main.forward_backward([datum("What is 1 + 1?", "Two.")], "cross_entropy").result()  # gradients are pending
    for _ in range(shadow_steps):
        steps, probe = [datum("What is 2 + 2?", text) for text in ANSWERS], datum("Probe: 2 + 2?\nAnswer:", " 4")
        found = asyncio.run(shadow.changes(snapshot, steps, probe, 1e-3))
    states = [main.save_state("with-pending-gradients").result().path]
    main.optim_step(STEP).result()
    states.append(main.save_state("after-the-step").result().path)
    sampler = main.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=12, seed=3)
    sequences = sampler.sample(tinker.ModelInput.from_ints(encode("What is 3 + 4?")), 4, params).result().sequences
    samples = [(list(sequence.tokens), list(sequence.logprobs or [])) for sequence in sequences]
    return [saved_files(home, path) for path in states], samples, found


@pytest.mark.server
def test_weights_moments_and_samples_are_those_of_a_client_without_a_shadow(
    server: Serving, sdk: tinker.ServiceClient
) -> None:
    states, samples, nothing = story(sdk, server.tenant_home("tester"), 0)
    shadowed_states, shadowed_samples, changes = story(sdk, server.tenant_home("tester"), 2)
    assert nothing == [] and len(set(changes)) == len(ANSWERS) and all(changes)
    assert states == shadowed_states and states[0] != states[1]
    assert samples == shadowed_samples
