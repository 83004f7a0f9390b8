"""Seconds per step of preference and policy training, including everything between two steps.

GRPO: sample 8 prompts x 8, reward, advantages, train, optimizer, new snapshot. DPO: reference and policy passes over 32 pairs,
optimizer.

python -m benchmarks.rl_step shape=small
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import chz

from benchmarks.config import ComparisonConfig, environment, run_benchmark
from benchmarks.harness import Contender, measure
from benchmarks.models import SHAPES, ensure_model
from benchmarks.ours import DpoLoop, GrpoLoop, LocalEngine
from benchmarks.peers import trl
from benchmarks.peers.registry import Peer, build, needs, select
from benchmarks.peers.setup import Setup
from benchmarks.report import Report, finish
from benchmarks.workload import MAX_NEW_TOKENS, PAIRS, Workload, make_workload, preference_pairs

GRPO_PEERS = {"trl": Peer(trl.build_grpo, needs("trl", "peft"))}
DPO_PEERS = {"trl": Peer(trl.build_dpo, needs("trl", "peft"))}


@chz.chz(typecheck=True)
class Config(ComparisonConfig):
    """Keys of `python -m benchmarks.rl_step`. Peers: trl (GRPOTrainer with transformers' generate, DPOTrainer)."""

    max_new_tokens: int = chz.field(default=MAX_NEW_TOKENS, doc="longest completion", validator=chz.validators.gt(1))


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    for peers in (GRPO_PEERS, DPO_PEERS):
        select(config, peers)
    shape = SHAPES[config.shape]
    with environment(config):
        report = Report.start("rl_step", config)
        model = ensure_model(config.shape, shape, config.models_dir)
        workload = make_workload(shape.vocab, config.max_new_tokens)
        _compare(report, config, model, workload, "GRPO", GRPO_PEERS)
        _compare(report, config, model, workload, "DPO", DPO_PEERS)
    return report


def _compare(
    report: Report, config: Config, model: Path, workload: Workload, method: str, peers: Mapping[str, Peer]
) -> None:
    """One method, ours and the peers, with new engines that are closed at its end."""
    with ExitStack() as stack:
        engine = stack.enter_context(LocalEngine(model, config.rank))
        if method == "GRPO":
            loop = GrpoLoop(engine, workload)
            title = f"GRPO step, {workload.rows} samples: seconds per step (tokens: sampled)"
        else:
            loop = DpoLoop(engine, preference_pairs(workload))
            title = f"DPO step, {PAIRS} pairs: seconds per step (tokens: prompts and answers)"
        setup = Setup(config, SHAPES[config.shape], model, None, workload, stack)
        contenders, missing = build(setup, select(config, peers))
        results = measure([Contender(f"ours, {method}", loop.step, is_ours=True), *contenders], config)
        report.add_comparison(title, [*results, *missing], per_token=False)


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
