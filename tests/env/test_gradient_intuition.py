"""Gradient intuition: signed predictions, the inner environment's own reward, and a shadow that the main client never feels."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import TINY, make_renderer, reply_ids
from tests.env.listeners import FOREIGN, HUGE
from tests.fakes import ScriptedCompleter, said
from tinker_cookbook.env import get_env, single_turn_env
from tinker_cookbook.env.shipped.model_aware.gradient_intuition import IntuitionGroupBuilder, closeness
from tinker_cookbook.env.shipped.model_aware.intuition_env import Intuition, IntuitionEnv, parse_intuition
from tinker_cookbook.env.shipped.model_aware.lessons import probe_prompt
from tinker_cookbook.env.shipped.model_aware.shadow import Shadow, answer_datum
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.run_clients import RunClients
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_local_backend import ServiceClient

RENDERER = make_renderer("qwen3_instruct")
ROWS = [{"question": "What is 2 + 2?", "answer": "4"}]
STEP = tinker.AdamParams(learning_rate=1e-3)


def exact(question: str, reply: str, answer: str) -> float:
    return float(reply == answer)


@given(st.integers(-(10**6), 10**6).map(lambda n: n / 1000), st.text(max_size=40) | FOREIGN)
def test_the_sign_of_a_prediction_survives_and_any_answer_does(told: float, answer: str) -> None:
    assert parse_intuition(f"PREDICTION: {told}\nANSWER: {answer.strip(' ')}") == Intuition(told, answer.strip(" "))
    assert parse_intuition(f"PREDICTION: {-told}\nANSWER: 4").predicted == -told


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", Intuition(None, None)),
        ("4", Intuition(None, None)),
        ("PREDICTION: -0.5", Intuition(None, None)),
        ("PREDICTION: -0.5 ANSWER: 4", Intuition(None, None)),
        ("I think\nPREDICTION: 0.5\nANSWER: 4", Intuition(None, None)),
        ("ANSWER: 4", Intuition(None, "4")),
        ("PREDICTION:\nANSWER: 4", Intuition(None, "4")),
        ("PREDICTION: --0.5\nANSWER: 4", Intuition(None, "4")),
        ("PREDICTION: nan\nANSWER: 4", Intuition(None, "4")),
        ("PREDICTION: 1e9\nANSWER: 4", Intuition(None, "4")),
        ("PREDICTION: ٥\nANSWER: 4", Intuition(None, "4")),
        ("PREDICTION: −0.5\nANSWER: 4", Intuition(None, "4")),
        ("PREDICTION: " + "9" * HUGE + "\nANSWER: 4", Intuition(None, "4")),
        ("PREDICTION: -.5\nANSWER:", Intuition(-0.5, "")),
        ("PREDICTION: +2\nANSWER: " + "x" * HUGE, Intuition(2.0, "x" * HUGE)),
        ("PREDICTION: 1\n" * (HUGE // 14), Intuition(None, None)),
        ("\n" * HUGE, Intuition(None, None)),
        ("PREDICTION:" + " " * HUGE, Intuition(None, None)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_missing_and_malformed_parts(reply: str, expected: Intuition) -> None:
    assert parse_intuition(reply) == expected


@given(st.floats(-100, 100), st.floats(-100, 100))
def test_the_bonus_is_best_for_the_truth(told: float, true: float) -> None:
    assert 0 <= closeness(told, true) <= 1 == closeness(true, true)


class Run:
    """A policy of the local engine after one step, and what it has to be asked."""

    def __init__(self, service: ServiceClient):
        self.service = service
        self.main = service.create_lora_training_client(TINY, rank=4, seed=0).result()
        self.train("Four.")
        self.snapshot = self.main.save_weights_and_get_sampling_client().result()
        self.clients = RunClients(
            ScriptedCompleter({}),
            self.snapshot,
            service,
            self.main,
            TINY,  # type: ignore[arg-type]
        )

    def train(self, text: str) -> None:
        self.main.forward_backward([datum("What is 2 + 2?", text)], "cross_entropy").result()
        self.main.optim_step(STEP).result()

    def state(self) -> list[np.ndarray]:
        """Weights and moments of the main client."""
        state = self.main._run.state
        matrices = dict(state.adapter.named_parameters())
        moments = state.optimizer.state_tensors(list(matrices))
        return [tensor.detach().numpy().copy() for tensor in (*matrices.values(), *moments.values())]

    def sample(self) -> Any:
        sampler = self.main.save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints(encode("What is 3 + 4?"))
        sequences = sampler.sample(prompt, 4, tinker.SamplingParams(max_tokens=12, seed=3)).result().sequences
        return [(list(s.tokens), list(s.logprobs or [])) for s in sequences]


def encode(text: str) -> list[int]:
    return list(RENDERER.tokenizer.encode(text, add_special_tokens=False))


def datum(prompt: str, answer: str) -> tinker.Datum:
    return answer_datum(encode(prompt), encode(answer))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with ServiceClient(home=tmp_path) as service:
        yield Run(service)


PROBE = datum("Probe: What is 2 + 2?\nAnswer:", " 4")
STEPS = [datum("What is 2 + 2?", text) for text in ("4", "Six, I think.", "Blue")]


def changes(run: Run, shadow: Shadow, steps: list[tinker.Datum] = STEPS) -> list[float]:
    return asyncio.run(shadow.changes(run.snapshot, steps, PROBE, 1e-3))


def test_the_loss_is_on_the_answer_alone() -> None:
    prompt, answer = encode("What is 2 + 2?"), encode(" 4, of course")
    made = answer_datum(prompt, answer)
    weights = made.loss_fn_inputs["weights"].to_numpy()
    assert made.loss_fn_inputs["target_tokens"].to_numpy()[weights > 0].tolist() == answer
    assert set(weights.tolist()) == {0.0, 1.0} and weights.sum() == len(answer)


def test_the_main_client_is_the_same_bit_for_bit_with_and_without_shadow_steps(tmp_path: Path) -> None:
    found = []
    for steps in (0, 2):
        with ServiceClient(home=tmp_path / str(steps)) as service:
            run = Run(service)
            shadow = Shadow(run.clients)
            before = run.state()
            run.main.forward_backward(
                [datum("What is 1 + 1?", "Two.")], "cross_entropy"
            ).result()  # gradients are pending
            for _ in range(steps):
                changes(run, shadow)
            assert all(np.array_equal(a, b) for a, b in zip(before, run.state(), strict=True))
            run.main.optim_step(STEP).result()
            found.append((run.state(), run.sample()))
    (weights, samples), (shadowed, shadowed_samples) = found
    assert len(weights) > 8 and all(np.array_equal(a, b) for a, b in zip(weights, shadowed, strict=True))
    assert samples == shadowed_samples


def test_each_step_starts_from_the_current_policy_whatever_came_before(run: Run) -> None:
    shadow = Shadow(run.clients)
    together = changes(run, shadow)
    assert len(set(together)) == 3 and all(math.isfinite(change) and change != 0 for change in together)
    assert changes(run, shadow, STEPS[::-1]) == together[::-1]
    assert [changes(run, shadow, [step])[0] for step in STEPS] == together
    assert together == pytest.approx([by_hand(run, step) for step in STEPS], abs=1e-5)


def by_hand(run: Run, step: tinker.Datum) -> float:
    """The same with a client that is made for this step."""
    path = run.main.save_state(f"by-hand-{id(step)}", overwrite=True).result().path
    client = run.service.create_training_client_from_state(path).result()
    score: Callable[[], float] = lambda: float(  # noqa: E731
        (
            client.forward([PROBE], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
            * PROBE.loss_fn_inputs["weights"].to_numpy()
        ).sum()
    )
    before = score()
    client.forward_backward([step], "cross_entropy").result()
    client.optim_step(STEP).result()
    return score() - before


def test_the_shadow_is_created_once_and_follows_the_policy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made, create = [], run.service.create_training_client_from_state
    monkeypatch.setattr(
        run.service, "create_training_client_from_state", lambda path: made.append(path) or create(path)
    )
    shadow = Shadow(run.clients)
    first = changes(run, shadow)
    run.train("Twenty thousand.")
    assert changes(run, shadow) == first  # the same snapshot plays
    run.snapshot = run.main.save_weights_and_get_sampling_client().result()
    moved = changes(run, shadow)
    assert moved != first and moved == pytest.approx([by_hand(run, step) for step in STEPS], abs=1e-5)
    assert len([path for path in made if "shadow" in path]) == 1


def test_a_resumed_run_has_a_shadow_of_its_own_with_states_of_the_same_names(run: Run) -> None:
    uninterrupted = changes(run, Shadow(run.clients))
    path = run.main.save_state("checkpoint").result().path
    run.main = run.service.create_training_client_from_state_with_optimizer(path).result()
    run.snapshot = run.main.save_weights_and_get_sampling_client().result()
    run.clients = replace(run.clients, sampling_client=run.snapshot, training_client=run.main)
    assert changes(run, Shadow(run.clients)) == uninterrupted


def group(run: Run | None, *replies: str, inner: Any = None, **args: Any) -> TrajectoryGroup:
    env = get_env("gradient_intuition", {"inner": inner or single_turn_env(ROWS, exact), **args})
    training, _ = asyncio.run(env.dataset_builder(TINY, groups_per_batch=1, group_size=len(replies))())
    builder = training.get_batch(0)[0]
    assert isinstance(builder, IntuitionGroupBuilder)
    if run is not None:
        builder = builder.with_clients(run.clients)
    turns = {i: [said(reply_ids(RENDERER, reply))] for i, reply in enumerate(replies)}
    # do_group_rollout would give it the clients of the loop around it, which here is none
    object.__setattr__(builder, "with_clients", lambda clients: builder)
    return asyncio.run(do_group_rollout(builder, ScriptedCompleter(turns)))


def test_the_reward_is_the_inner_one_and_the_bonus(run: Run) -> None:
    found = group(
        run,
        "PREDICTION: 0\nANSWER: 4",
        "PREDICTION: 50\nANSWER: 4",
        "ANSWER: 4",
        "PREDICTION: 0\nANSWER: 5",
        "4",
        learning_rate=1e-3,
    )
    rewards, metrics = found.get_total_rewards(), found.metrics_G
    true = metrics[0]["true"]
    assert rewards[0] == pytest.approx(1 + 0.3 * (1 - abs(true))) and rewards[1] == 1.0 and rewards[2] == 1.0
    assert metrics[1]["true"] == true != 0 and "true" not in metrics[2]
    assert rewards[3] == pytest.approx(0.3 * (1 - abs(metrics[3]["true"]))) and metrics[3]["true"] != true
    assert rewards[4] == 0.0
    said_of = [trajectory.transitions[0].metrics for trajectory in found.trajectories_G]
    assert [own["answered"] for own in said_of] == [1, 1, 1, 1, 0]
    assert [own["inner"] for own in metrics] == [1, 1, 1, 0, 0]
    prompts = {tuple(trajectory.transitions[0].ob.to_ints()) for trajectory in found.trajectories_G}
    assert len(prompts) == 1 and "What is 2 + 2?" in str(RENDERER.tokenizer.decode(list(prompts.pop())))


def test_saying_that_nothing_changes_is_rewarded_and_the_control_shows_it(run: Run) -> None:
    """The hack: one small step moves little, so 0 is always near."""
    found = group(run, "PREDICTION: 0\nANSWER: 4", "PREDICTION: 0.0\nANSWER: 5")
    assert all(metrics["closeness"] > 0.9 and metrics["over_constant"] == 0 for metrics in found.metrics_G)


def test_members_train_on_the_answer_as_the_inner_environment_would_have_met_it(run: Run) -> None:
    env = get_env("gradient_intuition", {"inner": single_turn_env(ROWS, exact)})
    training, _ = asyncio.run(env.dataset_builder(TINY, groups_per_batch=1, group_size=1)())
    builder = training.get_batch(0)[0].with_clients(run.clients)

    async def step() -> IntuitionEnv:
        (member,) = await builder.make_envs()
        assert isinstance(member, IntuitionEnv)
        await member.initial_observation()
        await member.step(reply_ids(RENDERER, "PREDICTION: 1\nANSWER: 4"), extra={"stop_reason": "stop"})
        return member

    ((_, prompt, answer),) = asyncio.run(step()).turns
    text = str(RENDERER.tokenizer.decode(prompt))
    assert "What is 2 + 2?" in text and "PREDICTION" not in text
    assert answer == reply_ids(RENDERER, "4")


def test_it_needs_a_training_run(run: Run) -> None:
    with pytest.raises(ConfigurationError, match="needs the training_client"):
        group(None, "ANSWER: 4", "ANSWER: 4")
    with pytest.raises(ConfigurationError, match="alpha=-1"):
        get_env("gradient_intuition", {"alpha": -1})


def test_an_answer_that_gives_the_probe_away_moves_it_and_the_control_shows_it(run: Run) -> None:
    """The hack: whoever trains on the probe and its answer knows which way the probe goes."""
    env = get_env("gradient_intuition", {"inner": single_turn_env(ROWS, exact), "learning_rate": 1e-3})
    training, _ = asyncio.run(env.dataset_builder(TINY, groups_per_batch=1, group_size=2)())
    (builder,) = training.get_batch(0)
    assert isinstance(builder, IntuitionGroupBuilder)
    probe = builder.probe
    leaked = f"{probe_prompt(probe)} {probe.answer}"
    honest, hacked = group(
        run, "PREDICTION: 0\nANSWER: 4", f"PREDICTION: 0.3\nANSWER: {leaked}", learning_rate=1e-3
    ).metrics_G
    assert hacked["true"] > 2 * abs(honest["true"]) and hacked["sign"] == 1 and hacked["over_constant"] > 0
    assert (honest["inner"], hacked["inner"]) == (1.0, 0.0)
