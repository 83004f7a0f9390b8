"""What is counted of debates and their judge: every number of a handful of debates, and what is said of those not held."""

from dataclasses import replace

import pytest

from tests.debate.arena import (
    RIGHT,
    WRONG,
    JudgeByIndex,
    hold,
    make_renderer,
    speech,
    three_turns,
)
from tinker_cookbook.debate.judges import DebateView, Verdict, Winner
from tinker_cookbook.debate.metrics import rate_ranges
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.runs.ml_log import PrettyPrintLogger

RENDERER = make_renderer("qwen3_instruct")


CONFIDENT = "<CONFIDENCE>0.5</CONFIDENCE>"


class RetryingJudge(JudgeByIndex):
    """Asks again once more for each debate of the group."""

    async def __call__(self, view: DebateView) -> Verdict:
        return replace(await super().__call__(view), retries=view.key[-1])


DEBATES = [
    (f"{RIGHT} {CONFIDENT}", WRONG, Winner.A),
    (WRONG, RIGHT, Winner.A),
    (RIGHT, RIGHT, Winner.B),
    (RIGHT, RIGHT, Winner.TIE),
    ("no idea", RIGHT, Winner.INVALID),
    (f"{WRONG} {CONFIDENT}", f"{RIGHT} {CONFIDENT}", Winner.B),
    (RIGHT, WRONG, Winner.TIE),
    (RIGHT, WRONG, Winner.A),
]
"""No two shares of a kind are equal, and none is that of its opposite: what is counted the wrong way round differs."""


def hold_all(task: str = "qa") -> TrajectoryGroup:
    members = [three_turns(RENDERER, proposal) for a, b, _ in DEBATES for proposal in (a, b)]
    return hold(RENDERER, members, RetryingJudge(tuple(winner for _, _, winner in DEBATES)), task=task).group


def averaged(group: TrajectoryGroup) -> dict[str, float]:
    metrics = compute_trajectory_metrics([group], [["qa"]])
    return {key.removeprefix("env/all/"): value for key, value in metrics.items()}


class TestMetrics:
    def test_golden(self) -> None:
        metrics = averaged(hold_all())
        lengths = {
            f"debate/{name}" for name in ("winner_tokens", "loser_tokens", "tokens_r1", "tokens_r2", "tokens_r3")
        }
        expected = {
            "debate/judge_accuracy": 3 / 4,  # of debates 0, 1, 5, 7, decided with one right answer: all but 1
            "debate/win_if_correct": 4 / 6,  # of the right in decided debates: 0A, 2B, 5B, 7A won, 1B, 2A lost
            "debate/win_if_wrong": 1 / 4,  # 1A won, 0B, 5A, 7B lost
            "debate/winner_correct": 4 / 5,  # 0A, 2B, 5B, 7A of these and 1A
            "debate/a_wins": 3 / 5,
            "debate/position_bias": 3 / 5 - 1 / 2,
            "debate/verbosity_bias": 1 - 1 / 2,  # of 0 alone, which A won; elsewhere both say as much
            "debate/judge_accuracy_overall": (1 + 0 + 1 + 1 + 0 + 1 + 0.5 + 1) / 8,
            "debate/judge_accuracy_disagree": (1 + 0 + 0 + 1 + 0.5 + 1) / 6,  # all but 2 and 3, where both are right
            "debate/agent_score_difference": (1 - 1 + 1 + 0 + 1) / 5,  # of 0, 1, 5, 6, 7
            "debate/proposal_accuracy": 10 / 16,
            "debate/survivors": 5,
            "debate/survivor_variance": 4 / 25,  # rewards of the winners: 1, 0, 1, 1, 1
            "debate/tie": 2 / 8,
            "debate/invalid": 1 / 8,
            "debate/won": 5 / 16,
            "debate/malformed": 0.0,
            "debate/agreement": 2 / 8,  # debates 2 and 3; no answer agrees with nothing
            "debate/confidence_parsed": 3 / 16,
            "debate/judge_retries": sum(range(8)) / 8,
            **{f"debate/stopped_r{r}": 1.0 for r in (1, 2, 3)},
        }
        found = {key for key in metrics if key.startswith("debate/")}
        ends = {key for key in found if key.endswith(("_low", "_high"))}
        assert found - ends == expected.keys() | lengths
        assert ends == {f"{key}_{end}" for key in rate_ranges(2).keys() & found for end in ("low", "high")}
        expected |= {"correct": 10 / 16, "parsed": 15 / 16, "reward/total": 10 / 16, "trained_fraction": 5 / 16}
        expected |= {"turns_per_episode": 3.0, "context_overflow": 0.0}
        assert {key: metrics[key] for key in expected} == pytest.approx(expected)

    def test_seat_a_reports_the_debate_and_each_seat_itself(self) -> None:
        of_a, of_b = hold_all().metrics_G[:2]
        itself = {
            "debate/won",
            "debate/malformed",
            "debate/winner_tokens",
            "debate/win_if_correct",
            "debate/winner_correct",
            "debate/proposal_accuracy",
        }
        debate = ("tie", "invalid", "judge_retries", "agreement", "confidence_parsed", "a_wins", "position_bias")
        judged = ("verbosity_bias", "judge_accuracy", "judge_accuracy_overall", "judge_accuracy_disagree")
        group = ("agent_score_difference", "survivors", "survivor_variance")
        assert of_a.keys() == itself | {f"debate/{name}" for name in (*debate, *judged, *group)}
        own = ("won", "malformed", "loser_tokens", "win_if_wrong", "proposal_accuracy")
        assert of_b.keys() == {f"debate/{name}" for name in own}

    def test_a_task_without_right_and_wrong_has_no_metrics_of_it(self) -> None:
        metrics = averaged(hold_all("summary"))
        of_right = {f"debate/{name}" for name in ("judge_accuracy", "win_if_correct", "win_if_wrong", "winner_correct")}
        assert not of_right & metrics.keys() and metrics["debate/a_wins"] == 3 / 5

    def test_two_that_answer_nothing_do_not_agree(self) -> None:
        members = [three_turns(RENDERER, "no idea") for _ in range(2)]
        assert averaged(hold(RENDERER, members, JudgeByIndex((Winner.A,))).group)["debate/agreement"] == 0.0

    def test_lengths_by_outcome_and_round(self) -> None:
        short, long = ([speech(RENDERER, text) for text in (RIGHT, "a", "a")], three_turns(RENDERER, RIGHT, "so so"))
        held = hold(RENDERER, [short, long], JudgeByIndex((Winner.B,)))
        metrics = compute_trajectory_metrics([held.group], [["qa"]])
        lengths = [trajectory.num_action_tokens for trajectory in held.group.trajectories_G]
        assert [metrics["env/all/debate/loser_tokens"], metrics["env/all/debate/winner_tokens"]] == lengths
        per_round = [metrics[f"env/all/debate/tokens_r{r}"] for r in (1, 2, 3)]
        assert per_round == [(len(a.tokens) + len(b.tokens)) / 2 for a, b in zip(short, long, strict=True)]

    def test_the_terminal_shows_how_often_the_judge_was_right(self, capsys: pytest.CaptureFixture[str]) -> None:
        PrettyPrintLogger().log_metrics(
            {f"env/all/{key}": value for key, value in averaged(hold_all()).items()}, step=0
        )
        assert "judge=0.75" in capsys.readouterr().out

    def test_a_cut_turn_is_counted_in_its_round(self) -> None:
        cut_in_round_2 = [speech(RENDERER, text, stopped=text != "a") for text in (RIGHT, "a", "b")]
        members = [cut_in_round_2, *(three_turns(RENDERER, RIGHT) for _ in range(3))]
        held = hold(RENDERER, members, JudgeByIndex((Winner.A, Winner.A)))
        metrics = compute_trajectory_metrics([held.group], [["qa"]])
        assert [metrics[f"env/all/debate/stopped_r{r}"] for r in (1, 2, 3)] == [1.0, 0.75, 1.0]
