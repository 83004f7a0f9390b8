"""Settings of signal, length and entropy, in runs: each changes what the trainer is given, in every pacing that takes it.

Their formulas have tests of their own; here they are reached by a run's config.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
import tinker
from tinker.types import SampledSequence

from tests.fakes import FakeServiceClient, FakeTrainingClient, SampleCall
from tests.rl.handmade import array
from tests.rl.loop import NumberDataset, NumberDatasetBuilder, NumberGroup, make_config, rows, run
from tinker_cookbook.rl import train
from tinker_cookbook.rl.entropy import EntropyConfig
from tinker_cookbook.rl.overlong import OverlongConfig
from tinker_cookbook.rl.types import Action, ActionExtra, Env, RLDataset, StepResult

PACINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"stream_minibatch_config": train.StreamMinibatchConfig(num_minibatches=3)},
    "async": {"async_config": train.AsyncConfig(max_steps_off_policy=1, loss_fn="importance_sampling")},
}
every_pacing = pytest.mark.parametrize("pacing", PACINGS)


def trained(service: FakeServiceClient, loss_fn: str = "importance_sampling") -> list[tinker.Datum]:
    return [datum for one in service.trainers[-1].passes if one.loss_fn == loss_fn for datum in one.data]


def sampled(datum: tinker.Datum, key: str) -> np.ndarray:
    """The values at sampled tokens. Only they have a logprob."""
    return array(datum, key)[array(datum, "logprobs") != 0]


def identity(datum: tinker.Datum) -> tuple[int, ...]:
    """Group, member, batch and reply."""
    return (*datum.model_input.to_ints(), int(array(datum, "target_tokens")[-1]))


@every_pacing
def test_the_bonus_for_entropy(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    """One token per reply: A + c (surprisal - its mean over the pass)."""
    plain = {}
    for name, more in (("plain", {}), ("bonus", {"entropy": EntropyConfig(coef=0.5)})):
        run(make_config(tmp_path / name, max_steps=1, **more, **PACINGS[pacing]))
        if name == "plain":
            plain = {identity(datum): sampled(datum, "advantages")[0] for datum in trained(service)}
    assert rows(tmp_path / "bonus")[0]["optim/entropy_coef"] == 0.5
    found = trained(service)
    assert len(found) >= len(plain) > 4
    for one in service.trainers[-1].passes:
        surprisals = [-sampled(datum, "logprobs")[0] for datum in one.data]
        added = [sampled(d, "advantages")[0] - plain.get(identity(d), 0.0) for d in one.data]
        differences = np.subtract.outer(np.array(added), np.array(added))
        assert differences == pytest.approx(
            0.5 * np.subtract.outer(np.array(surprisals), np.array(surprisals)), abs=1e-5
        )


@every_pacing
def test_an_adaptive_bonus_moves_from_step_to_step(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    config = EntropyConfig(target=100.0, delta=0.25, max_coef=0.5)
    run(make_config(tmp_path, entropy=config, **PACINGS[pacing]))
    assert [row["optim/entropy_coef"] for row in rows(tmp_path)] == [0.0, 0.25, 0.5, 0.5]


def long_reply(call: SampleCall) -> list[int]:
    """Of the second member four tokens, all that it may; of the others one."""
    return [5, 5, 5, 5] if call.prompt[1] == 1 else [call.prompt[1]]


@every_pacing
def test_long_replies_lose_reward(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    service.reply = long_reply
    overlong = OverlongConfig(penalty_tokens=2, penalty=8.0)
    run(make_config(tmp_path, max_steps=1, overlong=overlong, **PACINGS[pacing]))
    row = rows(tmp_path)[0]
    assert row["env/all/overlong_penalty"] == -2.0 and row["env/all/reward/total"] == (0 + 5 - 8 + 2 + 3) / 4
    of_long = [datum for datum in trained(service) if len(sampled(datum, "advantages")) == 4]
    assert len(of_long) == 3 and all((sampled(datum, "advantages") == -3.5).all() for datum in of_long)


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies of four tokens, the most that there may be, have no stop token."""

    def made(**sequence: Any) -> SampledSequence:
        return SampledSequence(**{**sequence, "stop_reason": "length" if len(sequence["tokens_np"]) == 4 else "stop"})

    monkeypatch.setattr("tests.fakes.SampledSequence", made)


@every_pacing
@pytest.mark.usefixtures("cut_off")
def test_a_group_of_nothing_else_has_no_signal_and_is_replaced(
    service: FakeServiceClient, tmp_path: Path, pacing: str
) -> None:
    """The first group of the first batch has four rewards, of four replies that are cut off."""
    service.reply = lambda call: [call.prompt[1]] * (4 if call.prompt[0] == call.prompt[2] == 0 else 1)
    more = {"overlong": OverlongConfig(mask=True), "replace_constant_groups": 1, **PACINGS[pacing]}
    run(make_config(tmp_path, max_steps=2, **more))
    row = rows(tmp_path)[0]
    assert (row["groups/sampled"], row["groups/trained"], row["groups/replaced"], row["groups/filtered"]) == (
        4,
        3,
        1,
        0,
    )


@every_pacing
@pytest.mark.usefixtures("cut_off")
def test_replies_that_are_cut_off_do_not_train(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    service.reply = long_reply
    run(make_config(tmp_path, max_steps=1, overlong=OverlongConfig(mask=True), **PACINGS[pacing]))
    lengths = [len(sampled(datum, "advantages")) for datum in trained(service)]
    assert lengths == [1] * 9  # three members of each of three groups
    assert {sampled(datum, "advantages")[0] for datum in trained(service)} == {
        -2.5,
        -0.5,
        0.5,
    }  # the mean is of all four
    assert rows(tmp_path)[0]["tokens/thrown_away"] == 12


class TalkEnv(Env):
    """Answers the first reply with the tokens 50 and 51, and pays the second one's id."""

    def __init__(self, prompt: list[int]):
        self.prompt, self.turns = prompt, 0

    async def initial_observation(self):
        return tinker.ModelInput.from_ints(self.prompt), [0]

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.turns += 1
        self.prompt = [*self.prompt, *action, 50, 51]
        return StepResult(float(action[0]), self.turns == 2, tinker.ModelInput.from_ints(self.prompt), [0])


class TalkGroup(NumberGroup):
    async def make_envs(self) -> Sequence[Env]:
        return [TalkEnv([self.group, i, self.batch]) for i in range(self.members)]


class TalkDataset(NumberDataset):
    def get_batch(self, index: int) -> list[NumberGroup]:
        return [TalkGroup(index, g, self.members, False) for g in range(self.groups)]


@chz.chz(typecheck=True)
class TalkDatasetBuilder(NumberDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return TalkDataset(self.batches, self.groups, self.members, 0), None


@every_pacing
def test_what_the_environment_wrote(service: FakeServiceClient, tmp_path: Path, pacing: str) -> None:
    run(make_config(tmp_path / "without", TalkDatasetBuilder(), max_steps=1, **PACINGS[pacing]))
    assert trained(service, "cross_entropy") == []
    config = make_config(
        tmp_path / "with", TalkDatasetBuilder(), max_steps=1, environment_loss_coef=0.25, **PACINGS[pacing]
    )
    run(config)
    found = trained(service, "cross_entropy")
    assert len(found) == len(trained(service)) > 4
    for datum in found:
        weights = array(datum, "weights")
        assert array(datum, "target_tokens")[weights != 0].tolist() == [50, 51] and set(weights) == {0.0, 0.25}
    row = rows(tmp_path / "with")[0]
    assert row["train/environment_loss_sum"] > 0
    assert row["tokens/trained"] == 2 * rows(tmp_path / "without")[0]["tokens/trained"]


@pytest.mark.parametrize("pacing", ["sync", "async"])
def test_tokens_of_highest_entropy(
    service: FakeServiceClient, tmp_path: Path, pacing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = FakeTrainingClient._output

    def with_entropies(client: FakeTrainingClient, data: list[tinker.Datum]) -> tinker.ForwardBackwardOutput:
        """A token's entropy is its id."""
        found = output(client, data)
        for datum, outputs in zip(data, found.loss_fn_outputs, strict=True):
            ids = array(datum, "target_tokens").astype(np.float32)
            outputs["entropies"] = tinker.TensorData.from_numpy(ids)
        return found

    monkeypatch.setattr(FakeTrainingClient, "_output", with_entropies)
    service.reply = lambda call: [call.prompt[1]]
    run(make_config(tmp_path, max_steps=1, top_entropy_share=0.25, **PACINGS[pacing]))
    kept = [identity(datum)[-1] for datum in trained(service) if sampled(datum, "advantages").any()]
    assert kept == [3, 3, 3]
    assert rows(tmp_path)[0]["top_entropy/share"] == 0.25
