"""Sampling speed: 8 ragged prompts with 8 samples each, random lengths, temperature 1, logprobs returned.

python -m benchmarks.sampling shape=small
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import chz
import tinker

from benchmarks import rates
from benchmarks.config import ComparisonConfig, environment, run_benchmark
from benchmarks.harness import Contender, measure
from benchmarks.models import SHAPES, ensure_model
from benchmarks.ours import LocalEngine, count_tokens, sample_workload, sampling_against_training
from benchmarks.peers import huggingface, vllm
from benchmarks.peers.registry import Peer, build, needs, select
from benchmarks.peers.setup import Setup
from benchmarks.report import NOT_MEASURED, Report, Table, finish, number
from benchmarks.workload import MAX_NEW_TOKENS, Workload, make_workload, random_tokens
from tinker_local_backend import SamplingClient

PEERS = {
    "hf": Peer(huggingface.build_generate, needs("peft")),
    "hf-continuous": Peer(huggingface.build_continuous, needs("peft")),
    "vllm": Peer(vllm.build, vllm.missing),
}


@chz.chz(typecheck=True)
class Config(ComparisonConfig):
    """Keys of `python -m benchmarks.sampling`. Peers: hf (generate), hf-continuous (generate_batch), vllm."""

    vllm_python: str | None = chz.field(
        default=None, doc="python of the separate environment that holds vLLM (see benchmarks/README.md)"
    )
    max_new_tokens: int = chz.field(default=MAX_NEW_TOKENS, doc="longest completion", validator=chz.validators.gt(0))
    decode_rows: tuple[int, ...] = chz.field(
        default=(64, 256), doc="device=cuda: batch sizes at which the memory traffic of decoding is measured"
    )


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    peers = select(config, PEERS)
    shape = SHAPES[config.shape]
    with environment(config), ExitStack() as stack:
        report = Report.start("sampling", config)
        model = ensure_model(config.shape, shape, config.models_dir)
        workload = make_workload(shape.vocab, config.max_new_tokens)
        engine = stack.enter_context(LocalEngine(model, config.rank))
        engine.make_adapter_nonzero(workload)
        with_lora, base = engine.adapter_sampler(), engine.base_sampler()
        ours = [
            Contender("ours, LoRA", lambda n: count_tokens(sample_workload(with_lora, workload.in_round(n), n)), True),
            Contender("ours, base", lambda n: count_tokens(sample_workload(base, workload.in_round(n), n)), True),
        ]
        setup = Setup(config, shape, model, engine.save_adapter(), workload, stack, config.vllm_python)
        contenders, missing = build(setup, peers)
        results = measure([*ours, *contenders], config)
        report.facts.update(setup.versions)
        report.add_comparison(
            f"Sampling, {workload.rows} sequences: completion tokens per second", [*results, *missing], per_token=True
        )
        kl, largest = sampling_against_training(engine, with_lora, workload)
        report.tables.append(
            Table(
                "Logprobs when sampled against the trainer's, same weights and tokens",
                ["KL v1", "largest difference"],
                [[f"{kl:.1e}", f"{largest:.1e}"]],
            )
        )
        report.tables.append(decode_traffic(config, with_lora))
        if shape.delta is not None:
            share = mixers_share(engine, with_lora, workload)
            title = "CPU time of sampling that is spent in the forward of layers with a state (transformers' own code)"
            report.tables.append(Table(title, ["share"], [[f"{share:.0%}"]]))
    return report


def mixers_share(engine: LocalEngine, sampler: SamplingClient, workload: Workload) -> float:
    """The share of the CPU time of one round that is spent in these layers, including their linears."""
    mixer_seconds = 0.0

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal mixer_seconds
            began = time.process_time()
            result = forward(*args, **kwargs)
            mixer_seconds += time.process_time() - began
            return result

        return run_timed

    mixers: list[Any] = [module.forward for module in engine.training._run.model.mixers]
    plain = [mixer._forward for mixer in mixers]
    for mixer, forward in zip(mixers, plain, strict=True):
        mixer._forward = timed(forward)
    began = time.process_time()
    sample_workload(sampler, workload.in_round(0), 0)
    total = time.process_time() - began
    for mixer, forward in zip(mixers, plain, strict=True):
        mixer._forward = forward
    return mixer_seconds / total


def decode_traffic(config: Config, sampler: SamplingClient) -> Table:
    """The share of the device's memory bandwidth that decoding uses: the bytes that it must read, over the time it took."""
    title = "Decoding: bytes that must be read (weights and KV cache) per second, as a share of a measured copy"
    columns = ["rows", "seconds", "GB/s", "copy GB/s", "share"]
    if config.device == "cpu":
        return Table(title, columns, [[str(rows), *[NOT_MEASURED] * 4] for rows in config.decode_rows])
    shape, prompt_length = SHAPES[config.shape], 64
    bytes_per_number = 2 if config.dtype == "bfloat16" else 4
    bandwidth = rates.copy_bandwidth(config.device)
    table_rows = []
    for rows in config.decode_rows:
        prompt = tinker.ModelInput.from_ints(random_tokens(shape.vocab, prompt_length, seed=0))
        params = tinker.SamplingParams(max_tokens=config.max_new_tokens, temperature=1.0, stop=[], seed=0)
        sampler.sample(prompt, rows, params).result()
        times = []
        for _ in range(config.repetitions):
            start = time.perf_counter()
            sampler.sample(prompt, rows, params).result()
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        needed = rates.decode_bytes(shape, config.rank, rows, prompt_length, config.max_new_tokens, bytes_per_number)
        speeds = [needed / seconds / 1e9, bandwidth / 1e9]
        table_rows.append([str(rows), number(seconds), *map(number, speeds), f"{needed / seconds / bandwidth:.0%}"])
    return Table(title, columns, table_rows)


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
