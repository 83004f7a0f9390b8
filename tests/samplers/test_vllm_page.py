"""What docs/vllm.md says, against the arguments that vLLM is started with and the arithmetic of a GPU's memory."""

import re
import shlex
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.child import ROOT
from tinker_local_backend import environment
from tinker_local_backend.engine.model.memory_plan import (
    CONTEXT_BYTES,
    SCORING_TOKENS,
    USABLE,
    of_card,
    vllm_cache_tokens,
)
from tinker_local_backend.plan import Config, main, size_of
from tinker_local_backend.samplers.transport import Accepts
from tinker_local_backend.samplers.vllm import FIRST_RANK
from tinker_local_backend.samplers.vllm_settings import DEFAULT_SHARE, DEFAULT_SLOTS, VllmSettings
from tinker_local_backend.samplers.worker_process import engine_arguments

PAGE = (ROOT / "docs" / "vllm.md").read_text()
GIB = 1 << 30
CARDS = (24, 48, 80, 141)


@pytest.fixture(autouse=True)
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_SAMPLER", "vllm")
    monkeypatch.setenv("TINKER_LOCAL_VLLM_PYTHON", sys.executable)


def model(device: str) -> Any:
    return SimpleNamespace(
        name="m", dtype=torch.bfloat16, context_length=40_960, device=torch.device(device), experts=[]
    )


def arguments(device: str = "cuda") -> dict[str, Any]:
    of = model(device)
    return engine_arguments(of, VllmSettings.from_environment(of.device), Accepts(FIRST_RANK))


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a line that begins so, without its header."""
    lines = PAGE.partition(heading)[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    table = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_the_table_names_every_variable_and_its_default() -> None:
    said = {name.strip("`"): text for name, text in rows("## Variables")}
    assert {f"TINKER_LOCAL_VLLM_{name}" for name in said} == {v for v in environment.VARIABLES if "_VLLM_" in v}
    defaults = VllmSettings.from_environment(torch.device("cuda"))
    assert f"({defaults.slots})" in said["MAX_LORAS"] and defaults.slots == DEFAULT_SLOTS
    assert f"({defaults.tensor_parallel_size})" in said["TENSOR_PARALLEL_SIZE"]
    assert f"({DEFAULT_SHARE['cuda']})" in said["GPU_MEMORY_UTILIZATION"]
    assert f"({DEFAULT_SHARE['cpu']})" in said["GPU_MEMORY_UTILIZATION"]
    assert f"({int(defaults.sleep)})" in said["SLEEP"] and f"({defaults.restart_every}:" in said["RESTART_EVERY"]
    assert defaults.max_model_len is None and not defaults.enforce_eager


@pytest.mark.parametrize(
    ("variable", "value", "changed"),
    [
        ("MAX_LORAS", "3", {"max_loras": 4}),
        ("GPU_MEMORY_UTILIZATION", "0.5", {"gpu_memory_utilization": 0.5}),
        ("MAX_MODEL_LEN", "4096", {"max_model_len": 4096}),
        ("TENSOR_PARALLEL_SIZE", "2", {"tensor_parallel_size": 2}),
        ("ENFORCE_EAGER", "1", {"enforce_eager": True}),
        ("SLEEP", "1", {"enable_sleep_mode": True}),
    ],
)
def test_each_variable_changes_its_argument_and_no_other(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, changed: dict[str, Any]
) -> None:
    before = arguments()
    assert variable in {name.strip("`") for name, _ in rows("## Variables")}
    monkeypatch.setenv(f"TINKER_LOCAL_VLLM_{variable}", value)
    assert arguments() == {**before, **changed} != before


def test_the_server_of_the_page_is_started_like_the_process() -> None:
    command = PAGE.partition("## Another server")[2].partition("```sh\n")[2].partition("```")[0]
    words = shlex.split(command.replace("\\\n", " ").splitlines()[0])
    given = dict(pairwise(words))
    ours = arguments("cpu")
    assert int(given["--max-loras"]) == ours["max_loras"] and int(given["--max-lora-rank"]) == ours["max_lora_rank"]
    assert "--enable-lora" in given and given["--max-logprobs"] == "-1"
    assert given["--logprobs-mode"] == "processed_logprobs" and given["--dtype"] == "float32"


def numbers(cells: list[str]) -> list[int | None]:
    return [int(found[0].replace(",", "")) if (found := re.match(r"[\d,]+", cell)) else None for cell in cells]


@pytest.mark.parametrize(
    ("name", "row", "sleeps"), [("qwen3-4b", 0, False), ("qwen3-8b", 2, False), ("qwen3-8b", 4, True)]
)
def test_the_table_of_memory_is_the_plan_s(name: str, row: int, sleeps: bool) -> None:
    table, size = rows("## Memory"), size_of(name, rank=32)
    plans = [of_card(gib, size, DEFAULT_SHARE["cuda"], sleeps) for gib in CARDS]
    caches = [vllm_cache_tokens(gib, size, DEFAULT_SHARE["cuda"]) for gib in CARDS]
    fits = [plan.missing == 0 and tokens > 0 for plan, tokens in zip(plans, caches, strict=True)]
    assert numbers(table[row][2:]) == [p.pass_tokens if fit else None for p, fit in zip(plans, fits, strict=True)]
    assert ["recomputed" in cell for cell in table[row][2:]] == [
        p.recomputes and fit for p, fit in zip(plans, fits, strict=True)
    ]
    if not sleeps:
        assert numbers(table[row + 1][2:]) == [tokens if tokens > 0 else None for tokens in caches]
    assert f"{size.weights / GIB:.1f}" in PAGE


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b"])
def test_a_documented_model_starts_on_80_gb(name: str) -> None:
    """vLLM refuses to start where less than its share is free; the engine's weights and cache are there before it."""
    size, card = size_of(name, rank=32), int(80 * USABLE * GIB)
    free = card - CONTEXT_BYTES - size.weights
    share = DEFAULT_SHARE["cuda"] * card
    assert free - SCORING_TOKENS * size.kv_token > share
    plan = of_card(80, size, DEFAULT_SHARE["cuda"])
    assert plan.kv_tokens == SCORING_TOKENS and plan.graphs == plan.slots == 0 and plan.missing == 0
    assert vllm_cache_tokens(80, size, DEFAULT_SHARE["cuda"]) > 8 * 4096  # eight sequences with room to answer


def test_shares_beside_vllm_add_up() -> None:
    size, card = size_of("qwen3-4b", rank=32), int(48 * USABLE * GIB)
    plan = of_card(48, size, 0.3)
    taken = plan.adapter + plan.snapshots + plan.logits + plan.cache + plan.activations / 0.85 + size.weights
    assert abs(taken + int(0.3 * card) + CONTEXT_BYTES - card) < 10
    asleep = of_card(48, size, 0.3, vllm_sleeps=True)
    given = (asleep.activations - plan.activations) / 0.85
    assert abs(given - (int(0.3 * card) - CONTEXT_BYTES)) < 10


def test_the_command_says_what_vllm_has(capsys: pytest.CaptureFixture[str]) -> None:
    main(Config(model="qwen3-8b", gpu_gib=(24.0, 80.0), vllm_share=0.4))
    said = capsys.readouterr().out.partition("Sampling with vLLM")[2]
    assert "vLLM does not start in 9.5 GiB: 7.3 GiB are missing" in said and "107,162" in said
    with pytest.raises(ValueError, match="vllm_sleeps=True without vllm_share"):
        Config(model="qwen3-8b", vllm_sleeps=True)
    with pytest.raises(ValueError, match=r"a share of a card below 1, got 1\.5"):
        Config(model="qwen3-8b", vllm_share=1.5)
