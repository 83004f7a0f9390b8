"""A custom supervised dataset: conversations that count on from a number, generated on the fly.

A SupervisedDataset returns batches of datums by index; its builder is plain configuration. Run from the repository's root:

    python -m examples.custom_dataset
"""

import asyncio
import random
import sys
import tempfile

import chz
import tinker

from tinker_cookbook.backends import check_command
from tinker_cookbook.renderers import Message, TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
)

MODEL, RENDERER = "example_data/tiny_chat", "qwen3_instruct"


class CountingDataset(SupervisedDataset):
    """Counting on from a number. Batch i of an epoch depends only on the epoch's seed and on i, so a run can resume."""

    def __init__(self, builder: "CountingDatasetBuilder", batches: int):
        self.builder, self.batches, self.seed = builder, batches, 0
        self.renderer = builder.renderer

    def set_epoch(self, seed: int = 0) -> None:
        self.seed = seed

    def get_batch(self, index: int) -> list[tinker.Datum]:
        rng = random.Random(1000 * self.seed + index)
        config = self.builder.common_config
        return [self._datum(rng.randint(1, 60), config.max_length) for _ in range(config.batch_size)]

    def _datum(self, number: int, max_length: int | None) -> tinker.Datum:
        conversation: list[Message] = [
            {"role": "user", "content": f"Count on from {number}."},
            {"role": "assistant", "content": f"{number + 1}, {number + 2}, {number + 3}"},
        ]
        return conversation_to_datum(conversation, self.renderer, max_length, TrainOnWhat.LAST_ASSISTANT_MESSAGE)

    def __len__(self) -> int:
        return self.batches


@chz.chz
class CountingDatasetBuilder(ChatDatasetBuilder):
    batches: int = 12

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return CountingDataset(self, self.batches), CountingDataset(self, 1)


def main(log_path: str) -> None:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name=RENDERER, max_length=128, batch_size=16
    )
    config = train.Config(
        log_path=log_path,
        model_name=MODEL,
        recipe_name="custom_dataset",
        dataset_builder=CountingDatasetBuilder(common_config=common),
        learning_rate=2e-3,
    )
    asyncio.run(train.main(config))


if __name__ == "__main__":
    check_command()
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    main(folder)
    print(f"Files: {folder}")
