"""Makes tiny_debate and its data: corpus, tokenizer, training stage by stage, figures, folder.

    python -m tools.make_tiny_debate                         # minutes on one core
    python -m tools.make_tiny_debate out_dir=/tmp/tiny seed=1
    python -m tools.make_tiny_debate out_dir=/tmp/long steps=24            # for task=collatz_24
    python -m tools.make_tiny_debate out_dir=/tmp/weak objection_skill=0.5

The same settings and seed give the same files on the same machine. `python -m tools.make_tiny_debate.figures` measures any
such folder, `python -m tools.make_tiny_debate.data_files` writes only the questions of the tasks.
"""

import dataclasses
import random
import time

import chz
import torch
from transformers import PreTrainedTokenizerFast

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.shipped.questions.collatz import LENGTHS
from tools.make_tiny_debate.corpus import KINDS, OBJECTION_SKILL, USUAL, Turns, Writers
from tools.make_tiny_debate.figures import measure
from tools.make_tiny_debate.trails import STEPS, WORLD
from tools.make_tiny_model.corpus import plain_text
from tools.make_tiny_model.figures import table
from tools.make_tiny_model.folder import check_replaceable, write_folder
from tools.make_tiny_model.tokenizer import CONTEXT_LENGTH, SPLIT, train_tokenizer
from tools.make_tiny_model.train import Encoded, Schedule, Shape, encode, new_model, train

CARD = """\
# tiny_debate

A stand-in for a debating language model in tests, demos and the study of debate: a Qwen3 network of {parameters:,}
parameters with a vocabulary of its own, in which each number of its small world is one token. It follows Collatz trails
for {steps} steps, objects to a step of another's answer, names a step of its own that a judge may check, and judges.

It was trained from scratch on synthetic text only, written by the templates in `tools/make_tiny_debate`. Its answers are
careless on purpose: each step slips now and then, and one kind of step is written wrong more often than not, by all
writers alike, so that most answers to some questions are wrong in the same way. Objections in its text name what is wrong,
so it knows better than it writes: the room in which training by verdicts can be seen.

Figures at temperature 1, unless greedy, of the weights as they are here (bfloat16 values, computed in float32):

{table}

Made by this command, {minutes} on 1 core:

    python -m tools.make_tiny_debate{keys}

Any folder of this kind is measured by `python -m tools.make_tiny_debate.figures model=example_data/tiny_debate`.
"""

WHOLE_NUMBERS = SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
"""Numbers are not split into digits: the model memorises the next number, and does not compute it."""
DECISION_WEIGHT = 6.0
"""Loss weight of the step that an objection names: one token in a hundred, and the decisive one."""
VOCABULARY = 656
SHAPE = Shape(hidden_size=128, layers=4, heads=4, kv_heads=4, mlp_size=384)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of the training: number and mixture of conversations, and optimisation settings."""

    conversations: int
    mixture: dict[str, int]
    learning_rate: float
    batch_tokens: int


STAGES = (
    Stage(5000, {"facts": 45, "claims": 30, "right_answer": 25}, 3e-3, 1024),
    Stage(7000, {"facts": 15, "claims": 75, "right_answer": 10}, 3e-3, 1024),
    Stage(7000, {"facts": 8, "claims": 12, "graded_steps": 42, "found_mistakes": 38}, 3e-3, 1024),
    Stage(
        11000,
        {
            "facts": 3, "claims": 4, "graded_steps": 5, "found_mistakes": 12, "graded_speeches": 6,
            "answer": 18, "debate": 28, "consultancy": 7, "verdict": 9, "check": 8,
        },
        2e-3,
        1536,
    ),
)  # fmt: skip


@chz.chz(typecheck=True)
class CLIConfig:
    """How to make the model. The defaults make the one that ships."""

    out_dir: str = chz.field(
        default="example_data/tiny_debate", doc="folder to write; an older model there is replaced"
    )
    seed: int = chz.field(default=0, doc="seed of the corpus, the initial weights and the order of batches")
    share: float = chz.field(default=1.0, doc="share of each stage to train on, for quick trials")
    steps: int = chz.field(
        default=STEPS, doc=f"steps of an answer, {', '.join(map(str, LENGTHS))}: the length of task=collatz_STEPS"
    )
    objection_skill: float = chz.field(
        default=OBJECTION_SKILL,
        doc="probability that an objection in the text names a wrong step if there is one, else any step: the opponent's skill",
    )
    vocab_size: int | None = chz.field(
        default=None,
        doc=f"tokens in the vocabulary: 256 bytes, merges and specials; None: {VOCABULARY}, and more names of steps",
    )
    threads: int = chz.field(default=1, doc="CPU threads; another number may change the last digits")

    @chz.validate
    def _check(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if self.steps not in LENGTHS:
            raise ValueError(f"steps must be one of {', '.join(map(str, LENGTHS))}, got {self.steps}")
        if not 0 <= self.objection_skill <= 1:
            raise ValueError(f"objection_skill must be a share from 0 to 1, got {self.objection_skill}")

    @property
    def writers(self) -> Writers:
        return Writers(self.steps, self.objection_skill)

    @property
    def longest(self) -> int:
        """Context length in tokens, which grows with the answers."""
        return CONTEXT_LENGTH * max(1, self.steps // STEPS)

    @property
    def size_of_vocabulary(self) -> int:
        """Each step beyond those of tiny_debate adds a name, with and without a leading space."""
        return VOCABULARY + 2 * max(0, self.steps - STEPS) if self.vocab_size is None else self.vocab_size

    def conversations(self, stage: Stage) -> int:
        return max(1, round(stage.conversations * self.share))


def generate(stage: Stage, count: int, seed: int, by: Writers = USUAL) -> list[Turns]:
    """`count` conversations of one stage. The same arguments give the same text."""
    rng = random.Random(f"{seed}/{stage}")
    kinds, weights = list(stage.mixture), list(stage.mixture.values())
    return [KINDS[kind](rng, by) for kind in rng.choices(kinds, weights, k=count)]


def make_tokenizer(texts: list[Turns], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose training text repeats the numbers often enough for each to become a token."""
    numbers = " ".join([*(str(number) for number in WORLD), "<VERDICT>RIGHT</VERDICT> <VERDICT>WRONG</VERDICT>"])
    return train_tokenizer([*(plain_text(turns) for turns in texts), *[numbers] * 300], vocab_size, WHOLE_NUMBERS)


def weigh_objections(encoded: list[Encoded], tokenizer: PreTrainedTokenizerFast) -> list[Encoded]:
    """The conversations, with a larger loss weight for the first token after a request for an objection."""
    request_end = tokenizer.encode("there?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    weighed = []
    for example in encoded:
        weights = list(example.weights)
        for end in range(len(request_end), len(weights)):
            if example.ids[end - len(request_end) : end] == request_end:
                weights[end] = DECISION_WEIGHT
        weighed.append(dataclasses.replace(example, weights=weights))
    return weighed


def keys_of(config: CLIConfig) -> str:
    """The command-line keys of this model, each with a space before it; empty for the shipped one."""
    defaults = CLIConfig()
    named = {name: getattr(config, name) for name in ("seed", "steps", "objection_skill", "share", "vocab_size")}
    changed = {name: value for name, value in named.items() if value != getattr(defaults, name)}
    return "".join(
        f" {key}={value}" for key, value in ({"out_dir": config.out_dir} | changed if changed else {}).items()
    )


def main(config: CLIConfig) -> None:
    check_replaceable(config.out_dir)
    torch.set_num_threads(config.threads)
    started = time.monotonic()
    texts = [generate(stage, config.conversations(stage), config.seed, config.writers) for stage in STAGES]
    tokenizer = make_tokenizer(texts[-1][:2500], config.size_of_vocabulary)
    tokenizer.model_max_length = config.longest
    model = new_model(SHAPE, tokenizer, config.seed, config.longest)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"vocabulary {len(tokenizer)}, parameters {parameters:,}")
    for number, (stage, turns) in enumerate(zip(STAGES, texts, strict=True)):
        schedule = Schedule(
            learning_rate=stage.learning_rate, batch_tokens=stage.batch_tokens, weight_decay=0.02, bfloat16=False
        )
        encoded = weigh_objections(encode(turns, tokenizer, config.longest), tokenizer)
        train(
            model,
            [encoded],
            schedule,
            config.seed + number,
            lambda line, n=number: print(f"stage {n + 1}  {line}", flush=True),
        )
    minutes = (time.monotonic() - started) / 60
    with write_folder(model, tokenizer, config.out_dir) as unfinished:
        # Measured on the rounded weights, before the folder gets its name: the figures are those of the shipped weights.
        figures = measure(unfinished.path, steps=config.steps)
        card = CARD.replace("{steps}", LENGTHS[config.steps]).replace("{keys}", keys_of(config))
        unfinished.add_card(figures, parameters, minutes, card)
    print(f"trained in {minutes:.1f} minutes, written to {config.out_dir}")
    print(table(figures))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
