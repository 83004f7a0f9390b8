"""Makes the tiny chat model: corpus, tokenizer, training, figures, folder.

    python -m tools.make_tiny_model                        # 7 million tokens: 30 minutes on two busy cores
    python -m tools.make_tiny_model out_dir=/tmp/tiny seed=1

The same settings and seed give the same files on the same machine. `python -m tools.make_tiny_model.data_files`
writes the small data files that go with it, `python -m tools.make_tiny_model.figures` measures any such folder.
"""

import time

import chz
import torch

from tinker_cookbook.cli_utils import run_recipe
from tools.make_tiny_model import corpus
from tools.make_tiny_model.figures import measure, table
from tools.make_tiny_model.folder import check_replaceable, write_folder
from tools.make_tiny_model.tokenizer import train_tokenizer
from tools.make_tiny_model.train import Schedule, Shape, encode, new_model, train


@chz.chz(typecheck=True)
class CLIConfig:
    """How to make the model. The defaults make the one that ships."""

    out_dir: str = chz.field(default="example_data/tiny_chat", doc="folder to write; an older model there is replaced")
    seed: int = chz.field(default=0, doc="seed of the corpus, the initial weights and the order of batches")
    conversations: int = chz.field(default=52_000, doc="how many conversations to train on, once each")
    max_steps: int | None = chz.field(default=None, doc="stop after this many steps; None: the whole corpus")
    vocab_size: int = chz.field(default=1536, doc="tokens in the vocabulary: 256 bytes, merges and specials")
    learning_rate: float = chz.field(default=2e-3, doc="peak learning rate of AdamW")
    batch_tokens: int = chz.field(default=3072, doc="tokens of a batch, including padding")
    hidden_size: int = chz.field(default=192, doc="width of the network")
    layers: int = chz.field(default=5, doc="number of transformer layers")
    threads: int = chz.field(default=2, doc="CPU threads; another number may change the last digits")

    @chz.validate
    def _positive(self) -> None:
        for name in ("conversations", "batch_tokens", "layers", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be 1 or more, got {self.max_steps}")
        if not 400 <= self.vocab_size <= 8000:
            raise ValueError(f"vocab_size must be from 400 to 8000, got {self.vocab_size}")


def main(config: CLIConfig) -> None:
    check_replaceable(config.out_dir)
    torch.set_num_threads(config.threads)
    started = time.monotonic()
    stages = corpus.stages(config.conversations, config.seed)
    texts = (corpus.plain_text(turns) for turns in stages[-1][:8000])
    tokenizer = train_tokenizer(texts, config.vocab_size)
    shape = Shape(hidden_size=config.hidden_size, layers=config.layers)
    schedule = Schedule(
        learning_rate=config.learning_rate, batch_tokens=config.batch_tokens, max_steps=config.max_steps
    )
    model = new_model(shape, tokenizer, config.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"corpus {config.conversations:,} conversations, vocabulary {len(tokenizer)}, parameters {parameters:,}")
    train(model, [encode(turns, tokenizer) for turns in stages], schedule, config.seed)
    minutes = (time.monotonic() - started) / 60
    with write_folder(model, tokenizer, config.out_dir) as unfinished:
        # Measured on the rounded weights, before the folder gets its name: the figures are those of the shipped weights.
        figures = measure(unfinished.path)
        unfinished.add_card(figures, parameters, minutes)
    print(f"trained in {minutes:.1f} minutes, written to {config.out_dir}")
    print(table(figures))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
