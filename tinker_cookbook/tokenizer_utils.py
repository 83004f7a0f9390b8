"""Tokenizers: from the user's registry first, then from Hugging Face, each loaded once per process."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

from tinker_cookbook import backends
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.model_names import did_you_mean
from tinker_cookbook.utils.misc_utils import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase
else:
    # transformers takes seconds to import; only get_tokenizer needs it.
    Tokenizer: TypeAlias = "PreTrainedTokenizerBase"

logger = logging.getLogger(__name__)

TokenizerFactory: TypeAlias = Callable[[], Tokenizer]

_WHAT_A_NAME_MAY_BE = (
    "a model_name is a folder with config.json and tokenizer files (absolute, ./relative or ~), "
    "a Hugging Face hub id such as Qwen/Qwen3-8B, or a name given to register_tokenizer"
)
_GATED, _UNGATED = "meta-llama/Llama-3", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""Prefix of models whose tokenizer is gated on the hub; the mirror is not."""
_registry: dict[str, TokenizerFactory] = {}
_made: dict[str, Tokenizer] = {}


def get_tokenizer(model_name: str) -> Tokenizer:
    """The tokenizer of a model, cached by name. For the gated Llama 3 models it is the ungated mirror, and the
    gated one only if that is not available.

    Raises ConfigurationError when the name is a path that does not exist, or when Hugging Face cannot load it.
    """
    if model_name in _registry:
        if model_name not in _made:
            _made[model_name] = _registry[model_name]()
        return _made[model_name]
    return _from_hugging_face(model_source(model_name))


def model_source(model_name: str) -> str:
    """Where the files of a model are: its folder, as an absolute path, or its hub id.

    Raises ConfigurationError for a path that does not exist.
    """
    name = base_model_of(model_name)
    if not _is_path(name):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"model_name={model_name!r}: there is no such folder; {_WHAT_A_NAME_MAY_BE}")
    # Resolved before any cache: the same relative path means another folder after a chdir.
    return str(folder.resolve())


def base_model_of(model_name: str) -> str:
    """The base model in `base:peft:adapter`, and the folder of a shipped model; other names are unchanged."""
    return shipped_model(model_name.partition(":peft:")[0])


def register_tokenizer(name: str, factory: TokenizerFactory) -> None:
    """Make `get_tokenizer(name)` return `factory()`, called once. A second registration replaces the first."""
    if not name:
        raise ConfigurationError("register_tokenizer: name is empty; give the model_name that it stands for")
    _registry[name] = factory
    _made.pop(name, None)


def unregister_tokenizer(name: str) -> bool:
    """Unregister a tokenizer; False when there was none with that name."""
    _made.pop(name, None)
    return _registry.pop(name, None) is not None


def is_tokenizer_registered(name: str) -> bool:
    return name in _registry


@runtime_checkable
class SupportsEncodeOrdinary(Protocol):
    """A tokenizer like tiktoken's, with a separate method for plain text."""

    def encode_ordinary(self, text: str) -> list[int]: ...


class TypedTokenizer(Protocol):
    """The part of a Tokenizer that transformers leaves untyped."""

    name_or_path: str

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = ..., *, clean_up_tokenization_spaces: bool | None = ...
    ) -> str | list[str]: ...


def typed(tokenizer: TypedTokenizer) -> TypedTokenizer:
    """The same tokenizer, with types."""
    return tokenizer


def encode_without_special_tokens(tokenizer: TypedTokenizer | SupportsEncodeOrdinary, text: str) -> list[int]:
    """The token ids of a text; nothing is added before or after it."""
    if isinstance(tokenizer, SupportsEncodeOrdinary):
        return list(tokenizer.encode_ordinary(text))
    return list(tokenizer.encode(text, add_special_tokens=False))


def get_registered_tokenizer_names() -> list[str]:
    return sorted(_registry)


@cache
def _from_hugging_face(name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    load: Callable[[str], Tokenizer] = cast(Any, AutoTokenizer).from_pretrained

    if not Path(name).is_dir():
        backends.try_hub_once()
    if name.startswith(_GATED):
        try:
            return load(_UNGATED)
        except (OSError, ValueError) as error:
            logger.info(
                "%s cannot be loaded (%s); trying the tokenizer of %s itself", _UNGATED, first_line(error), name
            )
    try:
        return load(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model_name={name!r}: no tokenizer could be loaded ({first_line(error)}){did_you_mean(name)}; "
            f"{_WHAT_A_NAME_MAY_BE}. Without a network, name a local folder or fill the Hugging Face cache first."
        ) from error


def _is_path(name: str) -> bool:
    """A hub id is `org/name`: anything rooted, dotted, deeper, or present on disk is a path."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).is_dir()
