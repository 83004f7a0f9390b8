"""What is counted of debates and their judge: every number of a handful of debates, and what is said of those not held."""

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
from tinker_cookbook.debate.judges import Winner
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.utils.ml_log import PrettyPrintLogger

RENDERER = make_renderer("qwen3_instruct")


@pytest.fixture(scope="module", name="metrics")
def metrics_of_five_debates() -> dict[str, float]:
    confident = f"{RIGHT} <CONFIDENCE>0.5</CONFIDENCE>"
    pairs = [
        (confident, WRONG, Winner.A),
        (WRONG, RIGHT, Winner.A),
        (RIGHT, RIGHT, Winner.B),
        (RIGHT, RIGHT, Winner.TIE),
        ("no idea", RIGHT, Winner.INVALID),
    ]
    members = [three_turns(RENDERER, proposal) for a, b, _ in pairs for proposal in (a, b)]
    group = hold(RENDERER, members, JudgeByIndex(tuple(winner for _, _, winner in pairs))).group
    metrics = compute_trajectory_metrics([group], [["qa"]])
    return {key.removeprefix("env/all/"): value for key, value in metrics.items()}


class TestMetrics:
    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            ("debate/judge_accuracy", 1 / 2),  # debates 0 and 1: decided, and one answer was right
            ("debate/win_if_correct", 2 / 4),  # of the right in decided debates: 0A won, 1B lost, 2A lost, 2B won
            ("debate/win_if_wrong", 1 / 2),  # 0B lost, 1A won
            ("debate/winner_correct", 2 / 3),  # 0A, 1A, 2B
            ("debate/a_wins", 2 / 3),
            ("debate/tie", 1 / 5),
            ("debate/invalid", 1 / 5),
            ("debate/won", 3 / 10),
            ("debate/agreement", 2 / 5),  # debates 2 and 3; no answer agrees with nothing
            ("debate/confidence_parsed", 1 / 10),
            ("debate/judge_retries", 0.0),
            ("correct", 7 / 10),
            ("parsed", 9 / 10),
            ("reward/total", 7 / 10),
            ("trained_fraction", 3 / 10),
            ("turns_per_episode", 3.0),
            ("debate/stopped_r1", 1.0),
        ],
    )
    def test_golden(self, metrics: dict[str, float], key: str, expected: float) -> None:
        assert metrics[key] == pytest.approx(expected)

    def test_lengths_by_outcome_and_round(self) -> None:
        short, long = ([speech(RENDERER, text) for text in (RIGHT, "a", "a")], three_turns(RENDERER, RIGHT, "so so"))
        held = hold(RENDERER, [short, long], JudgeByIndex((Winner.B,)))
        metrics = compute_trajectory_metrics([held.group], [["qa"]])
        lengths = [trajectory.num_action_tokens for trajectory in held.group.trajectories_G]
        assert [metrics["env/all/debate/loser_tokens"], metrics["env/all/debate/winner_tokens"]] == lengths
        per_round = [metrics[f"env/all/debate/tokens_r{r}"] for r in (1, 2, 3)]
        assert per_round == [(len(a.tokens) + len(b.tokens)) / 2 for a, b in zip(short, long, strict=True)]

    def test_the_terminal_shows_how_often_the_judge_was_right(
        self, metrics: dict[str, float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        PrettyPrintLogger().log_metrics({f"env/all/{key}": value for key, value in metrics.items()}, step=0)
        assert "judge=0.5" in capsys.readouterr().out

    def test_a_cut_turn_is_counted(self) -> None:
        members = [three_turns(RENDERER, RIGHT), three_turns(RENDERER, RIGHT, stopped=False)]
        metrics = compute_trajectory_metrics([hold(RENDERER, members, JudgeByIndex((Winner.A,))).group], [["qa"]])
        assert [metrics[f"env/all/debate/stopped_r{r}"] for r in (1, 2, 3)] == [0.5] * 3
