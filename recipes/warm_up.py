"""A supervised stage before reinforcement learning, for a model that does not know the format of a game or of tool
calls.

Its training data come from a file, or from a player that is a plain function: it knows the format and plays badly, so
that the policy learns everything else by itself. Its learning rate is a constant of this module; the key learning_rate
only applies to reinforcement learning. The conversations are stored in the run's folder, as warm_up.jsonl next to the
folder warm_up of the supervised run. A model that knows the format does not need it: warm_up_steps=0.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import chz

from recipes.common import RL_RATES, SL_LEARNING_RATE, CommonConfig, GroupKeys
from recipes.rl_common import RLConfig, train_and_show, train_config
from recipes.sl_common import stage_before
from tinker_cookbook.data.epochs import Epochs, ShuffledItems
from tinker_cookbook.env.dataset import DatasetBuilder
from tinker_cookbook.exceptions import CheckpointError, ConfigurationError
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.rl import train
from tinker_cookbook.rl.message_env import MessageEnv
from tinker_cookbook.rl.play_w_env import play_episode
from tinker_cookbook.runs.checkpoints import get_last_checkpoint
from tinker_cookbook.runs.config import RunConfig
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.conversations import read_conversations
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.files import write_jsonl
from tinker_cookbook.utils.seeds import derive_seed

Player = Callable[[list[Message]], Message]
"""The next message of a conversation, given the messages so far."""
WriteConversation = Callable[[Renderer, random.Random], Awaitable[list[Message]]]
"""A conversation to learn from, drawn from a random generator."""

BATCH_SIZE = 16
TINY_STEPS = 40
FORM_STEPS = 56
"""On given conversations, whose format is longer than a move in a game."""
TINY_RATE = 3e-3
"""Higher than otherwise for the shipped model: it has to learn a format from scratch, in few steps."""
GENTLE_RATE = 3e-4
"""For reinforcement learning on the shipped model after it has learnt to copy: at 1e-3 it soon forgets that."""
GENTLE_RATES = RL_RATES._replace(tiny=GENTLE_RATE)


def _not_negative(config: Any, attribute: str) -> None:
    if (steps := getattr(config, attribute)) is not None and steps < 0:
        raise ConfigurationError(f"{attribute.removeprefix('X_')}={steps}: must be 0 (no warm-up) or more")


@chz.chz(typecheck=True)
class WarmUpConfig(GroupKeys, RLConfig):
    """Keys of the recipes with an optional supervised stage."""

    warm_up_steps: int | None = chz.field(
        default=None,
        doc=f"supervised steps, on {BATCH_SIZE} conversations each; default: enough for tiny_chat, 0 for other models and with "
        "load_checkpoint_path",
        validator=_not_negative,
    )


@chz.chz(typecheck=True)
class GameConfig(WarmUpConfig):
    """Keys of the recipes with a game, which writes the conversations of the supervised stage."""

    play: bool = chz.field(default=False, doc="play an episode yourself in the terminal; no model is loaded")


@chz.chz(typecheck=True)
class WarmUpDataConfig(WarmUpConfig):
    """Keys of the recipes whose supervised stage reads its conversations from a file."""

    warm_up_data: str | None = chz.field(
        default=None,
        doc="JSONL file of conversations that show the format of replies, for the supervised stage; None: no stage",
    )
    warm_up_tiny_steps: int = chz.field(
        default=FORM_STEPS,
        doc="the default of warm_up_steps for tiny_chat; other models skip the stage",
        validator=_not_negative,
    )

    @chz.validate
    def _check_warm_up_data(self) -> None:
        if self.warm_up_data is None and self.warm_up_steps:
            raise ConfigurationError(
                f"warm_up_steps={self.warm_up_steps}: there is nothing to learn from; give warm_up_data, a file of conversations"
            )


def warm_up_steps(cli: WarmUpConfig, tiny_steps: int) -> int:
    """The requested number, else `tiny_steps` for the shipped model and 0 for others."""
    if cli.warm_up_steps is not None:
        return cli.warm_up_steps
    return tiny_steps if cli.is_tiny and cli.load_checkpoint_path is None else 0


async def demonstrate(env: MessageEnv, player: Player) -> list[Message]:
    """An episode played by the player, up to its last message."""
    messages, done = await env.initial_observation(), False
    while not done:
        reply = player(messages)
        result = await env.step(reply)
        messages, done = result.next_messages, result.episode_done
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]


async def warm_up(
    cli: WarmUpConfig,
    config: train.Config,
    episodes: DatasetBuilder,
    write: WriteConversation,
    tiny_steps: int = TINY_STEPS,
) -> train.Config:
    """Train on conversations that `write` makes, and return the config of a run that starts from the resulting weights.

    A resumed run does not repeat finished steps.
    """
    steps = warm_up_steps(cli, tiny_steps)
    if steps == 0:
        return config
    renderer = episodes.renderer()
    conversations = []
    for i in range(steps * BATCH_SIZE):
        rng = random.Random(derive_seed(cli.seed, "warm-up", i))
        conversations.append(await write(renderer, rng))
    return await warm_up_on(cli, config, conversations)


def given_conversations(cli: WarmUpDataConfig) -> list[list[Message]]:
    """The conversations of the supervised stage from `warm_up_data`, shuffled, repeated for all steps; empty: no stage.

    Raises ConfigurationError or DataFormatError for a file that does not exist or has other content.
    """
    if cli.warm_up_data is None:
        return []
    rows = read_conversations(cli.warm_up_data)
    epochs = Epochs(ShuffledItems(rows), cli.seed, "warm-up")
    return [epochs.draw(i).messages for i in range(warm_up_steps(cli, cli.warm_up_tiny_steps) * BATCH_SIZE)]


async def warm_up_on(
    cli: CommonConfig, config: train.Config, conversations: Sequence[Sequence[Message]]
) -> train.Config:
    """Train on these conversations, if any, and return the config of a run that starts from the resulting weights."""
    if not conversations:
        return config
    assert cli.renderer_name is not None
    return chz.replace(config, load_checkpoint_path=await train_first(cli, config, conversations, cli.renderer_name))


async def train_first(
    cli: CommonConfig, config: RunConfig, conversations: Sequence[Sequence[Message]], renderer_name: str
) -> str:
    """One supervised pass over conversations, in a subfolder of the run's; returns the path of the final state."""
    folder = Path(config.log_path)
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "warm_up.jsonl", [{"messages": conversation} for conversation in conversations])
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=config.model_name,
        renderer_name=renderer_name,
        max_length=None,
        batch_size=BATCH_SIZE,
    )
    builder = FromConversationFileBuilder(common_config=common, file_path=str(folder / "warm_up.jsonl"))
    rate = TINY_RATE if cli.is_tiny else SL_LEARNING_RATE
    await supervised_train.main(stage_before(cli, config, "warm_up", builder, renderer_name=None, learning_rate=rate))
    record = get_last_checkpoint(folder / "warm_up")
    if record is None or record.state_path is None:
        raise CheckpointError(
            f"the warm-up left no checkpoint in {folder / 'warm_up'}; delete the folder and start over"
        )
    return record.state_path


async def play_or_train(
    cli: GameConfig,
    recipe: str,
    episodes: DatasetBuilder,
    write: WriteConversation,
    metrics: Sequence[str],
    folder: Sequence[str] = (),
    tiny_steps: int = TINY_STEPS,
) -> RunSummary | None:
    """Run a recipe with episodes from resolved keys: a game in the terminal (play), or warm-up, training and its table.

    Args:
        folder: the words of the run folder's name, before the group sizes.
        metrics: the metrics of the table.
    """
    if cli.play:
        await play_episode(episodes, get_tokenizer(episodes.model_name))
        return None
    size = f"{episodes.groups_per_batch}x{episodes.group_size}"
    config = train_config(cli, recipe, episodes, [*folder, size])
    return await train_and_show(await warm_up(cli, config, episodes, write, tiny_steps), metrics)
