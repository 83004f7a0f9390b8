"""TRL's GRPOTrainer on this library's groups, with their prompts, environments and rewards, of one or several turns.

transformers' `generate` samples all episodes of a batch in lockstep; TRL gets token ids with a mask of the sampled ones.
Advantages, loss, gradients and steps are TRL's.
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import tinker
import torch

from benchmarks.errors import BenchmarkError
from benchmarks.peers.trl_learning import EPSILON, PLAIN
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Trajectory

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, stop tokens) -> a reply to each, up to and including its stop token."""

EPISODE_REWARD = "episode_reward"


@dataclass(frozen=True)
class Settings:
    """Settings of both trainers."""

    groups_per_batch: int
    group_size: int
    learning_rate: float
    max_tokens: int
    """limit of a reply"""
    seed: int


class Lockstep(TokenCompleter):
    """Samples when all unfinished episodes have made a request, so that each turn is one batch. `episodes`: their number."""

    def __init__(self, generate: Generate, episodes: int):
        self._generate, self._unfinished = generate, episodes
        self._requests: list[tuple[list[int], list[int], asyncio.Future[list[int]]]] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        tokens = [token for token in stop if isinstance(token, int)]
        if len(tokens) < len(stop):
            raise BenchmarkError(f"stop={stop}: transformers' generate takes stop tokens here, not texts")
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._requests.append((model_input.to_ints(), tokens, answer))
        self._answer()
        reply = await answer
        stopped = bool(reply) and reply[-1] in tokens
        # TRL recomputes logprobs.
        return TokensWithLogprobs(reply, [0.0] * len(reply), "stop" if stopped else "length")

    def ended(self) -> None:
        """Report that an episode has ended."""
        self._unfinished -= 1
        self._answer()

    def _answer(self) -> None:
        if not self._requests or len(self._requests) < self._unfinished:
            return
        requests, self._requests = self._requests, []
        replies = self._generate([prompt for prompt, *_ in requests], requests[0][1])
        for (*_, answer), reply in zip(requests, replies, strict=True):
            answer.set_result(reply)


async def play(envs: Sequence[Env], generate: Generate) -> list[Trajectory]:
    """Run an episode in each environment. Returns them in order."""
    policy = Lockstep(generate, len(envs))

    async def one(env: Env) -> Trajectory:
        try:
            return await do_single_rollout(policy, env)
        finally:
            policy.ended()

    return await asyncio.gather(*map(one, envs))


def total(trajectory: Trajectory) -> float:
    """The sum of the rewards of all turns."""
    return sum(turn.reward for turn in trajectory.transitions)


def sequence(trajectory: Trajectory) -> tuple[list[int], list[int], list[int]]:
    """First prompt, all later tokens, and the mask of the sampled ones among these. Raises BenchmarkError for an episode whose
    later prompts do not extend the earlier ones.
    """
    data = trajectory_to_data(trajectory, 1.0)
    if len(data) != 1:
        raise BenchmarkError(f"an episode gives {len(data)} sequences; TRL trains on one")
    tokens = [*data[0].model_input.to_ints(), int(data[0].loss_fn_inputs["target_tokens"].data[-1])]
    mask = [0, *map(int, data[0].loss_fn_inputs["mask"].data)]
    start = mask.index(1)
    return tokens[:start], tokens[start:], mask[start:]


def train_with_trl(
    model: Any, tokenizer: Any, batches: Sequence[Sequence[EnvGroupBuilder]], settings: Settings
) -> list[float]:
    """Train the adapter of a PEFT model on the groups of each batch, in order. Returns the mean reward of each step.

    As in this library's defaults, advantages are rewards minus the group's mean, and all sampled tokens of a batch have the same
    weight. Training is on-policy, with one step per batch. Errors of TRL propagate.
    """
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    builders = [builder for batch in batches for builder in batch]
    generate = generating(model, tokenizer.pad_token_id, settings.max_tokens)

    async def envs_of(prompts: Sequence[str]) -> list[Env]:
        all_envs: list[Env] = []
        for number, members in groupby(prompts):
            envs = await builders[int(number)].make_envs()
            if len(envs) != len(list(members)):
                raise BenchmarkError("TRL's number of generations differs from the size of a group")
            all_envs += envs
        return all_envs

    async def rollouts(prompts: Sequence[str]) -> list[Trajectory]:
        return await play(await envs_of(prompts), generate)

    def roll_out(prompts: Sequence[str], _: Any) -> dict[str, Any]:
        trajectories = asyncio.run(rollouts(prompts))
        prompt_ids, completion_ids, masks = zip(*map(sequence, trajectories), strict=True)
        rewards = [total(trajectory) for trajectory in trajectories]
        columns = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "env_mask": masks}
        return {key: list(value) for key, value in columns.items()} | {EPISODE_REWARD: rewards, "logprobs": None}

    def reward(episode_reward: list[float], **_: Any) -> list[float]:
        return episode_reward

    with tempfile.TemporaryDirectory(prefix="trl-episodes-") as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            args=trl.GRPOConfig(
                **_arguments(settings, len(batches)), output_dir=folder, use_cpu=model.device.type == "cpu"
            ),
            reward_funcs=reward,
            rollout_func=roll_out,
            # A prompt is only the number of its group: the tokens come from the environment.
            train_dataset=datasets.Dataset.from_list([{"prompt": str(number)} for number in range(len(builders))]),
            processing_class=tokenizer,
        )
        trainer.train()
        return [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]


def _arguments(settings: Settings, steps: int) -> dict[str, Any]:
    return {
        **PLAIN,
        "adam_epsilon": EPSILON,
        "max_steps": steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": settings.groups_per_batch * settings.group_size,
        "num_generations": settings.group_size,
        "shuffle_dataset": False,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "log_completions": False,
        "seed": settings.seed,
    }


def generating(model: Any, pad_id: int, max_tokens: int) -> Generate:
    """A function that samples from a model at temperature 1, on a left-padded batch."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], stop: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device
        )
        training = model.training
        model.eval()
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=stop,
            pad_token_id=pad_id,
        )
        model.train(training)
        return [until(row, stop) for row in output[:, longest:].tolist()]

    return generate


def until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    ends = [index for index, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


async def held_out(batches: Sequence[Sequence[EnvGroupBuilder]], generate: Generate) -> dict[str, float]:
    """The mean `reward` and the share `correct` over all groups."""
    envs = [env for batch in batches for builder in batch for env in await builder.make_envs()]
    trajectories = await play(envs, generate)
    correct = [float(trajectory.transitions[-1].metrics["correct"]) for trajectory in trajectories]
    return {"reward": fmean(map(total, trajectories)), "correct": fmean(correct)}
