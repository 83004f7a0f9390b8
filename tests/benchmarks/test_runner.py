"""What must hold of benchmarks: the estimator is right, every item is tried as asked, and an interrupted run goes on."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import eval_benchmarks
from tests.fakes import FakeServiceClient, SampleCall
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.eval import benchmarks as runner
from tinker_cookbook.eval.benchmarks import (
    BenchmarkConfig,
    BenchmarkResult,
    dataset_benchmark,
    pass_at_k,
    run_benchmarks,
    task_benchmark,
)
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.files import read_jsonl
from tinker_cookbook.utils.seeds import derive_seed

TINY = str(EXAMPLE_DATA / "tiny_chat")
TOKENIZER = get_tokenizer(TINY)
RENDERER = get_renderer("qwen3_instruct", TOKENIZER, model_name=TINY)


class TestPassAtK:
    @given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
    def test_it_is_the_share_of_choices_with_a_right_one(self, counts: tuple[int, int, int]) -> None:
        n, c, k = counts
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))

    def test_golden(self) -> None:
        assert pass_at_k(200, 3, 10) == pytest.approx(1 - _all_wrong(200, 3, 10))

    @pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, 1, 3), (2, -1, 1), (2, 1, 0)])
    def test_impossible_counts(self, n: int, c: int, k: int) -> None:
        with pytest.raises(ConfigurationError, match="pass@k"):
            pass_at_k(n, c, k)


def _all_wrong(n: int, c: int, k: int) -> float:
    """The product form of the paper's code."""
    product = 1.0
    for i in range(n - c + 1, n + 1):
        product *= 1 - k / i
    return product


def answer(call: SampleCall) -> list[int]:
    """Right or wrong by the seed: `<SOLUTION>number</SOLUTION>`."""
    number = derive_seed(call.params.seed or 0) % 20
    text = TOKENIZER.encode(f"<SOLUTION>{number}</SOLUTION>", add_special_tokens=False)
    return [*text, *(stop for stop in RENDERER.get_stop_sequences() if isinstance(stop, int))]


def run(folder: Path, num_samples: int = 4, max_items: int = 6, policy: str = "p", **options: Any) -> BenchmarkResult:
    benchmark = task_benchmark("qa/arithmetic", RENDERER, num_samples, max_items=max_items)
    config = BenchmarkConfig(max_tokens=20, num_samples=num_samples, **options)
    client = FakeServiceClient(reply=answer).new_sampler(0)
    (result,) = asyncio.run(run_benchmarks([benchmark], client, TOKENIZER, folder, config, policy))
    return result


class TestRun:
    def test_files_and_numbers_agree(self, tmp_path: Path) -> None:
        result = run(tmp_path, pass_at=(1, 4))
        rows = read_jsonl(tmp_path / "qa-arithmetic" / "trajectories.jsonl")
        assert sorted(row["item"] for row in rows) == list(range(6)) and all(len(row["tries"]) == 4 for row in rows)
        solved = [one["solved"] for row in rows for one in row["tries"]]
        assert result.metrics["pass@1"] == pytest.approx(sum(solved) / 24)
        assert result.metrics["pass@4"] == pytest.approx(
            sum(any(x["solved"] for x in row["tries"]) for row in rows) / 6
        )
        assert result.metrics["num_items"] == 6 and result.metrics["num_tries"] == 24
        turn = rows[0]["tries"][0]["turns"][0]
        assert len(turn["completion_tokens"]) == len(turn["completion_logprobs"]) == turn["completion_token_count"]
        assert TOKENIZER.decode(turn["completion_tokens"]) == turn["raw_response"]
        assert json.loads((tmp_path / "qa-arithmetic" / "result.json").read_text())["metrics"] == result.metrics
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary == {"policy": "p", "benchmarks": {"qa/arithmetic": result.metrics}}

    def test_groups_of_one_are_repeated_with_other_seeds(self, tmp_path: Path) -> None:
        benchmark = task_benchmark("qa/arithmetic", RENDERER, num_samples=1, max_items=2)
        client = FakeServiceClient(reply=answer).new_sampler(0)
        config = BenchmarkConfig(max_tokens=20, num_samples=8)
        asyncio.run(run_benchmarks([benchmark], client, TOKENIZER, tmp_path, config, "p"))
        for row in read_jsonl(tmp_path / "qa-arithmetic" / "trajectories.jsonl"):
            assert len(row["tries"]) == 8 and len({one["turns"][0]["raw_response"] for one in row["tries"]}) > 1

    def test_an_interrupted_run_goes_on_to_the_same_result(self, tmp_path: Path) -> None:
        whole = run(tmp_path / "whole")
        path = tmp_path / "whole" / "qa-arithmetic" / "trajectories.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:2]) + lines[2][:40])
        assert run(tmp_path / "whole") == whole
        assert sorted(path.read_text().splitlines()) == sorted("".join(lines).splitlines())

    def test_results_of_other_settings_are_not_mixed(self, tmp_path: Path) -> None:
        run(tmp_path)
        run(tmp_path, pass_at=(2,))  # only read another way
        others: list[dict[str, Any]] = [{"policy": "q"}, {"seed": 1}, {"max_items": 5}, {"success_metric": "reward"}]
        for other in others:
            with pytest.raises(ConfigurationError, match="other settings"):
                run(tmp_path, **other)

    def test_what_decides_success(self, tmp_path: Path) -> None:
        by_reward = run(tmp_path / "a", success_metric="reward", success_threshold=1.0)
        assert by_reward.metrics["pass@1"] == run(tmp_path / "b").metrics["pass@1"]
        with pytest.raises(DataValidationError, match=r"'nothing'.*correct"):
            run(tmp_path / "c", success_metric="nothing")

    @pytest.mark.parametrize(
        ("options", "message"), [({"pass_at": (5,)}, "num_samples=4"), ({"temperature": 0.0}, "same reply each time")]
    )
    def test_settings_that_make_no_sense(self, tmp_path: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            run(tmp_path / "none", **options)
        assert not (tmp_path / "none").exists()

    @pytest.mark.parametrize("spec", ["arithmetic", "qa/", "nothing/arithmetic", "qa/nothing"])
    def test_unknown_benchmarks(self, spec: str) -> None:
        with pytest.raises(ConfigurationError):
            task_benchmark(spec, RENDERER)


def test_the_recipe_measures_the_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TINKER_BACKEND", raising=False)
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    argv = ["benchmarks=qa/arithmetic", "max_items=20", "num_samples=2", "pass_at=1,2", f"save_dir={tmp_path}"]
    run_recipe(eval_benchmarks.CLIConfig, eval_benchmarks.main, argv=argv)
    metrics = json.loads((tmp_path / "summary.json").read_text())["benchmarks"]["qa/arithmetic"]
    assert 0.2 < metrics["pass@1"] < metrics["pass@2"] <= 1
    assert "qa/arithmetic" in capsys.readouterr().out
    assert runner.SETTINGS_BASE_NAME in {path.name for path in (tmp_path / "qa-arithmetic").iterdir()}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("arithmetic", "must be task/dataset"),
        ("nothing/arithmetic", "task='nothing' is unknown"),
        ("qa/nothing", "dataset='nothing'"),
    ],
)
def test_the_recipe_refuses_an_unknown_benchmark_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: str, message: str
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a model was loaded before the benchmarks had been checked")

    monkeypatch.setattr(eval_benchmarks, "open_policy", refuse)
    with pytest.raises(SystemExit):
        run_recipe(
            eval_benchmarks.CLIConfig, eval_benchmarks.main, argv=[f"benchmarks={spec}", f"save_dir={tmp_path / 'x'}"]
        )
    assert message in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_benchmark_of_an_rl_dataset_tries_every_group(tmp_path: Path) -> None:
    builders = list(task_benchmark("qa/arithmetic", RENDERER, num_samples=2, max_items=5).builders)

    class Halves(RLDataset):
        def get_batch(self, index: int) -> list[EnvGroupBuilder]:
            return [builders[:3], builders[3:]][index]

        def __len__(self) -> int:
            return 2

    client = FakeServiceClient(reply=answer).new_sampler(0)
    config = BenchmarkConfig(max_tokens=20, num_samples=2)
    for max_items, count in ((None, 5), (4, 4)):
        benchmark = dataset_benchmark("mine", Halves(), max_items)
        folder = tmp_path / str(count)
        (result,) = asyncio.run(run_benchmarks([benchmark], client, TOKENIZER, folder, config, "p"))
        assert (result.metrics["num_items"], result.metrics["num_tries"]) == (count, 2 * count)
