"""Trains the tiny model from scratch: a plain loop over length-sorted batches, one pass over the corpus.

The loss is the cross-entropy of the assistant's text, plus a small share of the rest, so that the model learns the language of
its prompts. The same settings and seed give the same weights, bit for bit, on the same machine.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.make_tiny_model.corpus import WRITTEN, Turns, segments
from tools.make_tiny_model.tokenizer import CONTEXT_LENGTH, PAD, STOP, token_id

# Loss weights of the few tokens that carry a decision, which the many tokens of mere form would outweigh.
ANSWER_WEIGHT = 2.0  # a digit after <SOLUTION>, in a turn of the model
SHOWN_ANSWER_WEIGHT = 0.3  # the same in a prompt: expecting an answer helps to judge it
VERDICT_WEIGHT = 8.0  # the token after <VERDICT>
WINDOW = 4000  # conversations sorted by length together; batches are shuffled within a window


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Size of the network. The head size is 32 throughout."""

    hidden_size: int = 192
    layers: int = 5
    heads: int = 6
    kv_heads: int = 2
    mlp_size: int = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """How to optimise. `max_steps` ends the run early without changing the learning rate of the steps before."""

    learning_rate: float = 2e-3
    batch_tokens: int = 4096
    warmup_steps: int = 60
    weight_decay: float = 0.05
    max_steps: int | None = None
    bfloat16: bool = True
    """matrix products in bfloat16, which is faster for wide networks"""


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    ids: list[int]
    weights: list[float]  # loss weight of predicting the id at the same index


def new_model(
    shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int, context_length: int = CONTEXT_LENGTH
) -> Qwen3ForCausalLM:
    """A Qwen3 network with fresh weights. The global random state is left as it was."""
    stop, pad = token_id(tokenizer, STOP), token_id(tokenizer, PAD)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _ids(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert isinstance(ids, list)  # a list of tokens gives a list of ids
    return ids


def encode(
    conversations: Iterable[Turns], tokenizer: PreTrainedTokenizerFast, context_length: int = CONTEXT_LENGTH
) -> list[Encoded]:
    """Tokens of each conversation, piece by piece, and the loss weight of each token; truncated to the context length."""
    cut = [segments(turns) for turns in conversations]
    pieces = [piece for parts in cut for piece, _ in parts]
    ids = iter(tokenizer(pieces, add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]
    encoded = []
    solution, end, verdict = _ids(tokenizer, ["<SOLUTION>", "</SOLUTION>", "<VERDICT>"])
    digits = set(_ids(tokenizer, list("0123456789")))
    for parts in cut:
        tokens: list[int] = []
        weights: list[float] = []
        for _, piece_weight in parts:
            in_solution, before = False, None
            is_written = piece_weight >= WRITTEN
            for token in next(ids):
                weight = piece_weight
                if in_solution and token in digits:
                    weight = ANSWER_WEIGHT if is_written else SHOWN_ANSWER_WEIGHT
                elif is_written and before == verdict:
                    weight = VERDICT_WEIGHT
                in_solution = (in_solution or token == solution) and token != end
                before = token
                tokens.append(token)
                weights.append(weight)
        encoded.append(Encoded(tokens[:context_length], weights[:context_length]))
    return encoded


def batches(examples: list[Encoded], batch_tokens: int, rng: random.Random) -> Iterator[list[Encoded]]:
    """Batches of similar lengths, at most `batch_tokens` including padding, in random order within a window."""
    for start in range(0, len(examples), WINDOW):
        window = sorted(examples[start : start + WINDOW], key=lambda e: len(e.ids))
        made: list[list[Encoded]] = [[]]
        for example in window:
            if made[-1] and len(example.ids) * (len(made[-1]) + 1) > batch_tokens:
                made.append([])
            made[-1].append(example)
        rng.shuffle(made)
        yield from made


def collate(batch: list[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (B, T) and weights (B, T), padded on the right, which causal attention never sees."""
    width = max(len(e.ids) for e in batch)
    ids = torch.full((len(batch), width), pad)
    weights = torch.zeros(len(batch), width)
    for row, e in enumerate(batch):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        weights[row, : len(e.ids)] = torch.tensor(e.weights)
    return ids, weights


def rate(step: int, total: int, warmup: int) -> float:
    """Learning rate multiplier: linear warm-up, then a cosine down to 2 %."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_of(model: torch.nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, not on norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.98), fused=True)


def train(
    model: Qwen3ForCausalLM,
    stages: list[list[Encoded]],
    schedule: Schedule,
    seed: int,
    report: Callable[[str], None] = print,
) -> None:
    """Trains `model` in place, one pass over the stages in order."""
    rng = random.Random(seed)
    plan = [batch for examples in stages for batch in batches(examples, schedule.batch_tokens, rng)]
    total = len(plan)
    optimizer = optimizer_of(model, schedule)
    pad = model.config.pad_token_id
    assert isinstance(pad, int)
    started, seen, recent = time.monotonic(), 0, 0.0
    model.train()
    for step, batch in enumerate(plan[: schedule.max_steps]):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * rate(step, total, schedule.warmup_steps)
        ids, weights = collate(batch, pad)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=schedule.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        target_weights = weights[:, 1:].flatten()
        loss = (losses * target_weights).sum() / target_weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += ids.numel()
        recent = loss.item() if step == 0 else 0.98 * recent + 0.02 * loss.item()
        if step % 50 == 0 or step == total - 1:
            seconds = time.monotonic() - started
            report(f"step {step + 1}/{total}  loss {recent:.3f}  {seen / seconds:,.0f} tokens/s  {seconds:.0f} s")
    model.eval()
