"""Random models: the engine samples and trains them, their renderer is known, and mistakes are named."""

import os
from pathlib import Path

import pytest
import tinker
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.child import run_forked
from tinker_cookbook.data.shipped import is_tiny
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_local_backend import ServiceClient
from tools.random_model import FIELDS, CLIConfig, layer_types, main


def make(architecture: str, folder: Path, seed: int = 0, fields: str = "{}") -> str:
    main(CLIConfig(architecture=architecture, folder=str(folder), hidden_size=32, layers=3, seed=seed, fields=fields))
    return str(folder)


@pytest.mark.parametrize("architecture", [*FIELDS, "llama"])
def test_it_samples_and_trains(architecture: str, tmp_path: Path) -> None:
    folder = make(architecture, tmp_path / "model")
    assert is_tiny(folder) and model_info.get_recommended_renderer_name(folder) == "qwen3_instruct"
    with ServiceClient(home=tmp_path / "home") as service:
        has_mlps = architecture not in ("qwen3_moe",)  # all of its MLPs are routed experts
        client = service.create_lora_training_client(folder, rank=4, seed=0, train_mlp=has_mlps).result()
        tokens = list(range(20, 40))
        inputs = {
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[19]),
            "weights": tinker.TensorData(data=[1.0] * 19, dtype="float32", shape=[19]),
        }
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        losses = []
        for _ in range(3):
            losses.append(client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
        assert losses[2] < losses[1] < losses[0]
        sampler = client.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=5, seed=0, stop=[])
        (sequence,) = sampler.sample(tinker.ModelInput.from_ints(tokens), 1, params).result().sequences
        assert len(sequence.tokens) == 5


def weights(folder: str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, again, other = (
        weights(make("lfm2", tmp_path / name, seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_fields_take_precedence(tmp_path: Path) -> None:
    folder = make("gemma2", tmp_path / "model", fields='{"sliding_window": 7, "num_hidden_layers": 2}')
    config = AutoConfig.from_pretrained(folder)
    assert (config.sliding_window, config.num_hidden_layers, config.hidden_size) == (7, 2, 32)


def test_every_fourth_layer_and_the_last_attend() -> None:
    assert layer_types(6, "conv") == ["conv"] * 3 + ["full_attention", "conv", "full_attention"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architecture": "lama"}, "architecture='lama': transformers has no such model type"),
        ({"architecture": "rwkv"}, "architecture='rwkv': model .* keeps its states in tensors of another kind"),
        ({"fields": "4"}, "fields='4': must be a JSON object"),
        ({"fields": "{"}, "fields='{': is not JSON"),
    ],
)
def test_mistakes(keys: dict[str, str], message: str, tmp_path: Path) -> None:
    given = {"architecture": "lfm2", "folder": str(tmp_path / "model"), **keys}
    with pytest.raises(ConfigurationError, match=message):
        main(CLIConfig(**given))  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("keys", [{"hidden_size": 48}, {"layers": 1}])
def test_sizes_are_checked(keys: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        CLIConfig(architecture="lfm2", folder="x", **keys)  # pyright: ignore[reportArgumentType]


def test_the_command_explains_itself() -> None:
    done = run_forked(["-m", "tools.random_model", "--help"], env={**os.environ})
    assert "architecture=" in done.stdout and "nemotron_h" in done.stdout
