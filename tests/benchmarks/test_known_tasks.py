"""The comparison of known tasks with TRL, without TRL: episodes in lockstep, what is handed over, and the table."""

import asyncio
import importlib.util
from typing import Any

import pandas
import pytest
import tinker

from benchmarks import known_tasks
from benchmarks.errors import BenchmarkError
from benchmarks.known_tasks import KnownTasksConfig
from benchmarks.peers.trl_episodes import Lockstep, held_out, play, sequence, total, until
from recipes.anchors import AlphabetSort
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.env import multi_turn_env
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer


class Sorter:
    """Sorts the words that it is told, but for the very first prompt, where it says one word."""

    def __init__(self) -> None:
        self.tokenizer: Any = get_tokenizer(shipped_model("tiny_chat"))
        self.batches: list[int] = []

    def __call__(self, prompts: list[list[int]], stop: list[int]) -> list[list[int]]:
        self.batches.append(len(prompts))
        return [[*self.tokenizer.encode(self._answer(prompt, place)), stop[0]] for place, prompt in enumerate(prompts)]

    def _answer(self, prompt: list[int], place: int) -> str:
        lines = self.tokenizer.decode(prompt).replace("<", "\n").splitlines()
        told = [line.split(": ")[1] for line in lines if line.startswith(("Sort: ", "And: "))]
        return " ".join(sorted(" ".join(told).split())) if place or len(self.batches) > 1 else "house"


async def groups() -> list[EnvGroupBuilder]:
    builder = multi_turn_env(AlphabetSort).dataset_builder(
        shipped_model("tiny_chat"), groups_per_batch=2, group_size=3, num_batches=1, seed=5
    )
    return list((await builder())[0].get_batch(0))


def test_episodes_of_several_turns_are_batches_and_become_one_sequence_each() -> None:
    async def main() -> None:
        envs = [env for group in await groups() for env in await group.make_envs()]
        sorter = Sorter()
        trajectories = await play(envs, sorter)
        assert sorter.batches == [6, 6, 6]
        assert [total(trajectory) for trajectory in trajectories[1:]] == pytest.approx([1.0] * 5)
        assert total(trajectories[0]) < 0.9
        prompt, rest, mask = sequence(trajectories[1])
        first, *_, last = trajectories[1].transitions
        assert prompt == first.ob.to_ints() and prompt + rest == last.ob.to_ints() + last.ac.tokens
        sampled = [token for token, kept in zip(rest, mask, strict=True) if kept]
        assert sampled == [token for turn in trajectories[1].transitions for token in turn.ac.tokens]
        assert 0 in mask  # what the environment said between the turns
        assert (await held_out([await groups()], Sorter()))["correct"] == pytest.approx(5 / 6)

    asyncio.run(main())


def test_who_has_ended_is_not_waited_for() -> None:
    async def main() -> None:
        asked: list[list[list[int]]] = []

        def generate(prompts: list[list[int]], stop: list[int]) -> list[list[int]]:
            asked.append(prompts)
            return [[*prompt, stop[0]] if prompt[0] < 3 else prompt for prompt in prompts]

        policy = Lockstep(generate, 3)

        async def ask(*tokens: int):
            return await policy(tinker.ModelInput.from_ints(list(tokens)), [9])

        async def leave() -> None:
            policy.ended()

        ended, _, cut = await asyncio.gather(ask(1), leave(), ask(3))
        assert asked == [[[1], [3]]]
        assert (ended.tokens, ended.stop_reason) == ([1, 9], "stop") and cut.stop_reason == "length"
        with pytest.raises(BenchmarkError, match="stop tokens here, not texts"):
            await policy(tinker.ModelInput.from_ints([1]), ["end"])

    asyncio.run(main())


def test_a_reply_ends_with_its_first_stop_token() -> None:
    assert until([4, 7, 5, 7], [7, 8]) == [4, 7] and until([4, 5], [7]) == [4, 5]


def test_the_table_sets_both_beside_each_other_seed_by_seed() -> None:
    config = KnownTasksConfig(tasks=("arithmetic",), seeds=(0, 1), quick=True)
    runs = pandas.DataFrame([
        {"part": "arithmetic", "trainer": trainer, "seed": seed, "before": 0.4, "after": after + 0.1 * seed,
         "rise": after + 0.1 * seed - 0.4, "right_before": 0.4, "right_after": after + 0.1 * seed}
        for trainer, after in (("this library", 0.9), ("TRL", 0.8)) for seed in (0, 1)
    ])  # fmt: skip
    ours, trl, apart = known_tasks.table(config, runs).rows
    assert ours[:3] == ["arithmetic", "this library", "0.40 [0.40, 0.40]"] and trl[1] == "TRL"
    assert ours[3].startswith("0.95 [") and trl[3].startswith("0.85 [")
    assert apart[1:4] == ["difference", "0.00 [0.00, 0.00]", "0.10 [0.10, 0.10]"]


def test_without_trl_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"trl: not installed \(pip install trl\)"):
        asyncio.run(known_tasks.main(KnownTasksConfig()))


def test_a_task_whose_groups_are_replaced_is_refused() -> None:
    assert KnownTasksConfig().tasks == ("reverse_text", "alphabet_sort", "wordle", "arithmetic")
    with pytest.raises(ConfigurationError, match="tasks=arithmetic_99: TRL cannot train it"):
        KnownTasksConfig(tasks=("arithmetic_99",))
