"""What is saved loads in PEFT as it is, and computes the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, PhiConfig

from tests.engine.conftest import SHAPE, write_model
from tests.engine.helpers import assert_near, make_training_client, prompt, random_tokens
from tests.engine.test_checkpoints import folder, train
from tinker_local_backend import ServiceClient
from tinker_local_backend.engine.model.attention import PackedPlan
from tinker_local_backend.engine.model.expert_matrices import peft_path

TOKENS = random_tokens(20, 0)


@pytest.fixture
def gpt2_model(tmp_path: Path) -> str:
    """Of Conv1D, with linears of one name in attention and in the MLP."""
    small = GPT2Config(
        vocab_size=1536, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, eos_token_id=1513
    )
    return write_model(small, tmp_path / "gpt2", seed=0)


@pytest.fixture
def phi_model(tmp_path: Path) -> str:
    """Of linears called dense, fc1 and fc2."""
    return write_model(PhiConfig(**SHAPE), tmp_path / "phi", seed=0)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning", "ignore:fan_in_fan_out is set to True")
@pytest.mark.parametrize(
    "flags",
    [{}, {"train_mlp": False, "train_unembed": False}, {"train_attn": False}],
    ids=["all", "attn", "mlp+unembed"],
)
@pytest.mark.parametrize(
    "base", ["tied_model", "untied_model", "gpt2_model", "phi_model", "delta_model", "mamba_model"]
)
def test_peft_computes_the_same_logprobs(
    service: ServiceClient, home: Path, request: pytest.FixtureRequest, base: str, flags: dict[str, Any]
) -> None:
    model_path = request.getfixturevalue(base)
    client = make_training_client(service, model_path, rank=4, **flags)
    train(client, range(2))
    saved = client.save_weights_for_sampler("for-peft").result().path
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        without = plain(tokens).logits[0]
        model = PeftModel.from_pretrained(plain, str(folder(home, saved)))
        named = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
        adapter = client._run.state.adapter
        routed = {matrix.name: peft_path(matrix) for matrix in adapter.experts}
        assert {name.removeprefix("base_model.model.") for name in named} == {routed.get(n, n) for n in adapter.a}
        logits = model(tokens).logits[0]
    assert (logits - without).abs().max() > 0.1

    state, base_model = client._run.state, client._run.model
    with torch.no_grad():
        ours_T, positions_T = tokens[0].to(base_model.device), torch.arange(20, device=base_model.device)
        hidden = base_model.hidden_states(ours_T, positions_T, PackedPlan.whole([20]), state.adapter)
        ours = base_model.logits(hidden, state.adapter)
    assert_near(ours.cpu(), logits, atol=1e-5, rtol=1e-5)

    snapshot = service.create_sampling_client(saved).result()
    expected = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    found = snapshot.compute_logprobs(prompt(TOKENS)).result()[1:]
    assert_near(found, expected, atol=1e-5)
