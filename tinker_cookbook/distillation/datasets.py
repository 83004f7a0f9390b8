"""Prompts for on-policy distillation, from files or the hub, and batches that mix several datasets, each with its own
teacher.

The student answers the prompts without a reward: it learns only from the teacher (see `teacher_kl`). Any other
RLDatasetBuilder works too; then the environment's reward and the teacher both count.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz

from tinker_cookbook.data import hub
from tinker_cookbook.data.epochs import HeldOut, hold_out, usual_test_size
from tinker_cookbook.data.hub import TrainSplit
from tinker_cookbook.data.mixing import Mixer, blocks
from tinker_cookbook.data.rows import Row, is_data_file, read_file
from tinker_cookbook.distillation.teachers import TeacherConfig as TeacherConfig
from tinker_cookbook.distillation.teachers import WithTeacher
from tinker_cookbook.exceptions import ConfigurationError, DataFormatError
from tinker_cookbook.field_groups import Epochs, GroupSizes, GroupsPerBatch, PromptLimit, Seeded
from tinker_cookbook.renderers import Content, Message, Renderer
from tinker_cookbook.rl.interleaved import GroupSource
from tinker_cookbook.rl.item_dataset import ItemDataset, refuse_pool
from tinker_cookbook.rl.problem_env import OneTurnEnv, OneTurnGroupBuilder, Reply
from tinker_cookbook.rl.types import EnvGroupBuilder, Metrics, RLData, RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised.conversations import MESSAGES, messages_of_row, shared_system_prompt
from tinker_cookbook.supervised.types import RendererConfig
from tinker_cookbook.utils.fields import REQUIRED, docs

logger = logging.getLogger(__name__)

HUB_PROMPTS = ("deepmath", "tulu3")
"""Short names of datasets on the hub."""

COLUMNS = ("messages", "prompt", "question")
"""Columns that may hold the prompt: a conversation (up to its last user message), or a text."""
_EXPECTED = f"an object with one of {', '.join(COLUMNS)}"


def load_prompts(source: str, split: str = "train") -> list[list[Message]]:
    """Load the prompts of a source in order, each a conversation that ends in a user message.

    Args:
        source: a .txt file (a prompt per line), a .jsonl file (an object per line with one of COLUMNS), deepmath, tulu3, or
            a hub dataset id with one of COLUMNS.
        split: split of a hub dataset.

    Raises:
        ConfigurationError: there is no such source.
        DataFormatError: a row has no prompt; the message names the location.
    """
    path = Path(source).expanduser()
    if path.suffix == ".txt":
        return [[{"role": "user", "content": line}] for line in read_lines(path)]
    if is_data_file(source) or path.is_file():
        return read_file(path, _prompt, _EXPECTED, "dataset_name")
    if (known := hub.find(source, HUB_PROMPTS)) is not None:
        rows = hub.load(known.repository, split, known.config)
        return hub.read_rows(rows, f"{source}[{split}]", _prompt, _EXPECTED)
    raise ConfigurationError(
        f"dataset_name={source!r} is unknown; use a .txt file with a prompt per line, a .jsonl file with one of "
        f"{', '.join(COLUMNS)} per line, {', '.join(HUB_PROMPTS)}, or a Hugging Face dataset id (owner/name)"
    )


def load_deepmath_prompts(split: str = "train") -> list[list[Message]]:
    """The questions of DeepMath-103K (He et al. 2025)."""
    return load_prompts("deepmath", split)


def load_tulu3_prompts(split: str = "train") -> list[list[Message]]:
    """The conversations of the Tulu 3 SFT mixture (Lambert et al. 2024), up to their last user message."""
    return load_prompts("tulu3", split)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank, stripped.

    Raises ConfigurationError without such a file, DataFormatError when it is not UTF-8 or has no line.
    """
    if not path.is_file():
        raise ConfigurationError(f"{str(path)!r}: there is no such file; name a text file with one item per line")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = [line for line in lines if line]
    if not lines:
        raise DataFormatError(f"{path}: the file has no line of text")
    return lines


def _prompt(row: Row) -> list[Message]:
    """The text of a row as a message, or its conversation up to the last user message."""
    if MESSAGES not in row.content:
        return [{"role": "user", "content": row.text(*COLUMNS[1:])}]
    messages = messages_of_row(row.content)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataFormatError("the conversation has no user message")
    return messages[: last + 1]


@chz.chz(typecheck=True)
class DistillationDatasetConfig(RLData, GroupsPerBatch, WithTeacher, groups_per_batch=REQUIRED):
    """A dataset and its teacher."""

    DOCS = docs(
        dataset_builder="makes the groups; its number of groups per batch is ignored",
        groups_per_batch="groups of this dataset in each batch",
    )


class PromptOnlyEnv(OneTurnEnv):
    """A prompt to answer, after `convo_prefix`, with reward 0. Metric: ended, 1 if the reply ended by itself."""

    def __init__(self, prompt: Content, renderer: Renderer, convo_prefix: list[Message] | None = None):
        super().__init__(renderer)
        self._messages: list[Message] = [*(convo_prefix or []), {"role": "user", "content": prompt}]

    def get_messages(self) -> list[Message]:
        return self._messages

    def score_reply(self, reply: Reply) -> tuple[float, Metrics]:
        return 0.0, {"ended": float(reply.stopped)}


class PromptOnlyDataset(ItemDataset[OneTurnGroupBuilder]):
    """Prompts, `groups_per_batch` per batch; the last batch may be smaller.

    Args:
        prompts: conversations that end in a user message.
        num_epochs: passes over the prompts.
        seed: each epoch is shuffled with a seed derived from this one; None: always the given order.
    """

    def __init__(
        self,
        prompts: Sequence[list[Message]],
        renderer: Renderer,
        groups_per_batch: int,
        group_size: int,
        dataset_name: str = "prompts",
        num_epochs: int = 1,
        seed: int | None = None,
    ):
        def make_group(messages: list[Message], key: tuple[int, int]) -> OneTurnGroupBuilder:
            env = partial(PromptOnlyEnv, messages[-1]["content"], renderer, messages[:-1])
            return OneTurnGroupBuilder(env, group_size, dataset_name, record_kind="prompt")

        super().__init__(prompts, make_group, groups_per_batch, len(prompts) * num_epochs, seed)


@chz.chz(typecheck=True)
class PromptOnlyDatasetBuilder(
    TrainSplit,
    HeldOut,
    GroupSizes,
    PromptLimit,
    Epochs,
    Seeded,
    RendererConfig,
    RLDatasetBuilder,
    groups_per_batch=REQUIRED,
    group_size=REQUIRED,
    max_prompt_tokens=1024,
):
    """Prompts from a file or the hub, shuffled once; some may be held out."""

    DOCS = docs(
        test_size="prompts of the test set, held out unless test_dataset_name is given; None: the default number",
        max_prompt_tokens="longer prompts are skipped, and counted in a warning; None: no limit",
    )

    dataset_name: str = chz.field(doc="a .txt or .jsonl file, deepmath, tulu3, or a hub dataset id (see load_prompts)")
    convo_prefix: list[Message] | None = chz.field(
        default=None, doc="messages before every prompt: a system prompt, examples"
    )
    test_dataset_name: str | None = chz.field(default=None, doc="source of the test set; None: the same prompts")

    @chz.validate
    def _check_test(self) -> None:
        if self.test_dataset_name is not None and self.test_size == 0:
            raise ConfigurationError("test_dataset_name needs test_size, the number of its prompts to use")

    @property
    def shared_system_prompt(self) -> str | None:
        return shared_system_prompt([self.convo_prefix]) if self.convo_prefix else None

    async def __call__(self) -> tuple[PromptOnlyDataset, PromptOnlyDataset | None]:
        renderer = self.renderer
        train, test = self._split(renderer)
        training = PromptOnlyDataset(
            train, renderer, self.groups_per_batch, self.group_size, num_epochs=self.num_epochs, seed=self.seed
        )
        return training, PromptOnlyDataset(test, renderer, self.groups_per_batch, 1) if test else None

    def _split(self, renderer: Renderer) -> tuple[list[list[Message]], list[list[Message]]]:
        prompts = self._load_fitting(renderer, self.dataset_name)
        if self.test_dataset_name is not None:
            others = self._load_fitting(renderer, self.test_dataset_name)
            count = usual_test_size(len(others)) if self.test_size is None else min(self.test_size, len(others))
            return prompts, random.Random(self.seed).sample(others, count)
        return hold_out(prompts, self.test_size, self.seed, self.dataset_name)

    def _load_fitting(self, renderer: Renderer, dataset_name: str) -> list[list[Message]]:
        prompts = [[*(self.convo_prefix or []), *messages] for messages in load_prompts(dataset_name, self.split)]
        if self.max_prompt_tokens is None:
            return prompts
        lengths = [renderer.build_generation_prompt(messages).length for messages in prompts]
        if min(lengths) > self.max_prompt_tokens:
            raise ConfigurationError(
                f"max_prompt_tokens={self.max_prompt_tokens} leaves no prompt of {dataset_name}: the shortest has "
                f"{min(lengths)} tokens"
            )
        fitting = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= self.max_prompt_tokens]
        if len(fitting) < len(prompts):
            skipped = len(prompts) - len(fitting)
            logger.warning("%d of %d prompts are longer than max_prompt_tokens: skipped", skipped, len(prompts))
        return fitting


class CompositeDataset(RLDataset):
    """Batches with a fixed number of groups from each of several datasets, in order.

    Batch t has the groups [t n_d, (t + 1) n_d) of dataset d, counted across its batches; shorter datasets repeat until
    the longest ends. Each group records its dataset (`EnvGroupBuilder.of_dataset`).

    Raises ConfigurationError for a dataset without groups.
    """

    def __init__(self, datasets: Sequence[RLDataset], groups_per_batch: Sequence[int]):
        if len(datasets) != len(groups_per_batch) or not datasets:
            raise ConfigurationError(
                f"{len(datasets)} datasets and {len(groups_per_batch)} numbers of groups: give one per dataset, at least one"
            )
        if min(groups_per_batch) < 1:
            raise ConfigurationError(f"groups_per_batch={list(groups_per_batch)}: each must be at least 1")
        for d, dataset in enumerate(datasets):
            refuse_pool(dataset, f"dataset {d}")
        sources = [GroupSource(dataset, f"dataset {d}") for d, dataset in enumerate(datasets)]
        self._mixer, self._size = Mixer(sources, blocks(groups_per_batch)), sum(groups_per_batch)
        pairs = zip(sources, groups_per_batch, strict=True)
        self._num_batches = max(-(-source.count() // number) for source, number in pairs)

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if not 0 <= index < self._num_batches:
            raise IndexError(f"batch {index} of a dataset with {self._num_batches} batches")
        return [group.of_dataset(d) for d, group in self._mixer.get_batch(index, self._size)]

    def __len__(self) -> int:
        return self._num_batches
