"""Cost of a constraint: decode steps with and without one, interleaved, and the parts of its cost at a large vocabulary.

python -m benchmarks.constrain shape=small threads=1
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import chz
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.config import CommonConfig, environment, run_benchmark
from benchmarks.models import EOS_ID, PAD_ID, SHAPES, UNKNOWN_ID, ensure_model
from benchmarks.report import Report, Table, finish, number
from benchmarks.workload import random_tokens
from tinker_local_backend.constraint import Constraint
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.model.memory import keep_freed_memory
from tinker_local_backend.engine.models import load_model, new_generator
from tinker_local_backend.engine.sampling.constraints import Matcher, grammar_of, masks_of
from tinker_local_backend.engine.sampling.requests import SamplingRequest, StopRule
from tinker_local_backend.engine.sampling.sampler import Ticket
from tinker_local_backend.engine.sampling.token_choice import RowParams, next_allowed_tokens, next_tokens

T = TypeVar("T")

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer"},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "JSON records": Constraint(json_schema={"type": "array", "items": RECORD, "minItems": 10_000}),
    "lower-case words": Constraint(regex="([a-z]{1,12} ){10000,}"),
}
"""None of them is ever complete, so no row ends during the measurement."""


@chz.chz(typecheck=True)
class Config(CommonConfig):
    """Keys of `python -m benchmarks.constrain`."""

    rows: int = chz.field(default=64, doc="sequences in a batch", validator=chz.validators.gt(0))
    steps: int = chz.field(default=100, doc="measured steps", validator=chz.validators.gt(0))
    warm_up: int = chz.field(default=10, doc="warm-up steps", validator=chz.validators.ge(0))
    vocabulary: int = chz.field(
        default=150_000, doc="vocabulary size of the second table", validator=chz.validators.gt(1000)
    )


def run(config: Config) -> Report:
    """Measure and report; writes nothing."""
    keep_freed_memory()  # as the engine does when it loads a model
    with environment(config):
        report = Report.start("constrain", config)
        report.tables.append(steps_table(config))
        report.tables.append(parts_table(config))
    return report


def byte_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of random merges, with the special tokens of the benchmarks' models."""
    rng = random.Random(0)
    table = {"<pad>": PAD_ID, "<eos>": EOS_ID, "<unk>": UNKNOWN_ID}
    table |= {letter: len(table) + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    parts = [
        letter for letter in table if len(letter) == 1 and letter.isascii() and (letter.isalnum() or letter in ',:{}"')
    ]
    merges: list[tuple[str, str]] = []
    while len(table) < vocabulary:
        left, right = rng.choice([*parts, "Ġ"]) if len(parts) < 2000 else rng.choice(parts), rng.choice(parts)
        if left + right not in table and len(left + right) <= 10:
            table[left + right] = len(table)
            merges.append((left, right))
            if len(parts) < 40_000:
                parts.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model_of(config: Config) -> BaseModel:
    """The random model of the shape, with a byte-level tokenizer."""
    shape = SHAPES[config.shape]
    model = load_model(str(ensure_model(config.shape, shape, config.models_dir)), torch.device(config.device))
    model.tokenizer = byte_tokenizer(shape.vocab)
    return model


class Clock:
    """Wall-clock seconds of each call by name, and CPU seconds of the process, which other programs disturb less."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {}

    def time(self, name: str, function: Callable[..., T], *arguments: object) -> T:
        clock, cpu = time.perf_counter(), time.process_time()
        result = function(*arguments)
        self.times.setdefault(name, []).append((time.perf_counter() - clock, time.process_time() - cpu))
        return result

    def measured(self, name: str, warm_up: int) -> np.ndarray:
        """(2, calls): wall-clock and CPU seconds, without the first `warm_up` calls."""
        return np.array(self.times[name])[warm_up:].T


def steps_table(config: Config) -> Table:
    """Decode steps of all generators in turn."""
    model = model_of(config)
    generators = {}
    for name, constraint in {"none": None, **CONSTRAINTS}.items():
        generators[name] = new_generator(model, 1 << 16, itertools.count().__next__)
        for row in range(config.rows):
            prompt = tuple(random_tokens(SHAPES[config.shape].vocab, 32, seed=row))
            stop = StopRule() if constraint is None else StopRule(frozenset({EOS_ID}))
            fields = {"seed": row, "stop": stop, "constraint": constraint}
            request = SamplingRequest(prompt, None, 1, config.warm_up + config.steps + 20, **fields)
            generators[name].add(Ticket(request, lambda outcome: None, lambda: False))
    clock = Clock()
    for _ in range(config.warm_up + config.steps):
        for name, generator in generators.items():
            clock.time(name, generator.step)
    columns = ["constraint", "ms", "CPU ms", "CPU time against none"]
    plain = clock.measured("none", config.warm_up)[1]
    rows = []
    for name in generators:
        seconds, cpu = clock.measured(name, config.warm_up)
        rows.append([name, spread(1e3 * seconds), spread(1e3 * cpu), spread(cpu / plain)])
    return Table(f"A decode step of {config.rows} rows: median (10th to 90th percentile)", columns, rows)


def parts_table(config: Config) -> Table:
    """The parts of a step, on random logits. The vocabulary is the tokenizer's, not the model's."""
    model = model_of(config)
    model.tokenizer = byte_tokenizer(config.vocabulary)
    model.vocab_size = config.vocabulary
    logits = torch.randn(config.rows, config.vocabulary, generator=torch.Generator().manual_seed(0))
    columns = ([1.0] * config.rows, [-1] * config.rows, [1.0] * config.rows, [0.0] * config.rows, range(config.rows))
    params = RowParams(*columns, device=torch.device("cpu"))
    rows = []
    for name, constraint in CONSTRAINTS.items():
        grammar = grammar_of(constraint, model)
        matchers = [grammar.matcher({EOS_ID}) for _ in range(config.rows)]
        clock = Clock()
        for step in range(config.warm_up + config.steps):
            at = np.full(config.rows, step, dtype=np.uint64)
            allowed = clock.time("mask", masks_of, matchers)
            choice = clock.time("choice under it", next_allowed_tokens, logits, params, at, allowed)
            clock.time("choice without", next_tokens, logits, params, at)
            clock.time("consume", consume, matchers, choice[0].tolist())
        for part in clock.times:
            seconds, cpu = 1e6 * clock.measured(part, config.warm_up) / config.rows
            rows.append([name, part, spread(seconds), spread(cpu)])
    title = f"Microseconds per token and row, {config.rows} rows, {config.vocabulary:,} tokens: median (10th to 90th percentile)"
    return Table(title, ["constraint", "part", "us", "CPU us"], rows)


def consume(matchers: Sequence[Matcher], tokens: Sequence[int]) -> None:
    for matcher, token in zip(matchers, tokens, strict=True):
        matcher.consume(token)


def spread(values: Sequence[float] | np.ndarray) -> str:
    low, middle, high = np.quantile(np.asarray(values), [0.1, 0.5, 0.9])
    return f"{number(middle)} ({number(low)} to {number(high)})"


def main(config: Config) -> None:
    finish(run(config), config.output)


if __name__ == "__main__":
    run_benchmark(main)
