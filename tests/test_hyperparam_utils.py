"""What must hold of learning rates and parameter counts: the formulas' golden values, and what PEFT really makes."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.architecture_configs import make_config
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import hyperparameters as hyper
from tinker_local_backend.engine.models import load_model

TINY = str(EXAMPLE_DATA / "tiny_chat")


def test_golden_learning_rates() -> None:
    assert hyper.get_lr("meta-llama/Llama-3.1-8B-Instruct") == pytest.approx(2.857e-4, rel=1e-3)
    assert hyper.get_lr("meta-llama/Llama-3.2-1B") == pytest.approx(5e-4 * (2000 / 2048) ** 0.781)
    assert hyper.get_lr("Qwen/Qwen3-8B") == pytest.approx(4.7298e-4, rel=1e-4)
    assert hyper.get_lr("Qwen/Qwen3-30B-A3B-Instruct-2507", is_lora=False) == pytest.approx(
        5e-5 * (2000 / 2048) ** 0.0775
    )
    assert hyper.get_lr(TINY) == pytest.approx(5e-4 * (2000 / 192) ** 0.0775)
    assert hyper.get_lr("Qwen/Qwen3-8B") / hyper.get_lr("Qwen/Qwen3-8B", is_lora=False) == pytest.approx(10)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Meta-Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen3.5-9B", 8_953_803_264),
        ("deepseek-ai/DeepSeek-V3.1-Base", 671_026_404_352),
        ("moonshotai/Kimi-K2.6", 1_026_408_209_408),
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31_577_937_344),
    ],
)
def test_released_models_have_as_many_parameters_as_they_are_said_to_have(name: str, parameters: int) -> None:
    assert hyper.get_full_finetune_param_count(name) == parameters


def test_multipliers() -> None:
    full = hyper.get_full_finetune_lr_multiplier("Qwen/Qwen3-8B")
    assert full == 1 / math.sqrt(8_190_735_360)
    assert hyper.get_lora_lr_multiplier("Qwen/Qwen3-8B") == pytest.approx(10 * full)


@pytest.mark.parametrize("flags", [(True, True, True), (True, False, False), (False, True, True), (False, False, True)])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
def test_adapters_are_as_large_as_those_of_peft(flags: tuple[bool, bool, bool]) -> None:
    mlp, attention, unembed = flags
    targets = [
        *(["gate_proj", "up_proj", "down_proj"] if mlp else []),
        *(["q_proj", "k_proj", "v_proj", "o_proj"] if attention else []),
        *(["lm_head"] if unembed else []),
    ]
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=6, target_modules=targets))
    trained = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora_" in name)
    assert hyper.get_lora_param_count(TINY, 6, *flags) == trained


def test_golden_adapter_of_a_released_model() -> None:
    hidden, mlp, layers, vocabulary = 4096, 12288, 36, 151936
    attention = (hidden + 4096) + 2 * (hidden + 1024) + (4096 + hidden)
    per_layer = attention + 3 * (hidden + mlp)
    assert hyper.get_lora_param_count("Qwen/Qwen3-8B", 32) == 32 * (layers * per_layer + hidden + vocabulary)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        # layers * (heads * key dimension * value dimension * 4 bytes + channels of the convolution * its width * 2 bytes)
        ("Qwen/Qwen3.5-4B", 24 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2)),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 23 * (64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 4 * 2)),
        ("Qwen/Qwen3-8B", 0),
    ],
)
def test_golden_states_of_a_sequence(name: str, size: int) -> None:
    assert hyper.get_state_bytes(name) == size


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h", "lfm2", "kimi_linear", "falcon_h1", "mamba2"])
def test_states_are_as_large_as_those_that_the_engine_keeps(model_type: str, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    module = AutoModelForCausalLM.from_config(make_config(model_type), dtype=torch.bfloat16)
    module.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.device("cpu"), torch.bfloat16)
    assert hyper.get_state_bytes(str(tmp_path)) == model.new_states().bytes_per_sequence > 0


def test_what_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match=r"model_name='/no/such/folder'.*shapes are unknown"):
        hyper.get_lr("/no/such/folder")
    with pytest.raises(ConfigurationError, match="lora_rank=0"):
        hyper.get_lora_param_count(TINY, 0)
    with pytest.raises(ConfigurationError, match="nothing would train"):
        hyper.get_lora_param_count(TINY, 8, False, False, False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_hidden_layers": 1}))
    with pytest.raises(NotImplementedError, match="experts"):
        hyper.get_lora_param_count(str(tmp_path))
    assert hyper.get_lora_param_count(str(tmp_path), 2, train_mlp=False, train_unembed=False) == 2 * (
        2 * (4096 + 4096) + 2 * (4096 + 1024)
    )
    shutil.copy(Path(TINY) / "config.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mistral", "architectures": []}))
    with pytest.raises(NotImplementedError, match=r"no learning rate rule .*sweep over learning_rate"):
        hyper.get_lr(str(tmp_path))
