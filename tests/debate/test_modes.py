"""What each mode of training defines, and that a run's records hold it, token by token."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from recipes import debate_rs_grpo
from tests.debate.arena import RIGHT, WRONG, JudgeByIndex, hold, make_renderer, three_turns
from tinker_cookbook import cli_utils
from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.debate.modes import LOSER_WEIGHT, MODES, Mode, get_mode, register_mode
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.rewards import TERMS, DebateReward
from tinker_cookbook.debate.transcript import Transcript, Turn
from tinker_cookbook.debate.views import Seat, Verdict, Winner
from tinker_cookbook.env.task import Score, TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.stores.rollouts import FILE_NAME, read_rollouts
from tinker_cookbook.utils.files import read_jsonl

SMALL = (
    "num_rollouts=16",
    "num_groups=2",
    "num_groups_to_log=2",
    "max_steps=1",
    "eval_every=0",
    "save_every=0",
    "lora_rank=2",
)
Members = list[dict[str, float]]
"""Of one group: win (1, 0; absent where nobody won), task, share."""


def against(values: dict[int, float], zscore: bool = False) -> dict[int, float]:
    mean, deviation = fmean(values.values()), pstdev(values.values())
    return {i: (value - mean) / (deviation or 1.0) if zscore else value - mean for i, value in values.items()}


def signed(member: dict[str, float]) -> float:
    return 2 * member["win"] - 1


def expected(mode: str, groups: list[Members]) -> dict[tuple[int, int], list[float]]:
    """(group, member) -> the sum over all tokens, or over the answer's and over each speech's, of members that train."""
    found: dict[tuple[int, int], list[float]] = {}
    seats = {"A": 0.0, "B": 0.0}
    for g, members in enumerate(groups):
        decided = {i: member for i, member in enumerate(members) if "win" in member}
        winners = {i: member for i, member in decided.items() if member["win"]}
        sums: dict[int, list[float]]
        match mode:
            case "rejection":
                sums = {i: [1.0] for i in winners}
            case "rs_grpo":
                sums = {i: [v] for i, v in against({i: m["task"] for i, m in winners.items()}).items()}
            case "judge":
                sums = {i: [signed(m)] for i, m in decided.items()}
            case "soft_judge":
                sums = {i: [2 * m["share"] - 1] for i, m in decided.items()}
            case "mixed":
                mixed = {i: 0.5 * signed(m) + 0.5 * m["task"] for i, m in decided.items()}
                sums = {i: [v] for i, v in against(mixed).items()}
            case "negatives":
                sums = {i: [1.0 if m["win"] else -LOSER_WEIGHT] for i, m in decided.items()}
            case "solution_argument":
                answers = against({i: m["task"] for i, m in decided.items()}, zscore=True)
                sums = {i: [answers[i], signed(m), signed(m)] for i, m in decided.items()}
            case "spiral":
                sums = {}
                for i, member in decided.items():
                    seat = "AB"[i % 2]
                    seats[seat] = 0.95 * seats[seat] + 0.05 * signed(member)
                    sums[i] = [signed(member) - seats[seat]]
            case _:
                raise AssertionError(f"say what {mode} defines")
        found |= {(g, i): value for i, value in sums.items()}
    return found


def groups_of_records(folder: Path) -> list[Members]:
    """From the debates' own records alone: verdict, and whether the frozen answer is the truth."""
    by_group: dict[int, Members] = defaultdict(list)
    for path in sorted(folder.rglob("debate_*.json")):
        record = json.loads(path.read_text())
        for seat, agent in enumerate(("agent_a", "agent_b")):
            member = {"task": float(record[agent]["frozen_solution"] == record["ground_truth"])}
            if record["verdict"] in ("A", "B"):
                member["win"] = float(record["verdict"] == "AB"[seat])
            if (shares := record.get("judge", {}).get("shares")) is not None:
                member["share"] = shares[seat]
            by_group[record["group_id"]].append(member)
    return [by_group[i] for i in sorted(by_group)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[] if mode == "solution_argument" else pytest.mark.slow) for mode in MODES.names()],
)
def test_advantages_per_token_in_a_run_s_records_sum_to_what_the_mode_defines(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path))
    judge = "judge.votes=3" if mode == "soft_judge" else "judge.votes=1"
    argv = [*SMALL, f"debate_train={mode}", judge, "max_tokens=20", "seed=3", f"log_path={tmp_path / 'run'}"]
    cli = cli_utils.parse(debate_rs_grpo.CLIConfig, argv)
    asyncio.run(debate_rs_grpo.main(cli))
    (file,) = (tmp_path / "run").rglob(FILE_NAME)
    sums: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in read_rollouts(file)[1]:
        advantages = row["advantages"]
        if row["trained"]:
            sums[row["group"], row["member"]].append(0.0 if advantages is None else float(advantages.sum()))
        else:
            assert advantages is None, "a rejected member has data"
        if advantages is not None and len(advantages):
            assert advantages.max() - advantages.min() == pytest.approx(0, abs=1e-7), "tokens of a turn differ"
    groups = groups_of_records(tmp_path / "run")
    defined = expected(mode, groups)
    assert sums.keys() == defined.keys()
    for member, turns in sums.items():
        told = turns if mode == "solution_argument" else [sum(turns)]
        assert told == pytest.approx(defined[member], abs=1e-5), member
    assert any(abs(value) > 0.01 for values in defined.values() for value in values)
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    per_group = [sum(g == index for g, _ in defined) for index in range(len(groups))]
    assert row["env/all/debate/survivors"] == fmean(per_group)


class TestMeansNothing:
    """Said before anything runs."""

    @pytest.mark.parametrize(
        ("mode", "protocol", "judge", "complaint"),
        [
            ("soft_judge", ProtocolConfig(), JudgeConfig(name="mock"), "gives none; use judge=lm judge.soft=True"),
            ("solution_argument", ProtocolConfig(rounds=0), JudgeConfig(name="mock"), "protocol.rounds=0 has none"),
            ("solution_argument", ProtocolConfig(name="proposer_critic"), JudgeConfig(name="mock"), "not every seat"),
            ("solution_argument", ProtocolConfig(answers="assigned"), JudgeConfig(name="mock"), "not every seat"),
        ],
    )
    def test_protocols_that_leave_nothing(
        self, mode: str, protocol: ProtocolConfig, judge: JudgeConfig, complaint: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            get_mode(mode).check(protocol, judge)

    def test_from_the_command_line(self) -> None:
        for argv, complaint in (
            (["debate_train=judge", "advantage.baseline=constant"], "winners and losers would be trained alike"),
            (["debate_train=best"], "debate_train='best' is unknown; use rejection"),
            (["debate_reward=judge:0.5,fame:0.5"], "'fame' is unknown; use judge, soft, win"),
            (["debate_reward=judge:-1"], "must be positive"),
            (["debate_reward=judge:x"], "'x' is not a weight; write judge:0.5"),
            (["debate_reward=judge,judge:2"], "names a term twice"),
            (["debate_train=rejection", "debate_reward=judge"], "gives every survivor the same weight"),
        ):
            cli = cli_utils.parse(debate_rs_grpo.CLIConfig, argv)
            with pytest.raises(ConfigurationError, match=complaint):
                debate_rs_grpo.build_config(cli)


class TestAdvantageOfAMode:
    @pytest.fixture(autouse=True)
    def logs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TINKER_DEBATE_LOG_ROOT", str(tmp_path))

    def advantage(self, *argv: str) -> AdvantageConfig:
        return debate_rs_grpo.build_config(cli_utils.parse(debate_rs_grpo.CLIConfig, list(argv))).advantage

    def test_it_is_the_mode_s_own_key_by_key(self) -> None:
        for name in MODES.names():
            assert self.advantage(f"debate_train={name}", "judge.votes=3") == get_mode(name).advantage
        given = self.advantage("debate_train=judge", "advantage.baseline=role")
        assert (given.baseline, given.scale) == ("role", "sequence")
        assert self.advantage("debate_train=judge", "preset=grpo").baseline == "zscore"
        cli = debate_rs_grpo.CLIConfig(debate_train="judge", preset="grpo")
        assert debate_rs_grpo.build_config(cli).advantage.baseline == "zscore"
        with pytest.raises(ConfigurationError, match="the same weight"):
            self.advantage("debate_train=rejection", "preset=grpo")


class Made:
    """A debate whose texts, scores and verdict are given."""

    def __init__(self, a: list[str], b: list[str], winner: Winner, shares: tuple[float, float] | None = None):
        self.transcript = Transcript(get_task("qa"), TaskItem("i", "What is 7 + 5?", "12"))
        for seat, texts in ((Seat.A, a), (Seat.B, b)):
            self.transcript.turns[seat] = [
                Turn([1], text, text, kind="speech" if i else "answer", round=i, stopped=not text.endswith("..."))
                for i, text in enumerate(texts)
            ]
            self.transcript.scores[seat] = Score(float(texts[0] == RIGHT), {}, texts[0] == RIGHT)
        self.transcript.verdict = Verdict(winner, shares=shares)

    def worth(self, term: str, seat: Seat = Seat.A) -> float:
        return TERMS.resolve(term)(self.transcript, seat)


class TestTerms:
    SPEECHES = ("so it is", "as I said")

    @pytest.mark.parametrize("shares", [None, (0.8, 0.2), (0.3, 0.7)])
    @pytest.mark.parametrize("winner", [Winner.A, Winner.B, Winner.TIE])
    def test_verdicts_are_zero_sum(self, winner: Winner, shares: tuple[float, float] | None) -> None:
        made = Made([RIGHT, *self.SPEECHES], [WRONG, *self.SPEECHES], winner, shares)
        for term in ("judge", "soft"):
            assert made.worth(term, Seat.A) + made.worth(term, Seat.B) == pytest.approx(0)
        assert made.worth("judge") == {"A": 1.0, "B": -1.0, "TIE": 0.0}[winner.value]
        if shares is not None:
            assert made.worth("soft") == pytest.approx(2 * shares[0] - 1)

    def test_task_win_length_and_format(self) -> None:
        made = Made([RIGHT, "one two three", "four ..."], ["no tags", "x " * 500, "y"], Winner.B)
        assert [made.worth("task", seat) for seat in (Seat.A, Seat.B)] == [1.0, 0.0]
        assert [made.worth("win", seat) for seat in (Seat.A, Seat.B)] == [0.0, 1.0]
        assert [made.worth("length", seat) for seat in (Seat.A, Seat.B)] == [-0.05, -1.0]
        assert [made.worth("format", seat) for seat in (Seat.A, Seat.B)] == pytest.approx([-1 / 3, -1 / 3])

    @pytest.mark.parametrize(
        ("speech_", "gives_up"),
        [
            ("You are right, it is 13.", True),
            ("I was wrong.", True),
            ("<SOLUTION>13</SOLUTION>", True),
            ("I agree with the other agent", True),
            ("their answer is correct after all", True),
            ("my answer is right: <SOLUTION>12</SOLUTION>", False),
            ("They say I was wrongly taught.", False),
            ("Are you right?", False),
            ("", False),
        ],
    )
    def test_concession(self, speech_: str, gives_up: bool) -> None:
        made = Made([RIGHT, speech_, "so"], [WRONG, *self.SPEECHES], Winner.A)
        assert made.worth("concession") == -float(gives_up)
        assert made.worth("concession", Seat.B) == 0.0

    def test_a_mixture_is_a_weighted_sum(self) -> None:
        made = Made([RIGHT, "I was wrong.", "so"], [WRONG, *self.SPEECHES], Winner.B)
        mixed = DebateReward.parse("judge:0.5,task:0.25,concession")
        assert mixed(made.transcript, Seat.A) == pytest.approx(-0.5 + 0.25 - 1)

    def test_a_term_of_one_s_own(self, tmp_path: Path) -> None:
        (tmp_path / "my_terms.py").write_text("def two(transcript, seat):\n    return 2.0\n")
        reward = DebateReward.parse(f"judge:0.5,{tmp_path / 'my_terms.py'}:two:3")
        assert reward.names == {"judge", "two"}
        assert reward(Made([RIGHT], [WRONG], Winner.A).transcript, Seat.A) == pytest.approx(6.5)


class TestModes:
    def test_losers_count_half_in_negatives(self) -> None:
        made = Made([RIGHT, "a", "b"], [WRONG, "a", "b"], Winner.A)
        mode = get_mode("negatives")
        assert [sum(mode.turn_rewards(made.transcript, seat)) for seat in (Seat.A, Seat.B)] == [1.0, -LOSER_WEIGHT]

    def test_speeches_and_answers_are_apart(self) -> None:
        made = Made([RIGHT, "a", "b"], [WRONG, "a", "b"], Winner.B)
        mode = get_mode("solution_argument")
        assert mode.turn_rewards(made.transcript, Seat.A) == [1.0, -1.0, -1.0]
        assert get_mode("solution_argument", "task,win").turn_rewards(made.transcript, Seat.A) == [1.0, 0.0, 0.0]

    @pytest.mark.parametrize("name", MODES.names())
    def test_ties_and_invalid_debates_train_nothing(self, name: str) -> None:
        renderer = make_renderer("qwen3_instruct")
        members = [three_turns(renderer, proposal) for proposal in (RIGHT, WRONG, WRONG, RIGHT)]
        held = hold(renderer, members, JudgeByIndex((Winner.TIE, Winner.INVALID)))
        tied = Made([RIGHT, "a", "b"], [WRONG, "a", "b"], Winner.TIE).transcript
        assert not get_mode(name).is_trained(tied, Seat.A) and held.group.is_trained() == [False] * 4
        assert held.group.metrics_G[0]["debate/survivors"] == 0

    def test_one_of_one_s_own(self, tmp_path: Path) -> None:
        own = Mode("bold", "decided", DebateReward.parse("judge,length"), get_mode("judge").advantage)
        register_mode(own)
        try:
            assert get_mode("bold") is own
            with pytest.raises(ConfigurationError, match="is taken"):
                register_mode(own)
        finally:
            MODES.unregister("bold")
        (tmp_path / "my_modes.py").write_text(
            "from tinker_cookbook.debate.modes import Mode, get_mode\n\n"
            'bold = Mode("bold", "winners", get_mode("judge").reward, get_mode("judge").advantage)\nshy = 3\n'
        )
        assert get_mode(f"{tmp_path / 'my_modes.py'}:bold").name == "bold"
        with pytest.raises(ConfigurationError, match="is not a TrainingMode, but int"):
            get_mode(f"{tmp_path / 'my_modes.py'}:shy")


def test_survivors_and_variance_are_reported() -> None:
    renderer = make_renderer("qwen3_instruct")
    members = [three_turns(renderer, proposal) for proposal in (RIGHT, WRONG, WRONG, WRONG, RIGHT, RIGHT)]
    held = hold(renderer, members, JudgeByIndex((Winner.A, Winner.B, Winner.A)))
    first = held.group.metrics_G[0]
    assert (first["debate/survivors"], first["debate/survivor_variance"]) == (3, pytest.approx(2 / 9))
    assert not any("debate/survivors" in metrics for metrics in held.group.metrics_G[1:])
