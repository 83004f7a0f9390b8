"""What a verdict does to training: who survives, and with which advantage on which token."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.debate.arena import (
    ITEM,
    RENDERERS,
    RIGHT,
    TINY,
    WRONG,
    Held,
    JudgeByIndex,
    hold,
    make_protocol,
    make_renderer,
    three_turns,
)
from tinker_cookbook import backends
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.debate.env import DebateGroupBuilder
from tinker_cookbook.debate.judges import SCRIPTS, ScriptedJudge, Winner
from tinker_cookbook.debate.modes import DebateTrain, get_mode
from tinker_cookbook.rl.advantages import compute_advantages, token_scales
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")


def generated(held: Held) -> list[int]:
    return [trajectory.num_action_tokens for trajectory in held.group.trajectories_G]


def scaled(group: TrajectoryGroup, how: DebateTrain) -> list[torch.Tensor]:
    """Advantages as they stand in the data: divided by what each member generated."""
    advantage = get_mode(how).advantage
    (found,), (scales,) = compute_advantages([group], advantage), token_scales([group], advantage.scale)
    return [found / torch.tensor(scales)]


def advantages(held: Held, how: DebateTrain) -> list[float]:
    return scaled(held.group, how)[0].tolist()


@pytest.fixture
def three_debates() -> Held:
    """Winners: member 0 (right), member 3 (wrong), member 5 (right). Losers are right, too, in seats 2 and 4."""
    proposals = [RIGHT, WRONG, RIGHT, WRONG, RIGHT, RIGHT]
    members = [three_turns(RENDERER, proposal, "so " * i) for i, proposal in enumerate(proposals)]
    return hold(RENDERER, members, JudgeByIndex((Winner.A, Winner.B, Winner.B)))


class TestAdvantages:
    def test_rejection_gives_each_winner_the_same_weight(self, three_debates: Held) -> None:
        lengths = generated(three_debates)
        assert len(set(lengths)) > 1
        expected = [1 / lengths[0], 0, 0, 1 / lengths[3], 0, 1 / lengths[5]]
        assert advantages(three_debates, "rejection") == pytest.approx(expected)

    def test_rs_grpo_centres_on_the_winners(self, three_debates: Held) -> None:
        lengths = generated(three_debates)
        # Winners' rewards 1, 0, 1 have the mean 2/3; what the losers answered has no part in it.
        expected = [1 / 3 / lengths[0], 0, 0, -2 / 3 / lengths[3], 0, 1 / 3 / lengths[5]]
        assert advantages(three_debates, "rs_grpo") == pytest.approx(expected)

    @pytest.mark.parametrize("how", ["rejection", "rs_grpo"])
    def test_all_three_rounds_have_it_losers_give_no_data(self, three_debates: Held, how: DebateTrain) -> None:
        found = scaled(three_debates.group, how)
        data, metadata = assemble_training_data([three_debates.group], found)
        assert [m["traj_idx"] for m in metadata] == [0, 3, 5]
        for datum, meta in zip(data, metadata, strict=True):
            member = meta["traj_idx"]
            trajectory = three_debates.group.trajectories_G[member]
            mask, values = (datum.loss_fn_inputs[key].tolist() for key in ("mask", "advantages"))
            assert set(values) == {0.0, found[0][member].item()}
            assert [value != 0 for value in values] == [m == 1 for m in mask]
            assert sum(mask) == trajectory.num_action_tokens
            rounds = "".join(str(int(m)) for m in mask).replace("0", " ").split()
            assert [len(round_) for round_ in rounds] == [len(t.ac.tokens) for t in trajectory.transitions]

    def test_a_single_winner_has_nothing_to_be_compared_with(self) -> None:
        held = hold(RENDERER, [three_turns(RENDERER, p) for p in (RIGHT, WRONG)], JudgeByIndex((Winner.A,)))
        assert advantages(held, "rs_grpo") == [0.0, 0.0] and advantages(held, "rejection")[0] > 0

    @pytest.mark.parametrize("how", ["rejection", "rs_grpo"])
    def test_ties_and_invalid_debates_train_nothing(self, how: DebateTrain) -> None:
        proposals = (RIGHT, WRONG, WRONG, RIGHT, RIGHT, WRONG)
        members = [three_turns(RENDERER, proposal) for proposal in proposals]
        held = hold(RENDERER, members, JudgeByIndex((Winner.TIE, Winner.INVALID, Winner.TIE)))
        assert held.group.is_trained() == [False] * 6 and advantages(held, how) == [0.0] * 6
        assert assemble_training_data([held.group], scaled(held.group, how)) == ([], [])
        metrics = compute_trajectory_metrics([held.group], [["qa"]])
        assert (metrics["env/all/debate/tie"], metrics["env/all/debate/invalid"]) == pytest.approx((2 / 3, 1 / 3))
        assert metrics["env/all/debate/won"] == metrics["env/all/trained_fraction"] == 0.0


@pytest.mark.parametrize("name", RENDERERS)
def test_one_datum_per_winner_on_the_tiny_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path))
    renderer = make_renderer(name)
    builder = DebateGroupBuilder(make_protocol(renderer, judge=ScriptedJudge(SCRIPTS["A"])), ITEM, 3, (0, 0))

    async def roll_out() -> TrajectoryGroup:
        service = backends.create_service_client("local")
        sampler = await service.create_sampling_client(base_model=TINY)
        # Short, since a control token that the untrained renderer makes likely would end the debate as invalid.
        return await do_group_rollout(builder, TinkerTokenCompleter(sampler, 6, 0.5, seed=1))

    group = asyncio.run(roll_out())
    data, metadata = assemble_training_data([group], scaled(group, "rejection"))
    assert [m["traj_idx"] for m in metadata] == [0, 2, 4]
    for datum, meta in zip(data, metadata, strict=True):
        trajectory = group.trajectories_G[meta["traj_idx"]]
        last = trajectory.transitions[-1]
        assert datum.model_input.to_ints() == (last.ob.to_ints() + last.ac.tokens)[:-1]
        inputs = {key: value.tolist() for key, value in datum.loss_fn_inputs.items()}
        sampled = [i for i, m in enumerate(inputs["mask"]) if m == 1]
        assert [inputs["target_tokens"][i] for i in sampled] == [
            t for turn in trajectory.transitions for t in turn.ac.tokens
        ]
        logprobs = [logprob for turn in trajectory.transitions for logprob in turn.ac.logprobs]
        assert [inputs["logprobs"][i] for i in sampled] == pytest.approx(logprobs)
        assert [inputs["advantages"][i] for i in sampled] == pytest.approx([1 / len(sampled)] * len(sampled))
        injected = [i for i, m in enumerate(inputs["mask"]) if m == 0]
        assert all(inputs["advantages"][i] == inputs["logprobs"][i] == 0 for i in injected)
