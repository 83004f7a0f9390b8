"""What an environment is before it knows the model: something that gives a dataset of groups for one."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import chz
from chz.tiepin import is_subtype_instance

from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.utils.fields import fill

T = TypeVar("T")


@chz.chz(typecheck=True)
class DatasetSettings:
    """For which model, and how much of an environment. Recipes have keys of the same names."""

    model_name: str = chz.field(
        doc="whose tokenizer to use: a directory, a hub id, or tiny_chat (shipped)",
        munger=lambda self, name: shipped_model(name),
    )
    renderer_name: str | None = chz.field(
        default=None,
        doc="how messages become tokens; None: as the model was made for",
        munger=lambda self, name: name or model_info.get_recommended_renderer_name(self.model_name),
    )
    groups_per_batch: int = chz.field(default=8, doc="episodes or questions per batch", validator=chz.validators.gt(0))
    group_size: int = chz.field(default=8, doc="attempts at each", validator=chz.validators.gt(0))
    num_batches: int = chz.field(default=20, doc="training batches", validator=chz.validators.gt(0))
    num_test: int = chz.field(default=32, doc="episodes or questions of an evaluation", validator=chz.validators.gt(0))
    seed: int = chz.field(default=0, doc="seed of what is drawn")
    max_prompt_tokens: int | None = chz.field(default=None, doc="longest prompt; None: no limit")


@contextmanager
def arguments_called(key: str) -> Iterator[None]:
    """Errors that name an argument `env_args.x` name it as it was given instead: `<key>.x`, or `x` for an empty key."""
    try:
        yield
    except ConfigurationError as error:
        error.args = (str(error).replace("env_args.", f"{key}." if key else ""),)
        raise


def check_type(owner: str, key: str, value: Any, hint: Any) -> None:
    """Raises ConfigurationError for a value of `env_args` that is not of the type of its annotation."""
    if not is_subtype_instance(value, hint):
        wanted = hint.__name__ if isinstance(hint, type) else str(hint)
        raise ConfigurationError(
            f"env_args.{key}={value!r}: is {type(value).__name__}, but {owner} takes {key}: {wanted}"
        )


def fill_with_args(config_cls: type[T], settings: Any, env_args: Mapping[str, Any], **own: Any) -> T:
    """`fill` with `env_args` among the fields. Raises ConfigurationError for values that the class refuses."""
    for key, value in env_args.items():
        check_type(config_cls.__name__, key, value, chz.chz_fields(config_cls)[key].final_type)
    try:
        return fill(config_cls, settings, **own, **env_args)
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:  # chz names the field as it stores it
        named = re.sub(rf"\bX_({'|'.join(env_args)})\b", r"env_args.\1", str(error)).replace("X_", "")
        raise ConfigurationError(f"{config_cls.__name__}: {named}") from None


class Environment(ABC):
    """What is asked and how it is rewarded, for any model."""

    def dataset_builder(self, model_name: str, renderer_name: str | None = None, **settings: Any) -> RLDatasetBuilder:
        """The environment for a model, checked.

        Args:
            settings: further fields of DatasetSettings, such as groups_per_batch, group_size, num_batches, seed.

        Raises:
            ConfigurationError, DataFormatError: whatever is wrong with the environment; nothing is loaded but a tokenizer.
        """
        if unknown := settings.keys() - chz.chz_fields(DatasetSettings).keys():
            known = ", ".join(chz.chz_fields(DatasetSettings))
            raise ConfigurationError(f"dataset_builder has no setting {', '.join(sorted(unknown))}; it has {known}")
        return self.build(DatasetSettings(model_name=model_name, renderer_name=renderer_name, **settings))

    @abstractmethod
    def build(self, settings: DatasetSettings) -> RLDatasetBuilder:
        """The dataset builder for a model, checked as far as that needs no model."""
