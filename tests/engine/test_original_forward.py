"""Models that run through transformers' own forward: what their batches share is right, and each sequence has its adapter."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tinker

from benchmarks.architectures import _plain_logprobs, _training_client, write_model
from benchmarks.gpu.models import fill_adapter
from benchmarks.workload import random_tokens
from tinker_local_backend import SamplingClient, ServiceClient

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*tie_word_embeddings.*:UserWarning", "ignore:.*checkpointing.*:FutureWarning"
)

PROMPT = random_tokens(1400, 70, 0)


def sample(sampler: SamplingClient, prompts: Sequence[Sequence[int]], tokens: int = 9) -> list[tinker.SampleResponse]:
    """All at once."""
    params = tinker.SamplingParams(max_tokens=tokens, seed=0, stop=[])
    futures = [
        sampler.sample(tinker.ModelInput.from_ints(list(prompt)), 2, params, include_prompt_logprobs=True)
        for prompt in prompts
    ]
    return [future.result() for future in futures]


@pytest.mark.parametrize("model_type", ["gptj", "bloom", "deepseek_v32", "llama4_text", "minimax"])
def test_sequences_with_a_shared_beginning(model_type: str, tmp_path: Path) -> None:
    """Prompts that go on from cached pages and states, and decode at several lengths in one step."""
    plain = write_model(model_type, tmp_path / "model")
    with ServiceClient(home=tmp_path / "home") as service:
        sampler = service.create_sampling_client(base_model=str(tmp_path / "model")).result()
        sample(sampler, [PROMPT[:40]])
        prompts = [PROMPT[:40], PROMPT, [*PROMPT[:64], *PROMPT[:3]], PROMPT[30:40]]
        for prompt, response in zip(prompts, sample(sampler, prompts), strict=True):
            for sequence in response.sequences:
                expected = _plain_logprobs(plain, [*prompt, *sequence.tokens])[len(prompt) - 1 :]
                assert sequence.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("model_type", ["falcon", "longcat_flash"])
def test_rows_of_one_step_have_their_own_adapters(model_type: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path / "model")
    with ServiceClient(home=tmp_path / "home") as service:
        client = _training_client(service, str(tmp_path / "model"), "shared_outer")
        base = service.create_sampling_client(base_model=str(tmp_path / "model")).result()
        fill_adapter(client._run.state.adapter, seed=3, size=0.05)
        trained: SamplingClient = client.save_weights_and_get_sampling_client()  # pyright: ignore[reportAssignmentType]
        prompts = [PROMPT[:20], PROMPT[:33]]
        alone = [sample(sampler, [prompt])[0] for prompt in prompts for sampler in (base, trained)]
        params = tinker.SamplingParams(max_tokens=9, seed=0, stop=[])
        futures = [
            sampler.sample(tinker.ModelInput.from_ints(list(prompt)), 2, params)
            for prompt in prompts
            for sampler in (base, trained)
        ]
        together = [future.result() for future in futures]
    assert alone[0].sequences[0].logprobs != pytest.approx(alone[1].sequences[0].logprobs, abs=1e-2)
    for one, other in zip(alone, together, strict=True):
        for sequence, same in zip(one.sequences, other.sequences, strict=True):
            assert sequence.tokens == same.tokens
            assert sequence.logprobs == pytest.approx(same.logprobs, abs=1e-4)
