"""Prompts from files, and the dataset that is made of them."""

import asyncio
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.distillation.datasets import PromptOnlyDatasetBuilder, load_prompts
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.types import ActionExtra, EnvGroupBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = str(EXAMPLE_DATA / "tiny_chat")


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class TestLoadPrompts:
    def test_lines_of_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("  one \n\nzwei\u2028drei\n", encoding="utf-8")
        assert load_prompts(str(tmp_path / "a.txt")) == [[say("user", "one")], [say("user", "zwei\u2028drei")]]

    def test_questions_and_prompts(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", {"question": "1 + 1?", "answer": "2"}, {"prompt": "Hi"})
        assert load_prompts(path) == [[say("user", "1 + 1?")], [say("user", "Hi")]]

    def test_conversations_up_to_their_last_question(self, tmp_path: Path) -> None:
        turns = [say("system", "s"), say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
        assert load_prompts(write(tmp_path / "a.jsonl", {"messages": turns})) == [turns[:4]]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (
                {"text": "x"},
                r"a.jsonl:1: has no 'prompt' \(it has \['text'\]\); expected an object with one of messages",
            ),
            ({"messages": [say("assistant", "x")]}, "a.jsonl:1: the conversation has no user message"),
        ],
    )
    def test_rows_without_a_prompt(self, tmp_path: Path, row: object, message: str) -> None:
        with pytest.raises(DataFormatError, match=message):
            load_prompts(write(tmp_path / "a.jsonl", row))

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="no such file"):
            load_prompts(str(tmp_path / "missing.txt"))
        (tmp_path / "blank.txt").write_text("\n \n")
        with pytest.raises(DataFormatError, match="no line of text"):
            load_prompts(str(tmp_path / "blank.txt"))
        (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
        with pytest.raises(DataFormatError, match="not UTF-8"):
            load_prompts(str(tmp_path / "latin.txt"))
        with pytest.raises(ConfigurationError, match="dataset_name='sums' is unknown"):
            load_prompts("sums")


def builder(tmp_path: Path, count: int = 10, **settings: object) -> PromptOnlyDatasetBuilder:
    path = tmp_path / "prompts.txt"
    path.write_text("".join("word " * (i + 1) + "\n" for i in range(count)))
    known: dict = {"groups_per_batch": 3, "group_size": 2, "renderer_name": "qwen3_instruct"}
    return PromptOnlyDatasetBuilder(dataset_name=str(path), model_name_for_tokenizer=MODEL, **{**known, **settings})


def first_prompts(groups: Sequence[EnvGroupBuilder]) -> list[str]:
    tokenizer = get_tokenizer(MODEL)

    async def read(group: EnvGroupBuilder) -> str:
        envs = await group.make_envs()
        found = await envs[0].initial_observation()
        assert isinstance(found, tuple)
        return str(tokenizer.decode(found[0].to_ints()))

    return [asyncio.run(read(group)) for group in groups]


class TestPromptOnlyDatasetBuilder:
    def test_every_prompt_trains_once_an_epoch_and_test_prompts_never(self, tmp_path: Path) -> None:
        train, test = asyncio.run(builder(tmp_path, test_size=3, num_epochs=2)())
        assert test is not None and len(train) == 5
        groups = [group for i in range(len(train)) for group in train.get_batch(i)]
        prompts = first_prompts(groups)
        held_out = first_prompts(test.get_batch(0))
        assert len(set(prompts[:7])) == 7 and sorted(prompts[:7]) == sorted(prompts[7:])
        assert prompts[:7] != prompts[7:]
        assert len(held_out) == 3 and not set(held_out) & set(prompts)
        pickle.loads(pickle.dumps(groups[0]))

    def test_an_episode_is_one_reply_without_reward(self, tmp_path: Path) -> None:
        train, _ = asyncio.run(builder(tmp_path)())

        async def play() -> None:
            envs = await train.get_batch(0)[0].make_envs()
            assert len(envs) == 2
            extras: list[tuple[ActionExtra, float]] = [({"stop_reason": "stop"}, 1.0), ({"stop_reason": "length"}, 0.0)]
            for extra, ended in extras:
                result = await envs[0].step([1], extra=extra)
                assert (result.reward, result.episode_done, result.metrics) == (0.0, True, {"ended": ended})

        asyncio.run(play())

    def test_the_system_prompt_comes_first(self, tmp_path: Path) -> None:
        train, _ = asyncio.run(builder(tmp_path, count=1, convo_prefix=[{"role": "system", "content": "Be brief."}])())
        renderer = get_renderer("qwen3_instruct", get_tokenizer(MODEL), model_name=MODEL)
        expected = renderer.build_generation_prompt([say("system", "Be brief."), say("user", "word")])  # pyright: ignore
        assert first_prompts(train.get_batch(0)) == [get_tokenizer(MODEL).decode(expected.to_ints())]

    def test_examples_come_before_the_prompt(self, tmp_path: Path) -> None:
        examples = [say("user", "1?"), say("assistant", "one")]
        before = [{"role": "system", "content": "Be brief."}, *examples]
        train, _ = asyncio.run(builder(tmp_path, count=1, convo_prefix=before)())
        (text,) = first_prompts(train.get_batch(0))
        places = [text.index(part) for part in ("Be brief.", "1?", "one<|im_end|>", "word")]
        assert places == sorted(places)

    def test_long_prompts_are_left_out_and_counted(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        everything, _ = asyncio.run(builder(tmp_path)())
        shortest = min(asyncio.run(_lengths(everything)))
        train, _ = asyncio.run(builder(tmp_path, max_prompt_tokens=shortest)())
        assert [len(train.get_batch(i)) for i in range(len(train))] == [1]
        assert "9 of 10 prompts are longer than max_prompt_tokens" in caplog.text
        with pytest.raises(ConfigurationError, match=f"the shortest has {shortest} tokens"):
            asyncio.run(builder(tmp_path, max_prompt_tokens=shortest - 1)())

    @pytest.mark.parametrize(("limit", "kept"), [({}, [1024]), ({"max_prompt_tokens": None}, [1024, 1025])])
    def test_prompts_of_up_to_1024_tokens_unless_told_otherwise(
        self, tmp_path: Path, limit: dict[str, Any], kept: list[int]
    ) -> None:
        renderer = get_renderer("qwen3_instruct", get_tokenizer(MODEL))

        def length(text: str) -> int:
            return renderer.build_generation_prompt([{"role": "user", "content": text}]).length

        texts = ["1" * (1 + tokens - length("1")) for tokens in (1024, 1025)]  # a token for each digit
        assert [length(text) for text in texts] == [1024, 1025]
        path = write(tmp_path / "long.jsonl", *({"prompt": text} for text in texts))
        made = PromptOnlyDatasetBuilder(
            dataset_name=path,
            groups_per_batch=2,
            group_size=1,
            model_name_for_tokenizer=MODEL,
            renderer_name="qwen3_instruct",
            **limit,
        )
        train, _ = asyncio.run(made())
        assert sorted(asyncio.run(_lengths(train))) == kept

    def test_bad_sizes(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="test_size=10 leaves nothing to train on"):
            asyncio.run(builder(tmp_path, test_size=10)())
        with pytest.raises(ConfigurationError, match="needs test_size"):
            builder(tmp_path, test_dataset_name="deepmath")


async def _lengths(dataset) -> list[int]:
    lengths = []
    for i in range(len(dataset)):
        for group in dataset.get_batch(i):
            found = await (await group.make_envs())[0].initial_observation()
            lengths.append(found[0].length)
    return lengths
