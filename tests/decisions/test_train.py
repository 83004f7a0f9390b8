"""Training decisions: a run learns known probabilities, and finished weights decide as in training."""

import asyncio
import json
from pathlib import Path

import pytest

from recipes import decisions, forecasting
from recipes.debate_judge import decisions as judge_decisions
from tests.debate.arena import make_renderer
from tinker_cookbook import backends
from tinker_cookbook.cli_utils import parse, run_recipe
from tinker_cookbook.debate.judge_training import JudgeDecisionBuilder
from tinker_cookbook.debate.judges import JudgeConfig, check_judge, make_judge
from tinker_cookbook.debate.lm_judge import judge_messages
from tinker_cookbook.debate.saved import labelled, load_debates
from tinker_cookbook.debate.views import Winner
from tinker_cookbook.decisions.data import choice_tokens
from tinker_cookbook.decisions.policy import DecisionPolicy
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message
from tinker_cookbook.utils.files import read_json_object, read_jsonl
from tinker_cookbook.utils.lazy import torch
from tinker_cookbook.weights_config import WeightsConfig

ODDS = {"north": 0.8, "south": 0.3}


def write_rows(path: Path, count: int) -> str:
    """Outcomes in exactly the shares of ODDS."""
    rows = [
        {"question": f"Wind in the {name}?", "choices": ["yes", "no"], "outcome": "yes" if i < share * count else "no"}
        for name, share in ODDS.items()
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def write_known(path: Path) -> str:
    rows = [
        {"question": f"Wind in the {name}?", "choices": ["yes", "no"], "probabilities": [share, 1 - share]}
        for name, share in ODDS.items()
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(("rule", "rate"), [("cross_entropy", 1e-3), ("brier", 3e-4)])
def test_a_run_comes_near_known_probabilities(rule: str, rate: float, tmp_path: Path) -> None:
    """The Brier score is flat where a decision is sure, so that its rate is the lower one: it must not get there."""
    argv = [
        f"dataset={write_rows(tmp_path / 'rows.jsonl', 60)}", f"test_dataset={write_known(tmp_path / 'known.jsonl')}",
        f"rule={rule}", "num_epochs=8", "batch_size=24", f"learning_rate={rate}", "eval_every=100",
        f"log_path={tmp_path / 'run'}",
    ]  # fmt: skip
    run_recipe(decisions.CLIConfig, decisions.main, argv=argv)
    tests = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "test/distance" in row]
    assert tests[-1]["test/distance"] < 0.12
    entropy = -sum(p * torch.log(torch.tensor(p)).item() for share in ODDS.values() for p in (share, 1 - share)) / 2
    assert entropy - 1e-6 < tests[-1]["test/cross_entropy"] < entropy + 0.06, "the entropy is the least there is"


def test_finished_weights_decide_as_the_softmax_of_their_logprobs() -> None:
    renderer = make_renderer("qwen3_instruct")
    messages: list[Message] = [{"role": "user", "content": "Red or dark blue?"}]
    choices = ["red", "dark blue", "red wine"]

    async def main() -> tuple[list[float], list[float]]:
        service = backends.create_service_client(None, None)
        client = await service.create_sampling_client(base_model=backends.shipped.shipped_model("tiny_chat"))
        asked = await DecisionPolicy(client, renderer).probabilities(messages, choices)
        sums = []
        for choice in choices:
            ids, weights = choice_tokens(messages, choice, renderer)
            logprobs = await client.compute_logprobs(ids)
            sums.append(
                sum(lp for lp, weight in zip(logprobs, weights.tolist(), strict=True) if weight and lp is not None)
            )
        return asked, torch.softmax(torch.tensor(sums, dtype=torch.float64), 0).tolist()

    asked, wanted = asyncio.run(main())
    assert asked == pytest.approx(wanted, abs=1e-9) and sum(asked) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_run_of_forecasts_leaves_its_table_and_every_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["max_steps=2", "cutoff=2025-05-01", "eval_every=100", f"log_path={tmp_path / 'run'}"]
    run_recipe(forecasting.CLIConfig, forecasting.main, argv=argv)
    told = capsys.readouterr().out
    assert "Held-out questions" in told and "skill" in told
    rows = read_jsonl(tmp_path / "run" / "forecasts.jsonl")
    assert len(rows) > 50 and min(row["date"] for row in rows) == "2025-05-01"
    scores = read_json_object(tmp_path / "run" / "verification.json", "")
    brier = sum(2 * (row["forecast"] - row["outcome"]) ** 2 for row in rows) / len(rows)
    assert scores["brier"] == pytest.approx(brier)
    last = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "test/brier" in row][-1]
    assert last["test/brier"] == pytest.approx(brier, abs=1e-4), "finished weights forecast what the trainer measured"


class TestJudge:
    def config(self, **keys: object) -> JudgeConfig:
        return JudgeConfig(name="decision", weights=WeightsConfig(base_model="tiny_debate"), **keys)  # type: ignore[arg-type]

    def test_its_shares_are_probabilities_and_the_likeliest_side_wins(self) -> None:
        path = judge_decisions.debates_path(parse(judge_decisions.CLIConfig, []))
        view = labelled(load_debates(path))[0].view

        async def main() -> None:
            judge, soft = [
                await make_judge(one) for one in (self.config(), JudgeConfig(weights=self.config().weights, soft=True))
            ]
            verdict, other = await judge(view), await soft(view)
            assert verdict.shares is not None and sum(verdict.shares) == pytest.approx(1.0)
            likeliest = max(range(2), key=verdict.shares.__getitem__)
            assert verdict.winner is Winner("AB"[likeliest]) and await judge(view) == verdict, "nothing is drawn"
            # judge=lm judge.soft=true leaves the end of the reply out, which is nearly certain in this model.
            assert other.shares == pytest.approx(verdict.shares, abs=0.05)

        asyncio.run(main())

    def test_debates_that_are_decisions(self, tmp_path: Path) -> None:
        cli = parse(judge_decisions.CLIConfig, [f"log_path={tmp_path / 'run'}"])
        builder = judge_decisions.build_config(cli).dataset_builder
        assert isinstance(builder, JudgeDecisionBuilder)
        debate = labelled(load_debates(builder.debates))[0]
        row = builder.decision(debate)
        assert [*row.messages] == judge_messages(debate.view)
        assert row.choices[row.target.index(1.0)] == f"<VERDICT>{debate.label}</VERDICT>" and sum(row.target) == 1

    def test_it_trains_soft_rewards_and_takes_no_votes(self) -> None:
        assert self.config().tells_probabilities and not JudgeConfig().tells_probabilities
        check_judge(self.config())
        with pytest.raises(ConfigurationError, match="every vote of a decision is the same"):
            self.config(votes=3)
        with pytest.raises(ConfigurationError, match="only language models give"):
            self.config(soft=True)
