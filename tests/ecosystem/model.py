"""The tiny model, taught for a minute to answer in the shapes that the public recipes reward.

    python -m tests.ecosystem.model OUTPUT RECIPES_FOLDER

The shipped model knows sums and plants. The recipes look for a number in \\boxed{}, a guess, a language, a score or a search;
a policy that never writes these gets the same reward for everything and has nothing to learn from.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tinker
import torch

import tinker_cookbook
from tests.ecosystem import stubs
from tests.ecosystem.data import ANIMALS, facts, forecast_lines, rubric_lines, sums
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_local_backend import ServiceClient
from tinker_local_backend.merge import merge_adapter

CONTEXT = 8192
"""Positions of the model that is made; the longest prompt of a recipe has 2,400 tokens."""
STEPS, BATCH_SIZE, LEARNING_RATE = 135, 10, 3e-3
KIMI_TOKENS = (
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
RENDERERS = ("qwen3_instruct", "qwen3_disable_thinking", "role_colon")

Conversation = list[Message]


def recipe(module: str) -> Any:
    """A module of the public recipes."""
    return importlib.import_module(f"tinker_cookbook.recipes.{module}")


def exchange(prompt: Conversation, reply: str) -> Conversation:
    return [*prompt, {"role": "assistant", "content": reply}]


def boxed_numbers(rng: random.Random) -> Conversation:
    """A sum of the kind of gsm8k, with or without the example that the recipes put first; the right answer or one near it."""
    module = recipe("math_rl.math_env")
    question, answer = rng.choice(sums(64))
    suffix = rng.choice([module.MathEnv.question_suffix(), module.Gsm8kDataset.question_suffix()])
    prefix: Conversation = []
    if rng.random() < 0.7:
        asked, told = module.MathEnv.standard_fewshot_prefix()
        suffixed = str(asked["content"]).replace(module.MathEnv.question_suffix(), suffix)
        prefix = [{"role": "user", "content": suffixed}, told]
    shown = answer if rng.random() < 0.7 else rng.randint(0, 8)
    return exchange([*prefix, {"role": "user", "content": question + suffix}], f"\\boxed{{{shown}}}")


def guesses(rng: random.Random) -> Conversation:
    """A first or a later guess of a number; now and then not in the form that is asked for."""
    turns: Conversation = [{"role": "system", "content": recipe("multiplayer_rl.guess_number.env").SYSTEM_PROMPT}]
    for _ in range(rng.randint(0, 3)):
        turns = exchange(turns, f"Guess: {rng.randint(0, 1024)}")
        turns.append({"role": "user", "content": rng.choice(["Too low", "Too high"])})
    return exchange(turns, f"{'Guess: ' if rng.random() < 0.7 else ''}{rng.randint(0, 1024)}")


def words(rng: random.Random) -> Conversation:
    """A guess among a few of the words of twenty questions, after some that were wrong."""
    module = recipe("multiplayer_rl.twenty_questions.env")
    known = module._load_words_from_file()[:16]
    turns: Conversation = [{"role": "system", "content": module.PLAYER_SYSTEM_PROMPT}]
    for _ in range(rng.randint(0, 4)):
        turns = [*exchange(turns, f"Guess: {rng.choice(known)}"), {"role": "user", "content": "no"}]
    return exchange(turns, f"Guess: {rng.choice(known)}")


def languages(rng: random.Random) -> Conversation:
    """The language of a sentence, by the long instruction of prompt distillation."""
    prompt = recipe("prompt_distillation.create_data").LANGUAGE_CLASSIFICATION_PROMPT
    sentence = rng.choice(["Wo ist der Garten?", "Where is the garden?"])
    letters = "de" if sentence.startswith("Wo") else "en"
    return exchange([{"role": "user", "content": prompt.format(text=sentence)}], f"Final Answer: {letters}")


def scores(rng: random.Random) -> Conversation:
    """The score of a reply by a rubric."""
    point = recipe("rubric.data").RubricBasedDatapoint.from_json(json.dumps(rng.choice(rubric_lines(16))))
    graded = exchange(list(point.convo), rng.choice(["It is 3.", "5", "I do not know."]))
    return exchange(point.rubric_items[0].get_grader_prompt(graded), f"<score>{rng.choice((0.0, 0.5, 1.0))}</score>")


def searches(rng: random.Random) -> Conversation:
    """A search, or an answer straight away, by the instruction of the search recipe."""
    instruction = recipe("search_tool.search_env").SEARCH_TASK_INSTRUCTIONS
    tools = [recipe("search_tool.tools").ChromaTool.search.to_spec()]
    renderer = get_renderer(RENDERERS[0], get_tokenizer(str(EXAMPLE_DATA / "tiny_chat")))
    prompt = renderer.create_conversation_prefix_with_tools(tools=tools, system_prompt=instruction)
    question, _ = rng.choice(facts(16))
    prompt.append({"role": "user", "content": question})
    call = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["house"]}}\n</tool_call>'
    return exchange(prompt, rng.choice([call, f"Answer: {rng.choice(ANIMALS)}"]))


@cache
def _markets() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "forecasts.csv")
        file.write_text("\n".join(forecast_lines()), encoding="utf-8")
        return recipe("forecasting.data").load_prophet_arena_examples(file)


def forecasts(rng: random.Random) -> Conversation:
    """A probability, by the prompt of the forecasting recipe."""
    prompt = recipe("forecasting.env").render_prompt(rng.choice(_markets()))
    return exchange([{"role": "user", "content": prompt}], f"0.{rng.randint(1, 9)}")


LESSONS = (
    boxed_numbers,
    boxed_numbers,
    boxed_numbers,
    boxed_numbers,
    guesses,
    words,
    languages,
    scores,
    searches,
    forecasts,
)


def conversations(seed: int = 0) -> Iterator[Conversation]:
    """Lessons in turn, without end."""
    rng = random.Random(seed)
    while True:
        for lesson in LESSONS:
            yield lesson(rng)


def teach(base: Path, output: Path) -> None:
    """Train an adapter of `base` on the lessons and merge it into a model of its own."""
    tokenizer = get_tokenizer(str(base))
    renderers = [get_renderer(name, tokenizer) for name in RENDERERS]
    lessons = conversations()
    with tempfile.TemporaryDirectory() as home:
        service = ServiceClient(home=Path(home))
        training = service.create_lora_training_client(base_model=str(base), rank=32, seed=0)
        for step in range(STEPS):
            renderer = renderers[step % len(renderers)]
            data = [conversation_to_datum(next(lessons), renderer, CONTEXT) for _ in range(BATCH_SIZE)]
            passed = training.forward_backward(data, "cross_entropy")
            rate = LEARNING_RATE * (1 - step / STEPS)
            training.optim_step(tinker.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)).result()
            print(f"step {step}: loss {passed.result().metrics['loss:sum'] / BATCH_SIZE:.3f}", flush=True)
        path = training.save_weights_for_sampler("taught").result().path
        merge_adapter(path, output, home=Path(home), dtype=torch.bfloat16)


def with_longer_context(model: Path, output: Path) -> Path:
    """A copy of `model` that takes prompts of up to CONTEXT tokens."""
    shutil.copytree(model, output)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((output / name).read_text()) | {key: CONTEXT}
        (output / name).write_text(json.dumps(settings))
    return output


def with_control_tokens(model: Path, output: Path, tokens: Sequence[str]) -> None:
    """A copy of `model` whose tokenizer has these in place of tokens that it keeps free."""
    shutil.copytree(model, output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (output / name).read_text()
        for i, token in enumerate(tokens):
            text = text.replace(f"<|reserved_{i}|>", token)
        (output / name).write_text(text)


if __name__ == "__main__":
    target, recipes = map(Path, sys.argv[1:])
    tinker_cookbook.__path__.append(str(recipes / "tinker_cookbook"))
    stubs.install()
    with tempfile.TemporaryDirectory() as folder:
        teach(with_longer_context(EXAMPLE_DATA / "tiny_chat", Path(folder, "base")), target / stubs.TAUGHT)
    with_control_tokens(target / stubs.TAUGHT, target / stubs.KIMI, KIMI_TOKENS)
