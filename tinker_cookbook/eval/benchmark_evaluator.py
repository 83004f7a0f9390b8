"""A benchmark by name as an evaluator of a training loop."""

import tempfile

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.eval.benchmarks.registry import get_benchmark, run_benchmark
from tinker_cookbook.eval.benchmarks.runner import BenchmarkConfig
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.runs.evaluation import SamplingClientEvaluator


class BenchmarkEvaluator(SamplingClientEvaluator):
    """Runs the same items of a benchmark at each evaluation, without saving trajectories.

    Args:
        benchmark_name: a name of `REGISTRY`.
        max_examples: items per evaluation.
        max_tokens: longest reply.
        dataset_path: as in `get_benchmark`.
        seed: of the samples; fixed, so that only the weights change between evaluations.

    Raises:
        BenchmarkNotFoundError, ConfigurationError: as in `get_benchmark`.
    """

    def __init__(
        self,
        benchmark_name: str,
        renderer: Renderer,
        max_examples: int = 100,
        max_tokens: int = 32768,
        temperature: float = 0.6,
        *,
        dataset_path: str | None = None,
        seed: int = 0,
    ):
        self.benchmark = get_benchmark(benchmark_name, dataset_path)
        self.benchmark.check()
        self.renderer, self.max_examples = renderer, max_examples
        self.config = BenchmarkConfig(max_tokens=max_tokens, temperature=temperature, seed=seed)

    async def __call__(self, sampling_client: SamplingClient) -> dict[str, float]:
        """The result's metrics as `eval/NAME/...`: score, pass@1 and its standard error, counts and more."""
        with tempfile.TemporaryDirectory() as folder:
            result = await run_benchmark(
                self.benchmark, sampling_client, self.renderer, self.config, folder, max_items=self.max_examples
            )
        return {f"eval/{self.benchmark.name}/{key}": value for key, value in result.metrics.items()}
