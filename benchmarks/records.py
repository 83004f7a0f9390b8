"""Cost of the records of a large step: megabytes on disk, and seconds of the loop's time.

    python -m benchmarks.records
    python -m benchmarks.records groups=32 members=8 tokens=500

The step has groups x members rollouts of `tokens` tokens each after a prompt of 100, all of which are trained on. Ids are uniform
over a large vocabulary, logprobs have random last bits, and the trainer's differ from the sampler's, so that nothing compresses
better than in a real run.
"""

import json
import tempfile
import time
from pathlib import Path

import chz
import numpy as np
import tinker
import torch

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.records import RecordWriter, write_step_records
from tinker_cookbook.rl.rollout_files import StepRollouts
from tinker_cookbook.rl.types import Record, RecordedMember, Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.stores.rollouts import FILE_NAME
from tinker_cookbook.stores.training_store import TrainingRunStore

PROMPT, VOCABULARY = 100, 150_000


@chz.chz(typecheck=True)
class RecordsConfig:
    """Keys of `python -m benchmarks.records`."""

    groups: int = chz.field(default=128, doc="groups of the step", validator=chz.validators.gt(0))
    members: int = chz.field(default=16, doc="rollouts of a group", validator=chz.validators.gt(0))
    tokens: int = chz.field(default=1000, doc="sampled tokens of a rollout", validator=chz.validators.gt(0))
    num_groups_to_log: int = chz.field(default=4, doc="groups with separate JSON files")
    seed: int = chz.field(default=0, doc="seed of ids and logprobs")
    output: str | None = chz.field(default=None, doc="JSON file for the result; default: none")


def make_step(config: RecordsConfig) -> StepRollouts:
    """A step in which every rollout is trained on."""
    rng = np.random.default_rng(config.seed)
    groups: list[TrajectoryGroup] = []
    for _ in range(config.groups):
        prompt = tinker.ModelInput.from_ints(rng.integers(0, VOCABULARY, PROMPT).tolist())
        transitions = [_reply(prompt, config.tokens, rng) for _ in range(config.members)]
        rewards = rng.normal(size=config.members).tolist()
        members = [Trajectory([transition], tinker.ModelInput.empty(), "completed") for transition in transitions]
        info = [{"question": "What is 3 + 4?", "instance_id": "sum-1", "ground_truth": "7"}] * config.members
        text = "word " * (config.tokens * 4 // 5)
        records = [Record("baseline", {}, [RecordedMember(i, "reply", [text])]) for i in range(config.members)]
        metrics = [{"correct": 1.0, "parsed": 1.0} for _ in transitions]
        groups.append(TrajectoryGroup(members, rewards, metrics, tags=["qa"], records=records, member_info_G=info))
    advantages_P = [torch.tensor(group.final_rewards_G) for group in groups]
    data_D, metadata_D = assemble_training_data(groups, advantages_P)
    trainer_D = []
    for datum in data_D:
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
        trainer_D.append((sampled + rng.normal(0, 1e-3, len(sampled))).astype(np.float32))
    about = {"step": 0, "model": "benchmark", "temperature": 1.0, "learning_rate": 4e-5}
    advantages = [advantages_G.tolist() for advantages_G in advantages_P]
    return StepRollouts(groups, [0] * len(groups), advantages, data_D, metadata_D, trainer_D, about)


def _reply(prompt: tinker.ModelInput, tokens: int, rng: np.random.Generator) -> Transition:
    logprobs = (-rng.exponential(0.5, tokens)).astype(np.float32).tolist()
    reply = TokensWithLogprobs(rng.integers(0, VOCABULARY, tokens).tolist(), logprobs, "stop")
    return Transition(prompt, reply, 0.0, True, {"correct": 1.0})


def measure(config: RecordsConfig) -> dict[str, float]:
    """Megabytes of the step's folder, seconds of the loop's time, and seconds until everything is on disk.

    The loop waits while the step is handed over. After that the writer's thread competes with it for the GIL: the loop loses at
    most the CPU time of that thread, which compresses and waits for the disk without holding the GIL.
    """
    step, used = make_step(config), 0.0

    def write() -> None:
        nonlocal used
        start = time.thread_time()
        write_step_records(TrainingRunStore.in_folder(folder), step, {}, config.num_groups_to_log)
        used = time.thread_time() - start

    with tempfile.TemporaryDirectory() as folder:
        writer, begun = RecordWriter(), time.perf_counter()
        writer.submit(write)
        handed_over = time.perf_counter() - begun
        writer.wait()
        on_disk = time.perf_counter() - begun
        writer.close()
        sizes = {path.name: path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}
    total = sum(sizes.values())
    return {
        "megabytes": total / 1e6,
        "megabytes_of_all_rollouts": sizes[FILE_NAME] / 1e6,
        "bytes_per_sampled_token": total / (config.groups * config.members * config.tokens),
        "loop_seconds_at_most": handed_over + used,
        "seconds_until_on_disk": on_disk,
    }


async def main(config: RecordsConfig) -> None:
    """Measure, print, and write the result."""
    result = measure(config)
    text = json.dumps({"config": chz.asdict(config), **result}, indent=2)
    print(text)
    if config.output is not None:
        Path(config.output).write_text(text + "\n")


if __name__ == "__main__":
    run_recipe(RecordsConfig, main)
