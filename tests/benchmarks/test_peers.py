"""The peers' plumbing, without the peers: TRL and vLLM are never needed here."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.config import ComparisonConfig
from benchmarks.errors import BenchmarkError
from benchmarks.harness import Contender
from benchmarks.models import SHAPES, ensure_model
from benchmarks.ours import LocalEngine, completion_datum
from benchmarks.peers import plain_torch, vllm
from benchmarks.peers.huggingface import load_model
from benchmarks.peers.process import isolated
from benchmarks.peers.registry import Peer, build, needs, select
from benchmarks.peers.setup import Setup
from benchmarks.peers.trl import SteppedTrainer
from benchmarks.workload import make_workload, training_sequences


class FakeTrainer:
    """Has the loop that TRL's trainers have: one call of on_step_begin per step."""

    def __init__(self, fail_at: int | None = None):
        self.steps = 0
        self._fail_at = fail_at
        self._callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        pass

    def train(self) -> None:
        while True:
            for callback in self._callbacks:
                callback.on_step_begin(None, None, None)
            if self.steps == self._fail_at:
                raise ValueError("broken")
            self.steps += 1


def test_a_trainer_goes_on_one_step_at_a_time() -> None:
    trainer = FakeTrainer()
    stepped = SteppedTrainer(trainer, threads=1)
    for expected in (1, 2, 3):
        stepped.step()
        assert trainer.steps == expected
    stepped.close()
    assert trainer.steps == 3


def test_an_error_of_the_trainer_reaches_the_harness() -> None:
    stepped = SteppedTrainer(FakeTrainer(fail_at=1), threads=1)
    stepped.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            stepped.step()
    stepped.close()


def setup(tmp_path: Path, stack: ExitStack, **keys: Any) -> Setup:
    shape = SHAPES["tiny"]
    model = ensure_model("tiny", shape, str(tmp_path))
    return Setup(ComparisonConfig(threads=1, rank=4), shape, model, None, make_workload(shape.vocab, 6), stack, **keys)


def broken(setup: Setup) -> list[Contender]:
    raise ZeroDivisionError("division by zero")


def counting(setup: Setup) -> list[Contender]:
    setup.versions["counter"] = "1"
    return [Contender("rounds", lambda n: 10 * n), Contender("fails", lambda n: n // 0)]


@pytest.mark.slow
def test_a_peer_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    with ExitStack() as stack:
        there = setup(tmp_path, stack)
        rounds, fails = isolated(counting, there)
        assert there.versions == {"counter": "1"}
        assert (rounds.name, rounds.run(3), rounds.run(5)) == ("rounds", 30, 50)
        with pytest.raises(BenchmarkError, match="ZeroDivisionError"):
            fails.run(1)
        assert rounds.run(1) == 10


@pytest.mark.slow
def test_every_peer_that_cannot_run_has_a_row(tmp_path: Path) -> None:
    peers = {
        "absent": Peer(lambda setup: [], needs("no_such_package")),
        "vllm": Peer(vllm.build, vllm.missing),
        "broken": Peer(broken, lambda setup: None),
    }
    with ExitStack() as stack:
        contenders, missing = build(setup(tmp_path, stack), peers)
    assert contenders == []
    assert [row.name for row in missing] == ["absent", "vllm", "broken"]
    assert missing[0].status == "not installed (pip install no_such_package)"
    assert missing[1].status.startswith("not installed") and "vllm_python=" in missing[1].status
    assert missing[2].status.startswith("failed to start: BenchmarkError: ZeroDivisionError")


def test_unknown_peers_are_refused() -> None:
    peers = {"hf": Peer(lambda setup: [], lambda setup: None)}
    assert list(select(ComparisonConfig(), peers)) == ["hf"]
    assert select(ComparisonConfig(peers=[]), peers) == {}
    with pytest.raises(BenchmarkError, match=r"peers=nope.*hf"):
        select(ComparisonConfig(peers=["nope"]), peers)


def test_a_child_without_vllm_says_so(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(RuntimeError, match="No module named 'vllm'"):
        vllm.build(setup(tmp_path, stack, vllm_python=sys.executable))


def test_the_plain_loop_computes_the_loss_that_the_engine_does(tmp_path: Path) -> None:
    """Packing, attention per sequence and all three ways to the loss, against the engine on the same weights."""
    with ExitStack() as stack:
        there = setup(tmp_path, stack)
        plain_torch.build(there)
        model = load_model(there)
        model.set_attn_implementation("benchmark_per_sequence")
        sequences = training_sequences(there.workload)
        with torch.inference_mode():
            found = {loss: 0.0 for loss in ("full_logits_loss", "completion_logits_loss", "fused_loss")}
            for p in plain_torch.pack(sequences, "cpu"):
                hidden = model.model(
                    input_ids=p.tokens, position_ids=p.positions, use_cache=False, sequence_lengths=p.lengths
                ).last_hidden_state
                for name in found:
                    loss = getattr(plain_torch, name)(hidden, model.lm_head.weight, p.targets, p.loss_mask)
                    found[name] += float(loss)
        engine = stack.enter_context(LocalEngine(there.model, 4))
        scored = engine.training.forward([completion_datum(s) for s in sequences], "cross_entropy").result()
        expected = scored.metrics["loss:sum"]
        assert found == {name: pytest.approx(expected, rel=1e-5) for name in found}


def test_the_fused_gradient_is_that_of_the_full_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(11, 5, generator=generator)
    targets = torch.randint(11, (1, 700), generator=generator)
    loss_mask = torch.rand(1, 700, generator=generator) < 0.9
    gradients = []
    for loss in (plain_torch.full_logits_loss, plain_torch.fused_loss):
        hidden = torch.randn(1, 700, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (2 * loss(hidden, head, targets, loss_mask)).backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    torch.testing.assert_close(*gradients)
