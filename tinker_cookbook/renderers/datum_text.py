"""Show which tokens of a training example are trained. For people, not for parsing."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from itertools import accumulate, groupby

from rich.console import Console
from rich.text import Text

from tinker_cookbook.exceptions import DataValidationError
from tinker_cookbook.renderers import media
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.utils.narrowing import to_list

TRAINED, NOT_TRAINED, PUSHED_DOWN = "green", "yellow", "red"


def to_ints(chunk: tinker.ModelInput | tinker.ModelInputChunk) -> list[int]:
    """Token ids by position; the positions of an image or other media count as 0."""
    whole = chunk if isinstance(chunk, tinker.ModelInput) else tinker.ModelInput(chunks=[chunk])
    return media.ids(media.elements(whole))


def example_text(
    datum: tinker.Datum, tokenizer: Tokenizer, key: str = "weights", max_tokens: int | None = None
) -> Text:
    """The datum's tokens as styled text: green where `key` is positive, red where it is negative, yellow where it is 0.

    Args:
        datum: one with target_tokens (N,) and `key` (N,) in its loss_fn_inputs.
        key: the values that determine the colour: weights, advantages, mask.
        max_tokens: show at most this many, and print the total number.

    Raises:
        DataValidationError: the datum has no such key, or one without a number per target.
    """
    for name in ("target_tokens", key):
        if name not in datum.loss_fn_inputs:
            raise DataValidationError(
                f"the datum has no {name!r}; its loss_fn_inputs are {sorted(datum.loss_fn_inputs)}"
            )
    values, targets = (datum.loss_fn_inputs[name].to_torch() for name in (key, "target_tokens"))
    read = media.elements(datum.model_input)
    inputs = media.ids(read)
    if values.ndim != 1 or values.shape != targets.shape or len(targets) != len(inputs):
        raise DataValidationError(
            f"{key} has shape {tuple(values.shape)} and target_tokens {tuple(targets.shape)} over {len(inputs)} positions; "
            "one number per position can be shown"
        )
    # The first token is never a target. The targets follow it; they end one token after the input.
    tokens: list[int] = to_list(targets)
    whole: list[media.Element] = [
        tokens[at - 1] if at and isinstance(element, int) else element
        for at, element in zip(_starts(read), read, strict=False)
    ]
    whole += tokens[-1:]
    signs: list[int] = [0, *((value > 0) - (value < 0) for value in to_list(values))]
    styles = {0: NOT_TRAINED, 1: TRAINED, -1: PUSHED_DOWN}
    text, shown = Text(), whole if max_tokens is None else _first(whole, max_tokens)
    for sign, run in groupby(zip(_starts(shown), shown, strict=False), key=lambda item: signs[item[0]]):
        text.append(media.decode([element for _, element in run], tokenizer), style=styles[sign])
    if (left := len(inputs) + 1 - media.num_positions(shown)) > 0:
        text.append(f"\n... ({left} more tokens)", style="dim")
    return text


def _starts(parts: list[media.Element]) -> Iterator[int]:
    """The first position of each element, and the end position."""
    return accumulate((media.num_positions([part]) for part in parts), initial=0)


def _first(whole: list[media.Element], positions: int) -> list[media.Element]:
    """The elements that fit into this many positions."""
    return [element for element, end in zip(whole, [*_starts(whole)][1:], strict=True) if end <= positions]


def colorize_example(datum: tinker.Datum, tokenizer: Tokenizer, key: str = "weights") -> str:
    """`example_text` as a string with terminal colours. Raises as it does."""
    return with_escapes(example_text(datum, tokenizer, key))


def with_escapes(text: Text) -> str:
    """Styled text as a string with escape codes for colours."""
    file = StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", soft_wrap=True, legacy_windows=False)
    console.print(text, end="")
    return file.getvalue()
