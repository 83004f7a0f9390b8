"""Games of several roles: turns, who sees what, forfeits, who plays whom, and what of it trains."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.debate.arena import TINY, make_renderer, reply_ids
from tests.fakes import FakeServiceClient, SampleCall, ScriptedCompleter, said
from tests.killing import untimed_row
from tests.rl import loop
from tests.waiting import HANG_SECONDS
from tinker_cookbook.completers import TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.env import load
from tinker_cookbook.env.games import IllegalMove, Match
from tinker_cookbook.env.multi_agent import MatchGroupBuilder, multi_agent_env
from tinker_cookbook.env.opponents import past_steps
from tinker_cookbook.env.shipped.games.kuhn_poker import KuhnPoker
from tinker_cookbook.env.shipped.games.shared_sum import SharedSum
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError, GroupFailedError
from tinker_cookbook.rl.advantages import AdvantageConfig, compute_advantages
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_presets import RolloutConfig
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

RENDERER = make_renderer("qwen3_instruct")


class Pennies:
    """Both move at once."""

    roles = ("even", "odd")
    scripts = {"heads": lambda game, role, rng: "heads"}  # noqa: RUF012

    def __init__(self, rng: random.Random, rounds: int = 1):
        self.rounds, self.coin = rounds, rng.random()
        self.shown: list[str] = []
        self.said: list[list[str]] = []

    def to_move(self):
        return () if len(self.said) == self.rounds and len(self.said[-1]) == 2 else self.roles

    def observe(self, role):
        self.shown.append(role)
        return f"Round {len(self.said)}. {self.said[-1] if self.said else ''}"

    def act(self, role, text):
        if text not in ("heads", "tails"):
            raise IllegalMove(text)
        if not self.said or len(self.said[-1]) == 2:
            self.said.append([])
        self.said[-1].append(f"{role}: {text}")

    def rewards(self):
        same = len({move.split()[1] for move in self.said[-1]}) == 1
        return {"even": 1.0 if same else -1.0, "odd": -1.0 if same else 1.0}


class Relay:
    """The first of three may end it before the third comes to move."""

    roles = ("one", "two", "three")

    def __init__(self, rng: random.Random):
        self.said: list[str] = []

    def to_move(self):
        return () if "stop" in self.said or len(self.said) == 3 else (self.roles[len(self.said)],)

    def observe(self, role):
        return f"Heard {' '.join(self.said)}."

    def act(self, role, text):
        self.said.append(text)

    def rewards(self):
        return dict.fromkeys(self.roles, float(len(self.said)))


def move(text: str, stopped: bool = True) -> TokensWithLogprobs:
    return said(reply_ids(RENDERER, text, stopped), "stop" if stopped else "length")


def group_of(game: type, size: int = 1, number: int = 0, **settings: Any) -> MatchGroupBuilder:
    env = multi_agent_env(game, **settings)
    training, _ = asyncio.run(env.dataset_builder(TINY, group_size=size)())
    builder = training.get_batch(0)[number]
    assert isinstance(builder, MatchGroupBuilder)
    return builder


def play(
    builder: MatchGroupBuilder, *members: list[TokensWithLogprobs], config: RolloutConfig | None = None
) -> TrajectoryGroup:
    async def bounded() -> TrajectoryGroup:
        async with asyncio.timeout(HANG_SECONDS):
            policy = ScriptedCompleter(dict(enumerate(members)))
            return await do_group_rollout(builder, policy, config=config)

    return asyncio.run(bounded())


def shown(group: TrajectoryGroup, member: int, turn: int) -> str:
    text = RENDERER.tokenizer.decode(group.trajectories_G[member].transitions[turn].ob.to_ints())
    assert isinstance(text, str)
    return text


def test_players_wait_for_each_other_and_keep_their_order() -> None:
    group = play(group_of(Relay, size=2), *[[move(text)] for text in ("a", "b", "c", "d", "e", "f")])
    assert [shown(group, i, 0).count("Heard") for i in range(6)] == [1] * 6
    assert "Heard a b." in shown(group, 2, 0) and "Heard d e." in shown(group, 5, 0)
    assert group.roles_G == [f"Relay/{role}" for role in Relay.roles] * 2
    assert group.get_total_rewards() == [3.0] * 6
    assert [record.content["moves"][1]["said"] for record in group.records] == ["b", "e"]


def test_those_who_move_at_once_see_nothing_of_each_other() -> None:
    group = play(
        group_of(Pennies, game_args={"rounds": 2}), [move("heads"), move("tails")], [move("tails"), move("tails")]
    )
    assert "heads" not in shown(group, 1, 0) and "tails" not in shown(group, 0, 0)
    for member in (0, 1):
        assert "even: heads" in shown(group, member, 1) and "odd: tails" in shown(group, member, 1)
    assert group.get_total_rewards() == [1.0, -1.0]
    assert group.metrics_G[1]["odd/reward"] == -1.0 and "even/reward" not in group.metrics_G[1]


def test_a_role_that_never_comes_to_move_leaves_nothing_to_train_on() -> None:
    group = play(group_of(Relay), [move("stop")], [], [])
    assert group.get_total_rewards() == [1.0] * 3
    assert [trajectory.num_action_tokens > 0 for trajectory in group.trajectories_G] == [True, False, False]
    assert [trajectory.stop_reason for trajectory in group.trajectories_G] == ["completed", "no_turn", "no_turn"]


@pytest.mark.parametrize("bad", [move("edge"), move("heads", stopped=False), move("")])
def test_a_move_that_is_none_is_a_forfeit_by_which_nobody_wins(bad: TokensWithLogprobs) -> None:
    group = play(group_of(Pennies), [move("heads")], [bad])
    assert group.get_total_rewards() == [0.0, -1.0]
    assert (group.metrics_G[0]["even/forfeit"], group.metrics_G[1]["odd/forfeit"]) == (0.0, 1.0)
    assert group.records[0].content["forfeited"] == "odd"


def test_a_limit_on_rollouts_keeps_nobody_waiting() -> None:
    limits = RolloutConfig(limits=RolloutLimits(max_turns=1))
    turns = [move("heads"), move("heads")]
    group = play(group_of(Pennies, game_args={"rounds": 2}), turns, turns, config=limits)
    assert sorted(group.get_total_rewards()) == [-1.0, 0.0]


def test_games_of_a_group_have_one_deal_and_groups_have_their_own() -> None:
    builders = [group_of(KuhnPoker, size=3, number=i) for i in range(8)]

    async def hands(builder: MatchGroupBuilder) -> list[str]:
        return [str(env.role_env.match.game.hands) for env in await builder.make_envs()]

    dealt = [asyncio.run(hands(builder)) for builder in builders]
    assert [len(set(hands)) for hands in dealt] == [1] * 8 and len({hands[0] for hands in dealt}) > 2


def test_an_opponent_leaves_no_data_and_roles_take_turns() -> None:
    for number, role in enumerate(("even", "odd", "even")):
        group = play(group_of(Pennies, size=2, number=number, opponent="heads"), [move("heads")], [move("tails")])
        assert group.roles_G == [f"Pennies/{role}"] * 2
        assert group.get_total_rewards() == ([1.0, -1.0] if role == "even" else [-1.0, 1.0])
        assert group.member_info_G[0]["opponent"] == "heads"


def test_roles_that_are_not_trained_play_and_are_left_out() -> None:
    group = play(group_of(Pennies, trained_roles="odd"), [move("heads")], [move("tails")])
    assert group.is_trained() == [False, True] and len(group.trajectories_G) == 2
    against = [group_of(Pennies, number=i, trained_roles=["odd"], opponent="heads").roles for i in range(3)]
    assert against == [("odd",)] * 3


def test_each_role_has_a_baseline_of_its_own() -> None:
    moves = [[move("heads")], [move("tails")], [move("heads")], [move("heads")], [move("tails")], [move("heads")]]
    group = play(group_of(Pennies, size=3), *moves)
    assert group.get_total_rewards() == [-1, 1, 1, -1, -1, 1]
    (advantages,) = compute_advantages([group], AdvantageConfig(baseline="role_mean"))
    assert advantages.tolist() == pytest.approx([-2 / 3, 2 / 3, 4 / 3, -4 / 3, -2 / 3, 2 / 3])
    group.trained_G = [True, False] * 3
    (advantages,) = compute_advantages([group], AdvantageConfig(baseline="role_mean"))
    assert advantages.tolist() == pytest.approx([-2 / 3, 0, 4 / 3, 0, -2 / 3, 0])


def test_a_failure_replays_the_whole_group_and_tells_those_who_wait() -> None:
    class Broken(Pennies):
        tries: ClassVar[Counter[str]] = Counter()

        def act(self, role, text):
            Broken.tries["act"] += 1
            if Broken.tries["act"] == 1:
                raise OSError("the table fell over")
            super().act(role, text)

    builder = group_of(Broken)
    with pytest.raises(OSError, match="the table fell over"):
        play(builder, [move("heads")], [move("tails")])
    Broken.tries.clear()
    retry = RolloutConfig().with_strategy(RetryOnFailure(max_retries=1))
    group = play(builder, [move("heads")] * 2, [move("tails")] * 2, config=retry)
    assert group.get_total_rewards() == [-1.0, 1.0] and group.rollout_errors[0].error_type == "OSError"


def test_an_opponent_that_fails_ends_the_group() -> None:
    def breaks(game: Any, role: str, rng: random.Random) -> str:
        raise OSError("no hands")

    class Scripted(Relay):
        scripts = {"breaks": breaks}  # noqa: RUF012

    builder = group_of(Scripted, opponent="breaks", trained_roles="two")
    with pytest.raises(OSError, match="no hands"):
        play(builder, [move("a")])
    retry = RolloutConfig().with_strategy(RetryOnFailure(max_retries=1))
    with pytest.raises(GroupFailedError, match="no hands"):
        play(builder, [move("a")], config=retry)


def legal(call: SampleCall) -> list[int]:
    prompt = str(RENDERER.tokenizer.decode(call.prompt))
    options = ("call", "fold") if "call or fold" in prompt else ("check", "bet")
    return reply_ids(RENDERER, f"<SOLUTION>{options[(call.params.seed or 0) % 2]}</SOLUTION>")


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opponent: str, **changes: Any) -> FakeServiceClient:
    service = FakeServiceClient(legal)
    monkeypatch.setattr("tinker_cookbook.backends.create_service_client", lambda *_, **__: service)
    env = load("kuhn_poker", opponent=opponent, past_every=2, num_past=2, test_opponent="start")
    settings: dict[str, Any] = {"group_size": 4, "groups_per_batch": 4, "num_batches": 6, "num_test": 2}
    config = loop.make_config(
        tmp_path, env.dataset_builder(TINY, **settings), max_tokens=16, save_every=2, write_records=True, **changes
    )
    loop.run(config)
    return service


@pytest.mark.slow
def test_self_play_against_past_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = train(tmp_path / "run", monkeypatch, "past", eval_every=3)
    used = Counter(call.weights for call in service.sampled)
    # The policy of each step, and as opponents the start (0) and the checkpoints of steps 2 and 4.
    assert set(used) == {0, 1, 2, 3, 4, 5, 6} and used[0] > used[1]
    rows = loop.rows(tmp_path / "run")
    assert rows[0]["env/all/total_episodes"] == 16 and rows[0]["test/env/all/total_episodes"] == 2
    met = set()
    for path in (tmp_path / "run").glob("match_*.json"):
        (record,) = loop.rows(path.parent, path.name)
        assert record["opponent"] == "past" and len(record["played_by_policy"]) == 1
        assert record["opponent_step"] < record["step"] or record["opponent_step"] == record["step"] == 0
        met.add(record["opponent_step"])
    assert met == {0, 2, 4}


@pytest.mark.slow
def test_a_resumed_run_meets_the_same_opponents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole", monkeypatch, "past")
    service = train(tmp_path / "part", monkeypatch, "past", max_steps=4)
    monkeypatch.setattr("tests.env.test_multi_agent.FakeServiceClient", lambda *_: service)
    train(tmp_path / "part", monkeypatch, "past")
    rows = [[untimed_row(row) for row in loop.rows(tmp_path / name)] for name in ("whole", "part")]
    later = [[row for row in found if row["step"] in (4, 5)] for found in rows]
    assert len(later[0]) == 2 and later[0] == later[1]


def test_which_checkpoints_are_surely_there() -> None:
    assert [past_steps(batch, 2, 0, 3) for batch in (0, 2, 3, 5, 7, 9)] == [
        [0],
        [0],
        [0, 2],
        [0, 2, 4],
        [2, 4, 6],
        [4, 6, 8],
    ]
    assert past_steps(5, 2, 2, 3) == [0, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"opponent": "nobody"}, "opponent='nobody': Pennies has no such script; use self, start, past, heads"),
        ({"trained_roles": "odder"}, "trained_roles='odder': Pennies has even, odd"),
        ({"opponent": "past"}, r"meets the run's checkpoints; set save_every"),
        ({"test_opponent": "past"}, "would differ at each evaluation"),
        ({"opponent_share": 2.0}, "opponent_share=2.0: must be between 0 and 1"),
        ({"game_args": {"turns": 3}}, "unexpected keyword argument 'turns'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        multi_agent_env(Pennies, **settings).dataset_builder(TINY)


@pytest.mark.parametrize("opponent", ["start", "tinker://run/sampler_weights/a"])
def test_opponents_that_need_a_training_run_say_so(opponent: str) -> None:
    builder = group_of(Pennies, opponent=opponent)
    with pytest.raises(ConfigurationError, match="needs a policy that samples"):
        play(builder, [move("heads")])
    policy = TinkerTokenCompleter(FakeServiceClient().new_sampler(0), 4)
    with pytest.raises(ConfigurationError, match=r"training run"):
        asyncio.run(do_group_rollout(builder, policy))


@pytest.mark.parametrize("kind", ["lacks", "rewards", "to_move"])
def test_a_wrong_game_is_named(kind: str) -> None:
    if kind == "lacks":
        with pytest.raises(ConfigurationError, match="game=Half: lacks to_move, observe, act, rewards"):
            multi_agent_env(type("Half", (), {"roles": ("a", "b")}))
        return
    wrong = {"rewards": lambda self: {"even": 1.0}, "to_move": lambda self: ("nobody",)}[kind]
    game = type("Wrong", (Pennies,), {kind: wrong})
    with pytest.raises(DataValidationError, match=f"Wrong.{kind} gave"):
        play(group_of(game), [move("heads")], [move("heads")])


def play_out(game: Any, seed: int = 0, **players: str) -> dict[str, float]:
    rng = random.Random(seed)
    match = Match(game)
    while not match.is_over:
        for role in game.to_move():
            match.submit(role, game.scripts[players[role]](game, role, rng))
    return match.rewards()


def test_kuhn_poker_is_worth_what_it_is_worth() -> None:
    games = [
        play_out(KuhnPoker(random.Random(i)), i + 1, first="equilibrium", second="equilibrium") for i in range(6000)
    ]
    assert all(sum(rewards.values()) == 0 for rewards in games)
    mean = sum(rewards["first"] for rewards in games) / len(games)
    assert mean == pytest.approx(-1 / 18, abs=0.04)


@pytest.mark.parametrize(
    ("hands", "moves", "first"),
    [
        (("king", "jack"), ["check", "check"], 1),
        (("jack", "king"), ["bet", "call"], -2),
        (("jack", "king"), ["bet", "fold"], 1),
        (("queen", "jack"), ["check", "bet", "fold"], -1),
        (("queen", "jack"), ["check", "bet", "call"], 2),
    ],
)
def test_kuhn_poker_pays(hands: tuple[str, str], moves: list[str], first: float) -> None:
    game = KuhnPoker(random.Random(0))
    game.hands = dict(zip(game.roles, hands, strict=True))
    for said_ in moves:
        (role,) = game.to_move()
        assert hands[game.roles.index(role)] in game.observe(role) or len(game.history) == 2
        game.act(role, f"<SOLUTION> {said_} </SOLUTION>")
    assert game.to_move() == () and game.rewards() == {"first": first, "second": -first}


def test_a_shared_sum_pays_both_or_neither() -> None:
    for seed in range(20):
        assert play_out(SharedSum(random.Random(seed)), teller="good", adder="good") == {"teller": 1, "adder": 1}
    wins = [play_out(SharedSum(random.Random(i)), i + 1000, teller="bad", adder="good")["adder"] for i in range(500)]
    assert 0.1 < sum(wins) / 500 < 0.3
    with pytest.raises(ConfigurationError, match="highest=50: must be between 2 and 49"):
        SharedSum(random.Random(0), highest=50)


@pytest.mark.parametrize("said", ["", "-3", "3.0", "100", "٣", "9" * 200_000, "three"])
def test_what_is_no_number_is_a_forfeit(said: str) -> None:
    match = Match(SharedSum(random.Random(0)))
    match.submit("teller", f"<SOLUTION>{said}</SOLUTION>")
    assert match.forfeited == "teller" and match.rewards() == {"teller": -1.0, "adder": 0.0}
