"""The JSON records of a debate run hold everything that was said and trained on, as text and as ids that match in number."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recipes import debate_rs_grpo
from tests.debate.arena import RIGHT, WRONG, JudgeByIndex, hold, make_renderer, three_turns
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.debate.judges import JudgeConfig, LMJudge, Winner
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl import train
from tinker_cookbook.rl.records import make_records

TRANSITION = (
    "round", "prompt_tokens", "completion_tokens", "completion_logprobs", "prompt_token_count",
    "completion_token_count", "raw_response", "stop_reason",
)  # fmt: skip
DEBATE = ("timestamp", "step", "group_id", "question", "ground_truth", "instance_id", "verdict", "judge_reasoning",
          "agent_a", "agent_b", "metrics", "judge")  # fmt: skip
DATUM = ("input_tokens", "target_tokens", "advantages", "sampling_logprobs", "metadata", "prompt_tokens",
         "completion_tokens", "completion_logprobs", "completion_advantages")  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of the recipe on the tiny model, with a language model as judge."""
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TINKER_LOCAL_HOME", str(folder / "home"))
        cli = debate_rs_grpo.CLIConfig(
            judge=JudgeConfig(name="lm"), debate_train="rejection", num_rollouts=8, num_groups=2, max_steps=1, eval_every=0,
            max_tokens=32, lora_rank=4, log_path=str(folder / "run"),
        )  # fmt: skip
        asyncio.run(train.main(debate_rs_grpo.build_config(cli)))
    return folder / "run"


def load(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob(pattern))]


def test_one_record_per_debate(run_folder: Path) -> None:
    names = sorted(path.stem for path in run_folder.glob("debate_*.json"))
    assert names == [f"debate_000000_g00{group}_0{debate}" for group in (0, 1) for debate in (0, 1)]


def test_a_debate_s_fields(run_folder: Path) -> None:
    for record in load(run_folder, "debate_*.json"):
        assert set(DEBATE) <= record.keys()
        assert record["step"] == 0 and record["verdict"] in [winner.value for winner in Winner]
        assert {"judge_time_s", "task", "judge_retries"} <= record["metrics"].keys()
        assert record["metrics"]["task"] == "qa" and record["metrics"]["judge_time_s"] > 0
        for seat in ("agent_a", "agent_b"):
            agent = record[seat]
            assert {"frozen_solution", "r1", "r2", "r3", "metrics", "transitions"} <= agent.keys()
            assert {"task_reward", "task_reward_metrics", "debate/won"} <= agent["metrics"].keys()
            assert agent["metrics"]["debate/won"] == float(record["verdict"] == seat[-1].upper())


def test_tokens_logprobs_and_counts_match(run_folder: Path) -> None:
    for record in load(run_folder, "debate_*.json"):
        parts = [transition for seat in ("agent_a", "agent_b") for transition in record[seat]["transitions"]]
        assert [part["round"] for part in parts] == [1, 2, 3] * 2
        assert all(set(TRANSITION) <= part.keys() for part in parts)
        for part in [*parts, record["judge"]]:
            count = part["completion_token_count"]
            assert len(part["completion_tokens"]) == len(part["completion_logprobs"]) == count > 0
            assert len(part["prompt_tokens"]) == part["prompt_token_count"] > 0
        for seat in ("agent_a", "agent_b"):
            prompts = [part["prompt_tokens"] + part["completion_tokens"] for part in record[seat]["transitions"]]
            assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prompts))
            texts = [part["raw_response"] for part in record[seat]["transitions"]]
            assert texts == [record[seat][f"r{i}"] for i in (1, 2, 3)]


def test_a_training_step_s_fields_and_lengths(run_folder: Path) -> None:
    (record,) = load(run_folder, "training_step_0001.json")
    assert record["num_datums"] == len(record["training_data"]) > 0 and record["learning_rate"] == 1e-3
    assert {"loss", "num_tokens", "num_trained_tokens", "metrics"} <= record["results"].keys()
    for datum in record["training_data"]:
        assert set(DATUM) <= datum.keys()
        length = len(datum["input_tokens"])
        for key in ("target_tokens", "advantages", "sampling_logprobs"):
            assert len(datum[key]) == length
        for key in ("completion_logprobs", "completion_advantages", "completion_mask"):
            assert len(datum[key]) == len(datum["completion_tokens"])
        assert datum["prompt_tokens"] + datum["completion_tokens"] == [
            datum["input_tokens"][0],
            *datum["target_tokens"],
        ]
        assert {"reward", "centered_reward", "group_mean", "group_size", "rounds_merged"} <= datum["metadata"].keys()
        assert datum["metadata"]["rounds_merged"] == 3
    trained = sum(advantage != 0 for datum in record["training_data"] for advantage in datum["advantages"])
    assert record["results"]["num_trained_tokens"] == trained
    assert record["results"]["num_tokens"] == sum(len(datum["input_tokens"]) for datum in record["training_data"])


def test_what_was_trained_is_what_the_winners_said(run_folder: Path) -> None:
    debates = load(run_folder, "debate_*.json")
    said = [
        [
            token
            for part in record[f"agent_{record['verdict'].lower()}"]["transitions"]
            for token in part["completion_tokens"]
        ]
        for record in debates
        if record["verdict"] in ("A", "B")
    ]
    (step,) = load(run_folder, "training_step_0001.json")
    trained = [
        [token for token, m in zip(d["completion_tokens"], d["completion_mask"], strict=True) if m == 1]
        for d in step["training_data"]
    ]
    assert trained == said


def test_a_debate_names_its_model_and_settings(run_folder: Path) -> None:
    """A record is read alone, long after the run: it says which policy spoke, and how it was sampled."""
    for record in load(run_folder, "debate_*.json"):
        assert "tiny_chat" in record["model"]
        assert {"num_rounds", "max_tokens_per_turn", "temperature", "learning_rate"} <= record["config"].keys()


def test_a_judge_over_messages_leaves_its_words_too() -> None:
    class Says(MessageCompleter):
        async def __call__(self, messages: list[Message]) -> Message:
            return {"role": "assistant", "content": "Hm. <VERDICT>A</VERDICT>"}

    renderer = make_renderer("qwen3_instruct")
    held = hold(renderer, [three_turns(renderer, proposal) for proposal in (RIGHT, WRONG)], LMJudge(Says()))
    (record,) = held.group.records
    assert record.content["judge"]["raw_response"] == "Hm. <VERDICT>A</VERDICT>"


def test_without_a_language_model_there_is_no_judge_entry() -> None:
    renderer = make_renderer("qwen3_instruct")
    members = [three_turns(renderer, proposal) for proposal in (RIGHT, WRONG)]
    (record,) = make_records(hold(renderer, members, JudgeByIndex((Winner.A,))).group)
    assert record.kind == "debate" and "judge" not in record.content
    assert record.content["agent_a"]["frozen_solution"] == "12" and record.content["ground_truth"] == "12"
