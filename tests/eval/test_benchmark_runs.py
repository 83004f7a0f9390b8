"""What must hold of runs of benchmarks by name: results are stored and graded again without sampling, mistakes come first."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes import eval_benchmarks
from tests.eval.named import IFEVAL, RENDERER, TOKENIZER, write
from tests.fakes import FakeServiceClient, SampleCall
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.eval import benchmarks
from tinker_cookbook.eval.benchmark_evaluator import BenchmarkEvaluator
from tinker_cookbook.eval.benchmarks.builder import BenchmarkBuilder, Graded, QuestionEnv
from tinker_cookbook.eval.benchmarks.gsm8k import GSM8KBenchmarkBuilder
from tinker_cookbook.eval.benchmarks.registry import run_benchmark
from tinker_cookbook.eval.benchmarks.runner import BenchmarkConfig
from tinker_cookbook.eval.benchmarks.stored import (
    load_result,
    load_summary,
    load_trajectories,
    print_trajectory,
    regrade_trajectories,
    regrade_with,
)
from tinker_cookbook.exceptions import BenchmarkNotFoundError, ConfigurationError
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import Env


def replies(*texts: str) -> FakeServiceClient:
    """Gives these replies in turn."""
    state = {"count": 0}

    def reply(call: SampleCall) -> list[int]:
        text = texts[state["count"] % len(texts)]
        state["count"] += 1
        stops = [stop for stop in RENDERER.get_stop_sequences() if isinstance(stop, int)]
        return [*TOKENIZER.encode(text, add_special_tokens=False), *stops[:1]]

    return FakeServiceClient(reply=reply)


class TestRuns:
    CONFIG = BenchmarkConfig(max_tokens=40, num_samples=2, pass_at=(1, 2), system_prompt="Be brief.")

    def run(
        self, folder: Path, client: FakeServiceClient, rows: Sequence[dict[str, Any]]
    ) -> benchmarks.BenchmarkResult:
        path = write(folder / "rows.jsonl", *rows)
        return asyncio.run(
            run_benchmark("gsm8k", client.new_sampler(0), RENDERER, self.CONFIG, folder / "out", dataset_path=path)
        )

    def test_results_are_stored_and_graded_again_without_sampling(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]
        result = self.run(tmp_path, replies("#### 2"), rows)
        assert result.score == result.metrics["pass@1"] == result.metrics["pass@2"] == 0.5
        out = tmp_path / "out"
        assert load_summary(out) == {"gsm8k": result.metrics}
        stored = load_result(out, "gsm8k")
        assert stored is not None and (stored.score, stored.num_examples, stored.num_correct) == (0.5, 4, 2)
        assert stored.pass_at_k == {1: 0.5, 2: 0.5} and stored.metrics == result.metrics
        tries = load_trajectories(out, "gsm8k")
        assert [one.example_id for one in tries] == ["gsm8k_1", "gsm8k_1", "gsm8k_2", "gsm8k_2"]
        assert [turn.content for turn in tries[0].turns] == ["1 + 1?", "#### 2"]
        assert len(load_trajectories(out, "gsm8k", correct_only=True)) == 2
        wrong = load_trajectories(out, "gsm8k", incorrect_only=True)
        assert [(one.logs["expected"], one.logs["extracted"]) for one in wrong] == [("4", "2")] * 2
        print_trajectory(wrong[0])
        assert "[user] 2 + 2?" in capsys.readouterr().out
        again = regrade_trajectories(out, "gsm8k", lambda reply, logs: float("2" in reply))
        assert (again.score, again.num_correct, again.pass_at_k) == (1.0, 4, {1: 1.0, 2: 1.0})
        assert load_result(out, "gsm8k") == stored

        class Stricter(GSM8KBenchmarkBuilder):
            def grade(self, item: TaskItem, reply: str) -> Graded:
                return Graded(item.reference == "4" and reply == "#### 2")

        assert asyncio.run(regrade_with(out, GSM8KBenchmarkBuilder())).pass_at_k == stored.pass_at_k
        assert asyncio.run(regrade_with(out, Stricter())).score == 0.5
        (file,) = out.rglob("trajectories.jsonl")
        file.write_text(file.read_text().replace('"reply":', '"answer":'))  # as of a benchmark of another kind
        with pytest.raises(
            ConfigurationError, match="replies without the logs of a QuestionBenchmark; use regrade_traj"
        ):
            asyncio.run(regrade_with(out, Stricter()))

    def test_a_second_call_samples_nothing(self, tmp_path: Path) -> None:
        rows = [{"question": "1 + 1?", "answer": "#### 2"}]
        first = self.run(tmp_path, replies("#### 2"), rows)
        assert self.run(tmp_path, replies("#### 3"), rows) == first

    def test_results_that_are_not_there(self, tmp_path: Path) -> None:
        assert load_result(tmp_path, "gsm8k") is None and load_summary(tmp_path) == {}
        with pytest.raises(ConfigurationError, match="no trajectories of benchmark 'gsm8k'"):
            load_trajectories(tmp_path, "gsm8k")

    def test_means_of_ifeval_stand_in_the_result(self, tmp_path: Path) -> None:
        path = write(tmp_path / "rows.jsonl", IFEVAL)
        client = replies("no commas here", "no, three words").new_sampler(0)
        result = asyncio.run(run_benchmark("ifeval", client, RENDERER, self.CONFIG, tmp_path, dataset_path=path))
        assert (result.score, result.metrics["fraction"], result.metrics["loose"]) == (0.5, 0.75, 0.5)

    def test_a_prompt_that_does_not_fit_is_not_solved(self, tmp_path: Path) -> None:
        rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "1 + 1 " + "+ 0 " * 99, "answer": "#### 2"}]
        builder = GSM8KBenchmarkBuilder(write(tmp_path / "rows.jsonl", *rows))
        made = builder.make_benchmark(RENDERER, self.CONFIG, max_prompt_tokens=100)
        client = replies("#### 2").new_sampler(0)
        out = tmp_path / "out"
        (result,) = asyncio.run(benchmarks.run_benchmarks([made], client, TOKENIZER, out, self.CONFIG, "p"))
        assert (result.score, result.metrics["num_tries"]) == (0.5, 4)
        assert asyncio.run(regrade_with(out, builder)).score == 0.5
        assert [one.metrics.get("context_overflow") for one in load_trajectories(out, "gsm8k")] == [None, None, 1, 1]

    def test_a_custom_benchmark_of_any_environments(self, tmp_path: Path) -> None:
        rows = write(tmp_path / "rows.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
        inner = GSM8KBenchmarkBuilder(rows)

        class Custom(BenchmarkBuilder):
            name = "custom"

            def make_envs(self, renderer: Renderer, config: BenchmarkConfig) -> Sequence[Env]:
                return [QuestionEnv(inner, item, renderer) for item in inner.load()]

        client = replies("#### 2", "#### 3").new_sampler(0)
        result = asyncio.run(run_benchmark(Custom(), client, RENDERER, self.CONFIG, tmp_path / "out"))
        assert (result.score, result.metrics["num_tries"], result.metrics["pass@2"]) == (0.5, 2, 1.0)


def test_an_evaluator_of_a_loop_gives_the_same_numbers_each_time(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *[{"question": f"{n} + 0?", "answer": f"#### {n}"} for n in (2, 4, 6)])
    evaluator = BenchmarkEvaluator("gsm8k", RENDERER, max_examples=2, max_tokens=40, dataset_path=path)
    client = replies("#### 2").new_sampler(0)
    metrics = asyncio.run(evaluator(client))
    assert (metrics["eval/gsm8k/score"], metrics["eval/gsm8k/num_items"]) == (0.5, 2)
    assert asyncio.run(evaluator(client)) == metrics
    with pytest.raises(BenchmarkNotFoundError):
        BenchmarkEvaluator("gsm8", RENDERER)


class TestRecipe:
    def test_a_name_with_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TINKER_BACKEND", raising=False)
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
        path = write(tmp_path / "rows.jsonl", {"question": "What is 1 + 1?", "answer": "#### 2"})
        argv = [
            f"benchmarks=gsm8k/{path}",
            "num_samples=1",
            "pass_at=1",
            "max_tokens=8",
            f"save_dir={tmp_path / 'out'}",
        ]
        run_recipe(eval_benchmarks.CLIConfig, eval_benchmarks.main, argv=argv)
        assert load_summary(tmp_path / "out")["gsm8k"]["num_tries"] == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["benchmarks=gsm8"], "did you mean gsm8k"),
            (["benchmarks=ifbench"], "needs its authors' checkers: pip install"),
            (["benchmarks=gsm8k/nothing.jsonl"], "no such file"),
            (["benchmarks=qa/arithmetic", "system_prompt=x"], "has its own"),
        ],
    )
    def test_mistakes_are_told_before_a_model_loads(
        self,
        arguments: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def refuse(*arguments: Any) -> None:
            raise AssertionError("a model was loaded")

        monkeypatch.setattr(eval_benchmarks, "open_policy", refuse)
        with pytest.raises(SystemExit):
            run_recipe(eval_benchmarks.CLIConfig, eval_benchmarks.main, argv=[*arguments, f"save_dir={tmp_path / 'x'}"])
        assert message in capsys.readouterr().err
