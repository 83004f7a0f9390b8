"""The same random cases for this library and for the reference package, as plain numbers that can be compared.

    python tests/ecosystem/fuzz.py golden.json        in an environment with tinker-cookbook, away from this repository

makes the golden file; `test_fuzz.py` runs the same cases here and compares. The cases follow from SEED alone. Nothing of this
repository is imported, so that the package is what `tinker_cookbook` means.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tinker
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SEED, CASES = 20261122, 40


class Letters:
    """A tokenizer of 64 ids: a few are special, the others one or several bytes of text, or half of a character."""

    all_special_ids = (0, 1)
    PIECES = (*("", ""), *[chr(97 + i) for i in range(26)], *["th", "ing ", " a", "é", "–", "日", "🙂", "\n"] * 4)[:64]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(self.PIECES[int(token) % len(self.PIECES)] for token in token_ids)


def tensor(values: list[Any], dtype: torch.dtype = torch.float32) -> tinker.TensorData:
    return tinker.TensorData.from_torch(torch.tensor(values, dtype=dtype))


def numbers(datum: tinker.Datum) -> dict[str, Any]:
    inputs = {key: value.to_torch().double().tolist() for key, value in sorted(datum.loss_fn_inputs.items())}
    return {"tokens": datum.model_input.to_ints(), **inputs}


def nll_and_bpb(rng: random.Random) -> Any:
    from tinker_cookbook.supervised.common import compute_bpb, compute_mean_nll

    letters: Any = Letters()
    rows = []
    for _ in range(rng.randint(1, 4)):
        length = rng.randint(1, 30)
        weights = [rng.choice([0.0, 0.0, 1.0, 1.0, 0.25]) for _ in range(length)]
        weights[rng.randrange(length)] = 1.0
        tokens = [rng.randrange(2, 64) if rng.random() < 0.9 else rng.choice((0, 1)) for _ in range(length)]
        tokens[weights.index(1.0)] = rng.randrange(2, 28)
        rows.append(([-rng.expovariate(0.7) for _ in range(length)], weights, tokens))
    logprobs, weights = [tensor(row[0]) for row in rows], [tensor(row[1]) for row in rows]
    targets = [tensor(row[2], torch.int64) for row in rows]
    return [compute_mean_nll(logprobs, weights), compute_bpb(logprobs, weights, targets, letters)]


def dpo(rng: random.Random) -> Any:
    from tinker_cookbook.preference.train_dpo import compute_dpo_loss

    pairs, beta = rng.randint(1, 6), rng.choice([0.01, 0.1, 0.5, 1.0])
    columns = [[torch.tensor(-rng.uniform(1, 60)) for _ in range(pairs)] for _ in range(4)]
    for column in columns[:2]:
        for value in column:
            value.requires_grad_()
    chosen, rejected, chosen_ref, rejected_ref = columns
    loss, metrics = compute_dpo_loss(chosen, rejected, chosen_ref, rejected_ref, beta)
    loss.backward()
    gradients = [float(value.grad or 0.0) for value in (*chosen, *rejected)]
    return [float(loss.detach()), {key: float(value) for key, value in sorted(metrics.items())}, gradients]


def learning_rates(rng: random.Random) -> Any:
    from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

    total = rng.randint(1, 500)
    steps = [0, total - 1, *(rng.randrange(total) for _ in range(4))]
    schedules: tuple[Any, ...] = ("linear", "cosine", "constant")
    return [[compute_schedule_lr_multiplier(name, step, total) for step in steps] for name in schedules]


def trajectory_data(rng: random.Random) -> Any:
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.types import Trajectory, Transition

    draw = lambda least, most: [rng.randrange(100) for _ in range(rng.randint(least, most))]  # noqa: E731
    seen, transitions = draw(1, 6), []
    for _ in range(rng.randint(1, 4)):
        action = draw(1, 5)
        logprobs = [-rng.expovariate(1.0) for _ in action]
        transitions.append(
            Transition(tinker.ModelInput.from_ints(seen), TokensWithLogprobs(action, logprobs), rng.random(), False)
        )
        # Most turns go on from what was said; some begin anew.
        seen = [*seen, *action, *draw(0, 4)] if rng.random() < 0.75 else draw(1, 8)
    trajectory = Trajectory(transitions, tinker.ModelInput.from_ints(seen))
    return [numbers(datum) for datum in trajectory_to_data(trajectory, rng.uniform(-2, 2))]


def advantages(rng: random.Random) -> Any:
    from tinker_cookbook.rl.data_processing import compute_advantages
    from tinker_cookbook.rl.types import TrajectoryGroup

    groups = []
    for _ in range(rng.randint(1, 3)):
        rewards = [rng.choice([0.0, 1.0, round(rng.uniform(-1, 1), 3)]) for _ in range(rng.randint(1, 6))]
        members: list[Any] = [SimpleNamespace(transitions=[SimpleNamespace(reward=r / 2)]) for r in rewards]
        groups.append(TrajectoryGroup(members, [r / 2 for r in rewards], [{} for _ in rewards]))
    return [found.double().tolist() for found in compute_advantages(groups)]


def supervised_data(rng: random.Random) -> Any:
    from tinker_cookbook.supervised.common import datum_from_model_input_weights

    length = rng.randint(3, 40)
    tokens = [rng.randrange(200) for _ in range(length)]
    weights = torch.tensor([float(rng.random() < 0.5) for _ in range(length)])
    max_length = rng.choice([None, length + 3, rng.randint(3, length)])
    weights[1] = 1.0
    reduction: Any = rng.choice(["none", "mean"])
    model_input = tinker.ModelInput.from_ints(tokens)
    return numbers(datum_from_model_input_weights(model_input, weights, max_length, reduction))


def discounted_sums(rng: random.Random) -> Any:
    from tinker_cookbook.rl.metrics import discounted_future_sum_vectorized

    values: Any = torch.tensor([rng.uniform(-1, 1) for _ in range(rng.randint(1, 20))], dtype=torch.float64)
    return [float(x) for x in discounted_future_sum_vectorized(values, rng.choice([0.0, 0.5, 0.99, 1.0]))]


RENDERERS: dict[str, tuple[str, ...]] = {
    "role_colon": ("<|endoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    **dict.fromkeys(
        ("qwen3", "qwen3_disable_thinking", "qwen3_instruct", "qwen3_5", "qwen3_5_disable_thinking", "nemotron3"),
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    ),
    **dict.fromkeys(
        ("deepseekv3", "deepseekv3_thinking"),
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
    ),
    **dict.fromkeys(
        ("kimi_k2", "kimi_k25", "kimi_k25_disable_thinking"),
        (
            *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "gpt_oss_no_sysprompt": (
        *("<|endoftext|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
        "<|call|>",
    ),
}
"""Renderer -> special tokens of its tokenizer: the beginning, the end, others."""
CHANNEL = {"gpt_oss_no_sysprompt": "<|channel|>final<|message|>"}
"""What an answer begins with where its format frames it."""


def byte_tokenizer(special: tuple[str, ...]) -> Any:
    """A token for each byte, and the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    core.add_tokens(["<think>", "</think>"])  # which are text
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=special[0], eos_token=special[1])


def renderers(rng: random.Random) -> Any:
    """Prompts, examples with their weights and replies, as digests: of plain conversations, on which nobody disagrees
    (tests/reference has the others, with what they differ in and why)."""
    from tinker_cookbook.renderers import get_renderer

    words = ("a", "pear", "no", "1+1?", "é", "漢", "{x: 1}", "the end.", "two\nlines")
    say = lambda: " ".join(rng.choice(words) for _ in range(rng.randint(1, 6)))  # noqa: E731
    turns = [{"role": role, "content": say()} for _ in range(rng.randint(1, 3)) for role in ("user", "assistant")]
    messages: Any = ([{"role": "system", "content": say()}] if rng.random() < 0.5 else []) + turns
    train_on: Any = rng.choice(["last_assistant_message", "last_assistant_turn"])
    reply, found = say(), {}
    for name, special in RENDERERS.items():
        tokenizer = byte_tokenizer(special)
        renderer: Any = get_renderer(name, tokenizer)
        prompt = renderer.build_generation_prompt(messages[:-1]).to_ints()
        model_input, weights = renderer.build_supervised_example(messages, train_on)
        stop = renderer.get_stop_sequences()[0]
        end = tokenizer.encode(stop, add_special_tokens=False) if isinstance(stop, str) else [stop]
        said = tokenizer.encode(CHANNEL.get(name, "") + reply, add_special_tokens=False)
        message, _ = renderer.parse_response(said + end)
        content = message["content"]  # a text is as good as a list of it
        parts = (
            [[part["type"], part[part["type"]]] for part in content]
            if isinstance(content, list)
            else [["text", content]]
        )
        weighed = [model_input.to_ints(), [float(weight) for weight in weights.tolist()]]
        seen = prompt, weighed, renderer.get_stop_sequences(), parts
        found[name] = [hashlib.sha1(json.dumps(one).encode()).hexdigest()[:6] for one in seen]
    return found


SUBJECTS: dict[str, Callable[[random.Random], Any]] = {
    function.__name__: function
    for function in (
        nll_and_bpb,
        dpo,
        learning_rates,
        trajectory_data,
        advantages,
        supervised_data,
        discounted_sums,
        renderers,
    )
}


def rounded(value: Any) -> Any:
    """To six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def run(name: str) -> list[Any]:
    """What the package, whichever is installed, makes of every case of a subject."""
    return [rounded(SUBJECTS[name](random.Random(f"{SEED} {name} {case}"))) for case in range(CASES)]


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        file.write(json.dumps({name: run(name) for name in SUBJECTS}, separators=(",", ":")) + "\n")
