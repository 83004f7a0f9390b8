"""Training speed: forward, backward and one AdamW step on 64 ragged sequences, loss on the completions.

Also the cost of a custom loss compared with the engine's: importance_sampling as a Python function.

python -m benchmarks.training shape=small
"""

from contextlib import ExitStack

import chz

from benchmarks import rates
from benchmarks.config import ComparisonConfig, environment, run_benchmark
from benchmarks.harness import Contender, Measurement, measure
from benchmarks.models import SHAPES, ensure_model
from benchmarks.ours import (
    LocalEngine,
    completion_datum,
    policy_data,
    policy_step,
    sample_workload,
    train_step,
)
from benchmarks.peers import plain_torch, trl
from benchmarks.peers.registry import Peer, build, needs, select
from benchmarks.peers.setup import Setup
from benchmarks.report import Report, Table, finish, number
from benchmarks.workload import MAX_NEW_TOKENS, Workload, make_workload, training_sequences

PEERS = {
    "trl": Peer(trl.build_sft, needs("trl", "peft")),
    "torch-peft": Peer(plain_torch.build, needs("peft")),
}
BUILT_IN_LOSS, CUSTOM_LOSS = "the engine's loss", "a function"
SHARED, DISTINCT = "ours, 8 prompts", "ours, 64 prompts"


@chz.chz(typecheck=True)
class Config(ComparisonConfig):
    """Keys of `python -m benchmarks.training`. Peers: trl (SFTTrainer), torch-peft (a hand-written packed loop)."""

    max_new_tokens: int = chz.field(default=MAX_NEW_TOKENS, doc="longest completion", validator=chz.validators.gt(0))


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    peers = select(config, PEERS)
    shape = SHAPES[config.shape]
    with environment(config), ExitStack() as stack:
        report = Report.start("training", config)
        model = ensure_model(config.shape, shape, config.models_dir)
        workload = make_workload(shape.vocab, config.max_new_tokens)
        engine = stack.enter_context(LocalEngine(model, config.rank))
        ours = [_ours(engine, SHARED, workload, True), _ours(engine, DISTINCT, workload, False)]
        contenders, missing = build(Setup(config, shape, model, None, workload, stack), peers)
        results = measure([*ours, *contenders], config)
        title = f"Training step on {workload.rows} sequences: tokens of prompts and completions per second"
        report.add_comparison(title, [*results, *missing], per_token=True)
        report.tables.append(_utilization(config, workload, results))
        losses = measure([_policy_loss(engine, workload, custom) for custom in (False, True)], config)
        title = "The same step with importance_sampling: tokens of prompts and completions per second"
        report.add_comparison(title, losses, per_token=True)
    return report


def _ours(engine: LocalEngine, name: str, workload: Workload, shared_prompts: bool) -> Contender:
    sequences = training_sequences(workload, shared_prompts)
    data = [completion_datum(sequence) for sequence in sequences]
    tokens = sum(len(sequence.tokens) for sequence in sequences)

    def run_once(round_number: int) -> int:
        train_step(engine.training, data)
        return tokens

    return Contender(name, run_once, is_ours=True)


def _policy_loss(engine: LocalEngine, workload: Workload, custom: bool) -> Contender:
    """A step on samples of the engine, with the engine's loss or a custom function."""
    data, _ = policy_data(workload, sample_workload(engine.adapter_sampler(), workload, round_number=0))
    tokens = sum(datum.model_input.length for datum in data)

    def run_once(round_number: int) -> int:
        policy_step(engine.training, data, custom)
        return tokens

    return Contender(CUSTOM_LOSS if custom else BUILT_IN_LOSS, run_once, is_ours=True)


def _utilization(config: Config, workload: Workload, results: list[Measurement]) -> Table:
    """The operations that the work needs, over the time it took, as a share of a large matrix product's rate."""
    peak = rates.matmul_rate(config.device, config.dtype)
    needed = rates.training_flops(SHAPES[config.shape], config.rank, training_sequences(workload))
    rows = []
    for result in results:
        if result.repetitions:
            reached = needed / result.seconds.median
            rows.append([result.name, number(reached / 1e9), number(peak / 1e9), f"{reached / peak:.0%}"])
    title = (
        "Operations that the work needs (each sequence on its own) per second, as a share of a measured matrix product"
    )
    return Table(title, ["contender", "GFLOP/s", "matrix product GFLOP/s", "share"], rows)


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
