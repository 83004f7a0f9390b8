"""The base model in bfloat16 compared with float32: sampling speed, and error of its logprobs.

python -m benchmarks.precision shape=small
"""

import statistics
from contextlib import ExitStack

import chz
import numpy as np
import tinker

from benchmarks.config import ComparisonConfig, environment, run_benchmark
from benchmarks.errors import BenchmarkError
from benchmarks.harness import Contender, Measurement, measure
from benchmarks.models import SHAPES, ensure_model
from benchmarks.ours import LocalEngine, count_tokens, sample_workload
from benchmarks.report import Report, Table, finish, number
from benchmarks.workload import Workload, make_workload
from tinker_local_backend import SamplingClient

DTYPES = ("float32", "bfloat16")


@chz.chz(typecheck=True)
class Config(ComparisonConfig):
    """Keys of `python -m benchmarks.precision`. It runs both dtypes (the key `dtype` is not read), and has no peers."""

    max_new_tokens: int = chz.field(default=128, doc="longest completion", validator=chz.validators.gt(0))


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    if config.peers:
        raise BenchmarkError("peers: precision has none; leave the key out")
    shape = SHAPES[config.shape]
    model = ensure_model(config.shape, shape, config.models_dir)
    workload = make_workload(shape.vocab, config.max_new_tokens)
    samplers: dict[tuple[str, str], SamplingClient] = {}
    with ExitStack() as stack:
        report = Report.start("precision", config)
        for dtype in DTYPES:
            with environment(chz.replace(config, dtype=dtype)):
                engine = stack.enter_context(LocalEngine(model, config.rank))
                engine.make_adapter_nonzero(workload)
                samplers[dtype, "base"], samplers[dtype, "LoRA"] = engine.base_sampler(), engine.adapter_sampler()
        with environment(config):
            contenders = [
                Contender(
                    f"{dtype}, {kind}", lambda n, s=s: count_tokens(sample_workload(s, workload.in_round(n), n)), True
                )
                for (dtype, kind), s in samplers.items()
            ]
            results = measure(contenders, config)
            report.measurements["Sampling"] = [result.to_json() for result in results]
            report.tables.append(speed_table(results))
            report.tables.append(error_table(samplers["float32", "base"], samplers["bfloat16", "base"], workload))
    return report


def speed_table(results: list[Measurement]) -> Table:
    """Speed by wall-clock time, and by the CPU time of this process, which other programs disturb less."""
    rows = []
    for result in results:
        by_cpu = [r.tokens / (r.seconds * r.own_cores) for r in result.repetitions if r.own_cores > 0]
        rows.append(
            [
                result.name,
                number(result.tokens_per_second.median),
                number(statistics.median(by_cpu)) if by_cpu else "",
                str(result.disturbed),
            ]
        )
    return Table("Sampling", ["base model", "tokens/s", "tokens per CPU second", "disturbed"], rows)


def error_table(exact: SamplingClient, rounded: SamplingClient, workload: Workload) -> Table:
    """Logprobs of tokens sampled in bfloat16, compared with the float32 model and with bfloat16's prompt logprobs."""
    groups = sample_workload(rounded, workload, round_number=1)
    pairs = [(prompt, s) for prompt, group in zip(workload.prompts_P, groups, strict=True) for s in group]
    sampled = np.concatenate([np.array(sequence.logprobs) for _, sequence in pairs])
    rows = []
    for name, scorer in (("the float32 model", exact), ("the bfloat16 model, scored as a prompt", rounded)):
        futures = [scorer.compute_logprobs(tinker.ModelInput.from_ints([*p, *s.tokens])) for p, s in pairs]
        scored = np.concatenate(
            [np.array(f.result()[len(p) :], dtype=np.float64) for f, (p, _) in zip(futures, pairs, strict=True)]
        )
        difference = np.abs(sampled - scored)
        shown = [difference.mean(), np.quantile(difference, 0.999), difference.max(), (sampled - scored).mean()]
        rows.append([name, *(f"{value:.1e}" for value in shown)])
    return Table(
        "Logprobs of tokens sampled in bfloat16, against those of ...",
        ["scores", "mean difference", "99.9%", "largest", "KL v1"],
        rows,
    )


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
