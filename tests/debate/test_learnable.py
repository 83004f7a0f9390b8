"""What a mode refuses to begin would train nothing, and what it begins trains: each reward, judge and baseline, played."""

import asyncio
import itertools
from functools import cache

import pytest
import tinker

from tests.debate.arena import RIGHT, WRONG
from tests.fakes import said
from tinker_cookbook.debate.judges import JudgeConfig, make_judge
from tinker_cookbook.debate.modes import MODES, get_mode
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.transcript import Transcript, Turn
from tinker_cookbook.debate.views import Seat
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig, Baseline, RoleBaselines, compute_advantages
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.tasks.registry import get_task
from tinker_cookbook.tasks.types import Score, TaskItem

QA = get_task("qa")
ANSWERS = tuple(itertools.product((RIGHT, WRONG), repeat=2)) * 4
"""Of each debate's seats: both may be right or wrong."""
JUDGES = ("mock", "key", "scripted:truth", "scripted:A", "scripted:longer", "scripted:TIE")
REWARDS = ("judge", "win", "task", "soft", "task,judge:0.5")
BASELINES: tuple[Baseline, ...] = ("mean", "zscore", "leave_one_out", "role_mean", "role", "none", "constant")
PROTOCOLS = {"debate": ProtocolConfig(), "direct": ProtocolConfig(name="direct")}


@cache
def judged(protocol: str, judge: JudgeConfig) -> list[Transcript]:
    """Debates with speeches of different lengths, and their verdicts."""

    async def judge_all() -> list[Transcript]:
        decide, found = await make_judge(judge), list[Transcript]()
        for i, texts in enumerate(ANSWERS):
            transcript = Transcript(QA, TaskItem("i", "What is 7 + 5?", "12"), PROTOCOLS[protocol], (0, 0, i))
            for seat, text in zip(transcript.seats, texts, strict=False):
                words = "so " * (1 + (i + i // 4 + seat) % 2)
                speeches = [
                    Turn([1], words, words, kind="speech", round=r + 1) for r in range(len(transcript.slots) - 1)
                ]
                transcript.turns[seat] = [Turn([1], text, text), *speeches]
                transcript.scores[seat] = Score(float(text == RIGHT), {}, text == RIGHT)
            transcript.verdict = await decide(transcript.view())
            found.append(transcript)
        return found

    return asyncio.run(judge_all())


@cache
def played(protocol: str, judge: JudgeConfig, mode: str, reward: str | None = None) -> TrajectoryGroup:
    """The debates with the rewards of a mode."""
    own = get_mode(mode, reward)
    members = [(transcript, seat) for transcript in judged(protocol, judge) for seat in transcript.speakers]
    nothing, said_ = tinker.ModelInput.from_ints([1]), said([1])
    trajectories = [
        Trajectory([Transition(nothing, said_, value, False) for value in own.turn_rewards(*member)], nothing)
        for member in members
    ]
    trained, roles = [own.is_trained(*member) for member in members], [own.role(*member) for member in members]
    return TrajectoryGroup(trajectories, [0.0] * len(members), [{} for _ in members], trained_G=trained, roles_G=roles)


def trains(group: TrajectoryGroup, config: AdvantageConfig) -> bool:
    (found,) = compute_advantages([group], config, RoleBaselines(config.role_decay))
    return bool(found.any())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("judge", JUDGES)
def test_a_mode_is_refused_where_it_would_train_nothing_and_nowhere_else(protocol: str, judge: str) -> None:
    checked = dict[bool, int]({True: 0, False: 0})
    for mode, reward, baseline in itertools.product(("rs_grpo", "judge", "negatives"), REWARDS, BASELINES):
        asked = JudgeConfig(name=judge, votes=3 if reward == "soft" else 1)
        config = AdvantageConfig(baseline=baseline, scale="sequence")
        alike = mode != "rs_grpo" and baseline == "constant"  # losers just as winners
        learns = trains(played(protocol, asked, mode, reward), config) and not alike
        try:
            get_mode(mode, reward).check(PROTOCOLS[protocol], asked, QA, config)
            said_so = True
        except ConfigurationError as error:
            assert "cannot learn" in str(error)
            said_so = False
        assert said_so == learns, (mode, reward, baseline)
        checked[learns] += 1
    assert checked[False] and (checked[True] or judge == "scripted:TIE")


@pytest.mark.parametrize("name", MODES)
def test_without_a_baseline_of_the_user_s_the_mode_s_own_counts(name: str) -> None:
    mode, judge = get_mode(name), JudgeConfig(name="key", votes=3)

    def refusal(advantage: AdvantageConfig | None) -> str | None:
        try:
            mode.check(ProtocolConfig(), judge, QA, advantage)
        except ConfigurationError as error:
            return str(error)
        return None

    assert refusal(None) == refusal(mode.advantage)
    assert (refusal(None) is not None) == (name == "rs_grpo")


def test_a_judge_who_names_a_seat_always_contradicts_itself_in_both_orders() -> None:
    judge = JudgeConfig(name="scripted:A", both_orders=True)
    assert not trains(played("debate", judge, "judge"), AdvantageConfig())
    with pytest.raises(ConfigurationError, match="the two orders never agree"):
        get_mode("judge").check(ProtocolConfig(), judge, QA)
    assert judged("direct", judge)[0].won(Seat.A)
    get_mode("mixed").check(ProtocolConfig(name="direct"), judge, QA)


@pytest.mark.parametrize(
    ("mode", "protocol", "baseline", "debates"),
    [
        ("rs_grpo", "debate", "mean", 1),
        ("rs_grpo", "debate", "role_mean", 1),
        ("judge", "debate", "role_mean", 1),
        ("judge", "direct", "mean", 1),
        ("mixed", "direct", "leave_one_out", 1),
    ],
)
def test_nobody_to_be_compared_with(mode: str, protocol: str, baseline: Baseline, debates: int) -> None:
    config = AdvantageConfig(baseline=baseline)
    with pytest.raises(ConfigurationError, match="with one debate per question"):
        get_mode(mode).check_group(PROTOCOLS[protocol], debates, config)
    get_mode(mode).check_group(PROTOCOLS[protocol], debates + 1, config)
    get_mode(mode).check_group(PROTOCOLS[protocol], debates, AdvantageConfig(baseline="role"))
