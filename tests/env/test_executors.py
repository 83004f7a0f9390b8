"""Rewards that ask the model, in the threads and processes of a rollout executor: snapshots travel, training clients do not."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.debate.arena import TINY
from tests.env.test_gradient_intuition import Run
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.env import Rubric, get_env
from tinker_cookbook.env.shipped.model_aware.ghost_trace import listen
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.rollouts import do_batch_rollout, finished_groups, set_rollout_executor
from tinker_cookbook.rl.run_clients import clients_of_run
from tinker_local_backend import ServiceClient

WORDS = ("Apple", "Moon")


async def hear(answer: str, info: dict[str, Any]) -> float:
    """Asks the snapshot, and not about the reply, which an untrained model says in no form."""
    return await listen(info, (1, 2, 3, 4, 5), answer)


def environment(*needs: str) -> Any:
    rows = [{"question": word, "answer": word} for word in WORDS]
    return SimpleNamespace(dataset=rows, rubric=Rubric([hear]), needs=needs)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with ServiceClient(home=tmp_path_factory.mktemp("home")) as service:
        yield Run(service)


def rewards(run: Run, env: Any, executor: Executor | None, **args: Any) -> dict[tuple[int, int], float]:
    """By group and member."""
    training, _ = asyncio.run(get_env(env, args or None).dataset_builder(TINY, groups_per_batch=2, group_size=2)())
    policy = TinkerTokenCompleter(run.snapshot, 4, seed=1)

    async def play() -> Any:
        with clients_of_run(run.service, run.main, TINY, Path("none")):  # type: ignore[arg-type]
            return finished_groups(await do_batch_rollout(training.get_batch(0), policy))

    set_rollout_executor(executor)
    try:
        groups = asyncio.run(play())
    finally:
        set_rollout_executor(None)
    return {(i, j): total for i, group in enumerate(groups) for j, total in enumerate(group.get_total_rewards())}


def check(run: Run, executor: Executor) -> None:
    here = rewards(run, environment("sampling_client"), None)
    assert here.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)} and max(here.values()) < 0
    # What else is scored in the same pass, which depends on timing, changes the last bits: what differs more is another word.
    assert abs(here[0, 0] - here[1, 0]) > 0.1
    assert [here[group, 1] for group in (0, 1)] == pytest.approx([here[group, 0] for group in (0, 1)], abs=1e-4)
    assert rewards(run, environment("sampling_client"), executor) == pytest.approx(here, abs=1e-4)


def test_a_thread_asks_the_snapshot(run: Run) -> None:
    with ThreadPoolExecutor(2) as threads:
        check(run, threads)


@pytest.mark.slow
def test_another_process_asks_the_snapshot_and_is_refused_what_does_not_travel(run: Run) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        check(run, processes)
        with pytest.raises(ConfigurationError, match=r"needs the training_client .*in another process"):
            rewards(run, environment("training_client"), processes)
        with pytest.raises(ConfigurationError, match=r"gradient_intuition needs the training_client .*another process"):
            rewards(run, "gradient_intuition", processes, inner=environment())
