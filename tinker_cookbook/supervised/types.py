"""What a supervised loop asks of its data: batches of datums, made by a builder that is plain, serialisable config."""

from abc import ABC, abstractmethod

import chz
import tinker

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Renderer, TrainOnWhat, get_renderer
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer


class SupervisedDataset(ABC):
    """Batches by index. The order may change between epochs and only there, so that a run can resume anywhere."""

    @abstractmethod
    def get_batch(self, index: int) -> list[tinker.Datum]:
        """Batch `index` of the current epoch, 0 <= index < len(self); IndexError outside."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    def set_epoch(self, seed: int = 0) -> None:  # noqa: B027  (a dataset without a shuffle has nothing to do)
        """Order the examples for the epoch that `seed` stands for; the same seed gives the same order."""


@chz.chz(typecheck=True)
class SupervisedDatasetBuilder:
    """Config that makes the training set and, where it has one, the test set."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


@chz.chz(typecheck=True)
class ChatDatasetBuilderCommonConfig:
    """What every dataset of conversations needs to know."""

    model_name_for_tokenizer: str = chz.field(doc="Model whose tokenizer is used: hub id, folder or registered name.")
    renderer_name: str = chz.field(doc="Name for get_renderer.")
    max_length: int | None = chz.field(doc="Longest sequence in tokens; what is beyond is cut off. None: no limit.")
    batch_size: int = chz.field(doc="Examples per batch.")
    train_on_what: TrainOnWhat | None = chz.field(default=None, doc="None: the dataset's own choice.")

    @chz.validate
    def _check(self) -> None:
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size={self.batch_size}: must be at least 1")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigurationError(f"max_length={self.max_length}: must be at least 2, a token and its target")


@chz.chz(typecheck=True)
class ChatDatasetBuilder(SupervisedDatasetBuilder):
    """A builder whose examples are conversations."""

    common_config: ChatDatasetBuilderCommonConfig = chz.field(doc="Tokenizer, renderer, lengths and batch size.")

    @property
    def tokenizer(self) -> Tokenizer:
        return get_tokenizer(self.common_config.model_name_for_tokenizer)

    @property
    def renderer(self) -> Renderer:
        return get_renderer(
            self.common_config.renderer_name,
            self.tokenizer,
            model_name=self.common_config.model_name_for_tokenizer,
        )
