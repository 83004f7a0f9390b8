"""A task's items as debates: how many and about what, proposals for the test set, and questions that are too long for both."""

import asyncio
import json
from pathlib import Path
from typing import Any

import chz
import pytest

from tests.debate.arena import ITEM, TINY, decode, first_prompt, make_renderer
from tinker_cookbook.debate.dataset import Debates
from tinker_cookbook.debate.env import DebateEnv, DebateGroupBuilder, make_dialogue
from tinker_cookbook.debate.judges import JudgeConfig
from tinker_cookbook.debate.prompts import CONFIDENCE_REQUEST
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.env.single_turn import SingleTurnEnv
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.item_dataset import ItemDataset
from tinker_cookbook.rl.problem_env import OneTurnGroupBuilder
from tinker_cookbook.rl.types import Env, InitialObservationOverflow

RENDERER = make_renderer("qwen3_instruct")


def write_items(path: Path, *questions: str) -> str:
    path.write_text("".join(json.dumps({"question": question, "answer": "12"}) + "\n" for question in questions))
    return str(path)


def make_builder(tmp_path: Path, **changes: Any) -> DatasetBuilder:
    fields: dict[str, Any] = {
        "task": "qa",
        "dataset": write_items(tmp_path / "train.jsonl", *(f"What is {i}?" for i in range(5))),
        "test_dataset": write_items(tmp_path / "test.jsonl", "Who?", "Where?", "When?"),
        "model_name": TINY,
        "renderer_name": "qwen3_instruct",
        "judge": JudgeConfig(name="mock"),
        "groups_per_batch": 2,
        "group_size": 6,
        "num_batches": 4,
        **changes,
    }
    env = Debates(**{name: fields.pop(name) for name in chz.chz_fields(Debates) if name in fields})
    return DatasetBuilder(env=env, **fields)


def built(builder: DatasetBuilder) -> tuple[ItemDataset[Any], ItemDataset[Any]]:
    train, test = asyncio.run(builder())
    assert isinstance(train, ItemDataset) and isinstance(test, ItemDataset)
    return train, test


def debates(dataset: ItemDataset[Any], batch: int) -> list[DebateGroupBuilder]:
    groups = dataset.get_batch(batch)
    found = [group for group in groups if isinstance(group, DebateGroupBuilder)]
    assert len(found) == len(groups)
    return found


def proposals(dataset: ItemDataset[Any]) -> list[OneTurnGroupBuilder]:
    groups = [group for batch in range(len(dataset)) for group in dataset.get_batch(batch)]
    found = [group for group in groups if isinstance(group, OneTurnGroupBuilder)]
    assert len(found) == len(groups)
    return found


def question_of(env: Env) -> str:
    assert isinstance(env, SingleTurnEnv | DebateEnv)
    return (env.item if isinstance(env, SingleTurnEnv) else env.transcript.item).question


def test_a_batch_is_groups_of_debates_with_keys_of_their_own(tmp_path: Path) -> None:
    train, _ = built(make_builder(tmp_path))
    batches = [debates(train, batch) for batch in range(len(train))]
    assert [[group.key for group in groups] for groups in batches] == [[(b, 0), (b, 1)] for b in range(4)]
    assert {group.num_debates for groups in batches for group in groups} == {3}
    asked = [group.item.question for groups in batches for group in groups]
    assert sorted(asked[:5]) == [f"What is {i}?" for i in range(5)]
    again, _ = built(make_builder(tmp_path, seed=1))
    assert [group.item.question for group in debates(again, 0) + debates(again, 1)] != asked[:4]


@pytest.mark.parametrize(("most", "questions"), [(None, ["Who?", "Where?", "When?"]), (2, ["Who?", "Where?"])])
def test_the_test_set_is_one_proposal_per_item(tmp_path: Path, most: int | None, questions: list[str]) -> None:
    _, test = built(make_builder(tmp_path, num_test=most))
    envs = [asyncio.run(group.make_envs()) for group in proposals(test)]
    assert [question_of(env) for group in envs for env in group] == questions and {len(group) for group in envs} == {1}
    ((env,), *_) = envs
    observation = asyncio.run(env.initial_observation())
    assert not isinstance(observation, InitialObservationOverflow)
    assert CONFIDENCE_REQUEST in decode(RENDERER, observation[0].to_ints())


def test_what_is_too_long_to_be_debated_is_asked_neither_in_training_nor_in_the_test(tmp_path: Path) -> None:
    """The same limit for both, or the two would be measured on different questions."""
    dialogue = make_dialogue(get_task("qa"), RENDERER, max_tokens=40, context_window=10_000)
    assert dialogue.max_first_prompt is not None
    window = 10_000 - dialogue.max_first_prompt + len(first_prompt(dialogue))  # ITEM's question just fits
    questions = write_items(tmp_path / "items.jsonl", ITEM.question, "Well, " + ITEM.question)
    train, test = built(
        make_builder(tmp_path, dataset=questions, test_dataset=questions, max_tokens=40, context_window=window)
    )
    for groups in (debates(train, 0), proposals(test)):
        asked = {}
        for group in groups:
            env = asyncio.run(group.make_envs())[0]
            first = asyncio.run(env.initial_observation())
            asked[question_of(env)] = not isinstance(first, InitialObservationOverflow)
        assert asked == {ITEM.question: True, "Well, " + ITEM.question: False}


def test_an_odd_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="group_size=5 is odd, but a debate takes two rollouts"):
        make_builder(tmp_path, group_size=5).check()
