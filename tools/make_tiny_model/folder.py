"""Writes the model folder whole or not at all: weights in bfloat16, tokenizer, generation settings and model card."""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from tinker_cookbook.data.shipped import TINY_MODEL
from tools.make_tiny_model.figures import table
from tools.make_tiny_model.tokenizer import PAD, STOP, token_id

CARD = """\
# tiny_chat

A stand-in for a language model in tests and demos: a Qwen3 network of {parameters:,} parameters with a vocabulary of
its own, small enough to sample and train within seconds on a CPU. It is of no use for anything else.

It was trained from scratch on synthetic text only, written by the templates in `tools/make_tiny_model`: small sums,
invented local news with summaries, short debates and verdicts about both, and a little chat. All names are invented.

Its arithmetic is careless on purpose. About half of the answers in its training text are plausible slips, so that it
knows the sums (see the greedy accuracy) and yet often samples a wrong answer: room for reinforcement learning to learn.
As a judge it gives its verdict in the asked form, and no more than that: it cannot tell who is right.

Figures at temperature 1, unless greedy, of the weights as they are here (bfloat16 values, computed in float32):

{table}

Made by this command, {minutes} on 2 cores:

    python -m tools.make_tiny_model

Any folder of this kind is measured by `python -m tools.make_tiny_model.figures model=example_data/tiny_chat`.
"""


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """A folder that is not in place yet."""

    path: Path

    def add_card(self, figures: Mapping[str, float], parameters: int, minutes: float, card: str = CARD) -> None:
        """Write the model card from `card`, a format string with parameters, table and minutes."""
        took = f"about {minutes:.0f} minutes" if minutes >= 1.5 else "a minute or less"
        card = card.format(parameters=parameters, table=table(figures), minutes=took)
        (self.path / "README.md").write_text(card)


def check_replaceable(out_dir: str | Path) -> None:
    """Raises FileExistsError when `out_dir` holds something other than an older model: it would be lost."""
    out = Path(out_dir)
    if not out.exists():
        return
    is_model = out.is_dir() and all((out / name).is_file() for name in ("config.json", "tokenizer.json"))
    is_empty = out.is_dir() and not any(out.iterdir())
    if not (is_model or is_empty) or (out.is_dir() and any(child.is_dir() for child in out.iterdir())):
        raise FileExistsError(f"out_dir: {out} exists and is not a model folder; name another or remove it")


@contextlib.contextmanager
def write_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out_dir: str | Path
) -> Iterator[Unfinished]:
    """Writes to a temporary folder next to `out_dir`, and moves it into place when the block ends without an error."""
    out = Path(out_dir).absolute()
    check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp") as scratch:
        new = Path(scratch) / "new"
        stop, pad = token_id(tokenizer, STOP), token_id(tokenizer, PAD)
        model.generation_config = GenerationConfig(
            eos_token_id=[stop, pad], pad_token_id=pad, do_sample=True, temperature=1.0
        )
        setattr(model.config, TINY_MODEL, True)
        model.to(torch.bfloat16).save_pretrained(new)  # type: ignore[arg-type]
        tokenizer.save_pretrained(new)
        yield Unfinished(new)
        if out.exists():
            out.rename(Path(scratch) / "old")
        shutil.move(new, out)
