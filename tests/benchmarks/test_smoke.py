"""Each benchmark once on the tiny shape, alone, and with the peers that need nothing more than the library does."""

from pathlib import Path

import pytest

from benchmarks import constrain, memory, memory_child, precision, rates, rl_step, rollout_rate, sampling, training
from benchmarks.config import environment
from benchmarks.errors import BenchmarkError
from benchmarks.memory_child import Job, Peak
from benchmarks.models import SHAPES, ensure_model
from benchmarks.ours import LocalEngine, importance_sampling, policy_data, sample_workload
from benchmarks.report import NOT_MEASURED, Report
from benchmarks.workload import make_workload


def statuses(report: Report, title_start: str) -> dict[str, str]:
    results = next(rows for title, rows in report.measurements.items() if title.startswith(title_start))
    assert isinstance(results, list)
    return {row["name"]: row["status"] for row in results}


@pytest.mark.slow
def test_sampling(quick_comparison: dict) -> None:
    report = sampling.run(sampling.Config(**{**quick_comparison, "peers": ["hf", "vllm"]}))
    found = statuses(report, "Sampling")
    assert {name for name, status in found.items() if status == "measured"} == {
        "ours, LoRA",
        "ours, base",
        "HF generate, LoRA",
        "HF generate, base",
    }
    assert found["vllm"].startswith("not installed")
    kl, largest = map(float, report.tables[1].rows[0])
    assert abs(kl) < 1e-4 and largest < 1e-3
    assert report.tables[2].rows == [[rows, *[NOT_MEASURED] * 4] for rows in ("64", "256")]


def test_precision(quick_comparison: dict) -> None:
    keys = {key: value for key, value in quick_comparison.items() if key != "peers"}
    speeds, errors = precision.run(precision.Config(**keys)).tables
    assert [row[0] for row in speeds.rows] == [
        f"{dtype}, {kind}" for dtype in ("float32", "bfloat16") for kind in ("base", "LoRA")
    ]
    for _, mean, _, largest, kl in errors.rows:
        assert 1e-5 < float(mean) < float(largest) < 0.3 and abs(float(kl)) <= float(mean)


def test_constrain(quick: dict) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `constrain` (llguidance)")
    steps, parts = constrain.run(constrain.Config(**quick, rows=9, steps=3, warm_up=1, vocabulary=2000)).tables
    assert [row[0] for row in steps.rows] == ["none", *constrain.CONSTRAINTS] and steps.rows[0][3].startswith("1 ")
    assert [row[:2] for row in parts.rows] == [
        [name, part]
        for name in constrain.CONSTRAINTS
        for part in ("mask", "choice under it", "choice without", "consume")
    ]


@pytest.mark.slow
def test_rollout_rate(quick_comparison: dict) -> None:
    keys = {key: value for key, value in quick_comparison.items() if key != "max_new_tokens"}
    report = rollout_rate.run(rollout_rate.Config(**keys, counts=(8, 520), replies=(2, 3)))
    (table,) = report.tables
    assert [row[:3] for row in table.rows] == [
        [count, reply, prompts]
        for count, groups in (("8", "1"), ("520", "65"))
        for reply in ("2", "3")
        for prompts in (groups, "one")
    ]
    assert [row[6] for row in table.rows] == [""] * 4 + ["100%"] * 4
    tokens = [row["repetitions"][0]["tokens"] for row in report.measurements["Rollouts per second"]]  # pyright: ignore
    assert tokens == [16, 16, 24, 24, 1040, 1040, 1560, 1560]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"counts": (8, 12)}, "counts=12 is not a multiple of the group size 8"),
        ({"counts": (0,)}, "counts=0 is not a multiple"),
        ({"peers": ["hf"]}, "peers: rollout_rate has none"),
    ],
)
def test_rollout_rate_names_what_it_cannot_do(fields: dict, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        rollout_rate.run(rollout_rate.Config(**fields))


def test_decode_traffic_of_a_device(quick_comparison: dict, models_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on CUDA only, with the engine on the CPU and a copy of 1 GB/s."""
    monkeypatch.setattr(rates, "copy_bandwidth", lambda device: 1e9)
    config = sampling.Config(**quick_comparison, device="cuda", decode_rows=(2, 3))
    with environment(sampling.Config(**quick_comparison)):
        model = ensure_model("tiny", SHAPES["tiny"], models_dir)
        with LocalEngine(model, rank=4) as engine:
            table = sampling.decode_traffic(config, engine.base_sampler())
    assert [row[0] for row in table.rows] == ["2", "3"]
    assert all(row[3] == "1" and row[4].endswith("%") for row in table.rows)


@pytest.mark.slow
def test_training(quick_comparison: dict) -> None:
    report = training.run(training.Config(**{**quick_comparison, "peers": ["torch-peft"]}))
    found = statuses(report, "Training")
    assert set(found.values()) == {"measured"} and len(found) == 5
    assert len({row[1] for row in report.tables[0].rows}) == 1  # all had as many tokens
    assert len(report.tables[1].rows) == 5
    assert statuses(report, "The same step") == {"the engine's loss": "measured", "a function": "measured"}


def test_the_two_losses_that_are_compared_are_the_same(quick_comparison: dict, models_dir: str) -> None:
    with environment(sampling.Config(**quick_comparison)):
        model = ensure_model("tiny", SHAPES["tiny"], models_dir)
        workload = make_workload(SHAPES["tiny"].vocab, 4)
        with LocalEngine(model, rank=4) as engine:
            data, _ = policy_data(workload, sample_workload(engine.adapter_sampler(), workload, 0))
            engine.make_adapter_nonzero(workload)  # so that no ratio is 1
            built_in = engine.training.forward(data, "importance_sampling").result()
            logprobs = [output["logprobs"].to_torch() for output in built_in.loss_fn_outputs]
    assert abs(built_in.metrics["loss:sum"]) > 1e-4
    assert float(importance_sampling(data, logprobs)[0]) == pytest.approx(built_in.metrics["loss:sum"], rel=1e-3)


def test_rl_step(quick_comparison: dict) -> None:
    report = rl_step.run(rl_step.Config(**quick_comparison))
    assert statuses(report, "GRPO") == {"ours, GRPO": "measured"}
    assert statuses(report, "DPO") == {"ours, DPO": "measured"}


@pytest.mark.slow
def test_memory(quick: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs run here instead of in processes of their own, which would each take seconds to start."""

    def measure_here(job: Job, kv_budget: int | None = None) -> Peak:
        if kv_budget is not None:
            monkeypatch.setenv("TINKER_LOCAL_KV_CACHE_TOKENS", str(kv_budget))
        return memory_child.run(job)

    monkeypatch.setattr(memory, "measure_in_child", measure_here)
    keys = {"tokens": (64, 128), "vocabularies": (512,), "long_tokens": 128, "waiting": 4, "kv_budget": 512}
    report = memory.run(memory.Config(**quick, **keys))
    growth, long, waiting = report.tables
    assert [row[0] for row in growth.rows] == ["64 tokens", "128 tokens", "slope"]
    assert float(long.rows[0][3].split()[0]) > 0
    assert waiting.rows[2] == ["KV budget, 512 tokens", "0.5 MiB"]


@pytest.mark.slow
def test_a_child_process_answers(models_dir: str) -> None:
    model = ensure_model("tiny", SHAPES["tiny"], models_dir)
    peak = memory.measure_in_child(Job("waiting", str(model), 512, 4, "cpu", 1, count=1, prompt_tokens=5, new_tokens=3))
    assert peak.total > max(peak.growth, 2**20)


def test_a_slope_needs_two_points(quick: dict) -> None:
    with pytest.raises(BenchmarkError, match="tokens="):
        memory.run(memory.Config(**quick, tokens=(64,)))


def test_the_file_is_named_after_what_was_measured(quick_comparison: dict) -> None:
    config = rl_step.Config(**quick_comparison)
    rl_step.main(config)
    assert sorted(path.name for path in Path(config.output).iterdir()) == [
        "rl_step_tiny_float32_cpu.json",
        "rl_step_tiny_float32_cpu.md",
    ]
