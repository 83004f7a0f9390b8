"""The way of an advantage, from the rewards of a group to the datum that the engine trains on: where it stops.

And the way of a recipe's config, from `build_config` to the first batch: which files it enters. Both are those of a step of
`recipes.rl_basic`, whose functions are watched as it runs.
"""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import chz
import numpy as np
import pytest

from recipes import rl_basic
from tests.rl.test_way_of_a_logprob import values_in
from tinker_cookbook.rl.minibatch import Minibatch
from tinker_cookbook.runs.ml_log import TrackerConfig

ROOT = Path(__file__).parents[2]

WAY = {
    "rl/types.py": ["TrajectoryGroup"],
    "rl/train.py": ["Loop"],
    "rl/minibatch.py": ["prepare_minibatch", "Update"],
    "rl/advantages.py": ["compute_advantages", "subtract_baseline"],
    "rl/data_processing.py": ["assemble_training_data", "trajectory_to_data"],
}
"""The stops: functions, and classes any number of whose methods count once. It begins with the rewards of a TrajectoryGroup."""

PREPARE, SUBMIT = "Loop.prepare", "Update.submit"
"""What makes datums of groups, and what submits them to the engine: within these the advantage is followed."""

MOST_STOPS, MOST_ROOMS = 8, 15


class Watch:
    """The numbers that each function had at its end, from rewards to the engine; the files that were given the config."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], list[np.ndarray]] = {}
        self.rooms: set[str] = set()
        self.batch: Minibatch | None = None
        self._inside, self._drawn = False, False

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(ROOT)):
            return
        file, name = str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname
        if not file.startswith(("tinker_cookbook/", "recipes/")):
            return
        if event == "call":
            self._inside |= name in (PREPARE, SUBMIT)
            count = code.co_argcount + code.co_kwonlyargcount
            given = [frame.f_locals.get(argument) for argument in code.co_varnames[:count]]
            if not self._drawn and any(isinstance(one, TrackerConfig) for one in given):
                self.rooms.add(file)
            return
        if self._inside and "/utils/" not in file:
            stop = file.removeprefix("tinker_cookbook/"), name.partition(".")[0]
            held = [*frame.f_locals.values(), result]
            self.numbers.setdefault(stop, []).extend(numbers for one in held for numbers in numbers_in(one))
        self._inside &= name not in (PREPARE, SUBMIT)
        self._drawn |= name == "TrainingBatches.get_batch"
        if name == PREPARE:
            self.batch = result


def numbers_in(held: object) -> Iterable[np.ndarray]:
    if isinstance(held, float):
        yield np.array([held])
    yield from (numbers for _, numbers in values_in(held, depth=4))


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    folder = tmp_path_factory.mktemp("way")
    keys = [
        "max_steps=1",
        "groups_per_batch=2",
        "group_size=3",
        "num_test=2",
        "eval_every=0",
        "max_tokens=8",
        "quiet=true",
    ]
    arguments = [*keys, f"log_path={folder / 'run'}", "num_groups_to_log=0"]
    cli = chz.Blueprint(rl_basic.CLIConfig).make_from_argv(arguments)
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_LOCAL_HOME", str(folder / "home"))
        sys.setprofile(watch)
        try:
            asyncio.run(rl_basic.main(cli))
        finally:
            sys.setprofile(None)
    return watch


def test_an_advantage_stops_at_most_eight_times_on_its_way_to_the_engine(watch: Watch) -> None:
    assert watch.batch is not None and watch.batch.data_D, "the step must train"
    trained = np.concatenate([datum.loss_fn_inputs["advantages"].to_numpy() for datum in watch.batch.data_D])
    advantages = [value for value in np.unique(trained) if value not in (0.0, 1.0, -1.0)]
    assert advantages, "one that no mask and no reward is equal to"
    stops = {
        stop
        for stop, numbers in watch.numbers.items()
        if any(np.isin(np.array(advantages, dtype=np.float32), held.astype(np.float32)).any() for held in numbers)
    }
    written = {(file, name) for file, names in WAY.items() for name in names}
    assert stops | {("rl/types.py", "TrajectoryGroup")} == written
    assert len(written) <= MOST_STOPS


def test_a_config_enters_at_most_fifteen_files_before_the_first_batch(watch: Watch) -> None:
    assert {"recipes/rl_basic.py", "tinker_cookbook/rl/config.py", "tinker_cookbook/rl/train.py"} <= watch.rooms
    assert len(watch.rooms) <= MOST_ROOMS, " ".join(sorted(watch.rooms))
