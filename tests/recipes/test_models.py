"""The table of models: what is in it is true of the rest of the library, and nothing is downloaded for it."""

import asyncio
import re
from pathlib import Path

import pytest

from benchmarks.architecture_configs import ARCHITECTURES, make_config
from benchmarks.architectures import IN_PART, PAGE, REFUSED, SAMPLES, TRAINS
from recipes import sl_basic
from recipes.common import for_model
from recipes.models import CLIConfig, facts, known_models, local_engine, main
from tinker_cookbook import backends
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models.adapter_sizes import STATED
from tinker_cookbook.renderers import known_renderer_names


def show(capsys: pytest.CaptureFixture[str], **keys: object) -> str:
    asyncio.run(main(CLIConfig(**keys)))  # pyright: ignore[reportArgumentType]
    return capsys.readouterr().out


def test_every_hosted_model_is_known_with_a_renderer_that_exists() -> None:
    assert set(known_models()) >= model_info.HOSTED_MODELS
    assert len(model_info.HOSTED_MODELS) == 34
    for name in model_info.HOSTED_MODELS:
        found = facts(name, 32)
        assert found["renderer"].rstrip("*") in known_renderer_names()
        assert (found["parameters"] == "?") == (name in STATED)  # their configs are not known here
        assert found["hosted"] == "yes"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "Qwen/Qwen3-8B",
            {
                "renderer": "qwen3",
                "parameters": "8.19B",
                "context": "40,960",
                "state": "-",
                "local engine": "trains and samples",
                "hosted": "yes",
            },
        ),
        (
            "openai/gpt-oss-20b",
            {"renderer": "gpt_oss_no_sysprompt", "parameters": "20.9B", "learning rate": "?", "hosted": "yes"},
        ),
        (
            "google/gemma-2-9b-it",
            {
                "renderer": "gemma*",
                "parameters": "9.24B",
                "context": "8,192",
                "learning rate": "?",
                "local engine": "trains and samples",
                "hosted": "-",
            },
        ),
        (
            "Qwen/Qwen3.8-27B",
            {"parameters": "26.9B", "context": "262,144", "state": "148 MiB", "local engine": "trains and samples"},
        ),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            {"state": "47.1 MiB", "local engine": "trains and samples"},
        ),
        (
            "zai-org/GLM-5.3",
            {"parameters": "?", "state": "?", "local engine": "?", "hosted": "yes"},
        ),
    ],
)
def test_facts(name: str, expected: dict[str, str]) -> None:
    found = facts(name, 32)
    assert {key: found[key] for key in expected} == expected


def test_what_the_local_engine_refuses_comes_with_the_reason() -> None:
    assert facts("openai/gpt-oss-20b", 32)["local engine"] == "trains and samples"
    assert facts("Qwen/Qwen3-30B-A3B", 32)["local engine"] == "trains and samples"
    assert facts("Qwen/Qwen3.5-4B", 32)["local engine"] == "trains and samples"


@pytest.mark.parametrize(
    "name",
    ["deepseek-ai/DeepSeek-V3.1", "moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6"],
)
def test_a_model_that_is_released_with_quantized_experts_trains(name: str) -> None:
    """They are dequantised when they are loaded."""
    assert facts(name, 32)["local engine"] == "trains and samples"


def test_what_is_said_of_a_model_is_what_the_page_says_of_its_architecture() -> None:
    """The page's table is what the engine did with a model of each; an answer is made from its config alone."""
    begin = {TRAINS: "trains and", IN_PART: "trains (not the experts)", SAMPLES: "samples only", REFUSED: "no: "}
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([\w ]+) \|", PAGE.read_text(), re.MULTILINE))
    assert rows.keys() == ARCHITECTURES.keys()
    said = {kind: local_engine(kind, make_config(kind).get_text_config()) for kind in rows}
    assert {kind: said[kind] for kind in rows if not said[kind].startswith(begin[rows[kind]])} == {}


def test_no_refusal_quotes_what_is_inside() -> None:
    assert (
        re.findall(r"no attention plan|tinker_local_|invalid for input|object has no|Error\b", PAGE.read_text()) == []
    )


def test_the_table_and_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    table = show(capsys, like="GPT-oss")
    assert (
        "131,072" in table and "openai/gpt-oss-20b" in table and "openai/gpt-oss-120b" in table and "Qwen" not in table
    )
    one = show(capsys, model_name="tiny_chat", lora_rank=8)
    assert "qwen3_instruct" in one and "2.26M" in one and "150k" in one and "1,024" in one


def test_a_refused_folder_without_a_known_renderer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What it is asked for is told, and not which renderers there are."""
    make_config("deepseek_v4").save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    said = show(capsys, model_name=str(tmp_path))
    assert "local engine   no: has layers of type heavily_compressed_attention\n" in said
    assert "renderers      none is known to fit\n" in said and "kimi" not in said


def test_a_refused_folder_is_told_before_a_run_has_its_own(tmp_path: Path) -> None:
    make_config("deepseek_v4").save_pretrained(tmp_path / "model")
    with pytest.raises(
        ConfigurationError, match=r"model_name: model .*\(deepseek_v4\) has layers of type heavily_compressed_attention"
    ):
        for_model(
            sl_basic.CLIConfig(
                model_name=str(tmp_path / "model"), renderer_name="role_colon", log_path=str(tmp_path / "run")
            )
        )
    assert not (tmp_path / "run").exists()
    make_config("qwen3").save_pretrained(tmp_path / "other")
    assert backends.check_backend("local", str(tmp_path / "other")) == "local"


def test_nothing_like_it() -> None:
    with pytest.raises(ConfigurationError, match="like='zzz': no known model"):
        asyncio.run(main(CLIConfig(like="zzz")))
