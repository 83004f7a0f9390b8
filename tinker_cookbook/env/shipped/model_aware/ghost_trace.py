"""Ghost trace: encode a word as five integers, scored by the word's probability given the integers.

Measured: whether the policy has a code that it can read back. The listener, the same snapshot as the speaker, sees
only the five numbers; the score is its mean logprob per token of the word, plus 10.
Range: -10 to 10; -20 for a reply that is not exactly five integers from 0 to 999, separated by commas or spaces.
Known hacks: the listener's prior. Training moves listener and speaker together, so the words of the bank become likely
after any numbers, or after one sequence used for all words. A code of letters (1 for A) is not a hack, just a poor
code.
Control: `specific`, the gain over no numbers at all minus the same gain of another word of the bank, in nats per
token. A sequence that says nothing about the word scores 0 on average, whatever its reward. `gain` alone is the prior
control.
"""

import re
from types import SimpleNamespace
from typing import Any

from tinker_cookbook.env.scoring import Rubric
from tinker_cookbook.env.shipped.model_aware.model_scores import MINDS, answer_logprobs, encode
from tinker_cookbook.exceptions import ConfigurationError

COUNT, HIGHEST = 5, 999
LOWEST_LOGPROB, OFFSET, MALFORMED = -20.0, 10.0, -20.0
HELD_OUT = 8
"""One word in this many is for evaluation, however many of the bank are trained on."""
_NUMBER = "(?:0|[1-9][0-9]{0,2})"
_TRACE = re.compile(rf"{_NUMBER}(?:(?:[ \t\n]*,[ \t\n]*|[ \t\n]+){_NUMBER}){{{COUNT - 1}}}")


def parse_trace(reply: str) -> tuple[int, ...] | None:
    """Parse a reply of exactly five integers; None for anything else: more, fewer, out of range, with other text."""
    text = reply.strip(" \t\n")
    return tuple(map(int, re.findall("[0-9]+", text))) if _TRACE.fullmatch(text) else None


def word_bank() -> list[str]:
    """The shipped words, capitalised, without duplicates."""
    return (MINDS / "words.txt").read_text(encoding="utf-8").split()


def prompt_for(word: str) -> str:
    """The speaker's prompt."""
    return (
        f"Target: {word}. Write exactly {COUNT} integers from 0 to {HIGHEST} that stand for this word, so that you would guess "
        "it from them. Write only the numbers, separated by commas."
    )


def heard(trace: tuple[int, ...] | None) -> str:
    """The listener's prompt: only the numbers. None: no numbers, which gives its prior."""
    return f"Sequence: {', '.join(map(str, trace or ()))}. Guess the object:"


async def listen(info: dict[str, Any], trace: tuple[int, ...] | None, word: str) -> float:
    """The listener's mean logprob per token of a word, at least -20."""
    tokenizer = info["tokenizer"]
    logprobs = await answer_logprobs(
        info["sampling_client"], encode(tokenizer, heard(trace)), encode(tokenizer, f" {word}")
    )
    return max(LOWEST_LOGPROB, float(logprobs.mean()))


async def trace_reward(completion: str, answer: str, info: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Reward and controls of one reply."""
    trace = parse_trace(completion)
    if trace is None:
        return MALFORMED, {"format": 0.0}
    decoy = info["decoy"]
    prior, prior_decoy = [
        await info["group"].once(("ghost_trace prior", word), lambda word=word: listen(info, None, word))
        for word in (answer, decoy)
    ]
    score, score_decoy = await listen(info, trace, answer), await listen(info, trace, decoy)
    gain = score - prior
    metrics = {"format": 1.0, "gain": gain, "specific": gain - (score_decoy - prior_decoy)}
    return score + OFFSET, metrics


def load_environment(words: int | None = None) -> Any:
    """The words of the bank, or the first `words` of them; every eighth word of the bank is held out.

    Raises ConfigurationError for a number of words outside the bank's size.
    """
    bank = word_bank()
    if words is not None and not HELD_OUT <= words <= len(bank):
        raise ConfigurationError(f"words={words}: must be from {HELD_OUT} to {len(bank)}, the words of the bank")
    return SimpleNamespace(
        dataset=[row for i, row in enumerate(_rows(bank[:words])) if i % HELD_OUT],
        eval_dataset=_rows(bank)[::HELD_OUT],
        rubric=Rubric([trace_reward]),
        needs=("sampling_client",),
    )


def _rows(words: list[str]) -> list[dict[str, Any]]:
    """A row per word, with another word as its decoy."""
    return [
        {"id": word, "prompt": prompt_for(word), "answer": word, "info": {"decoy": words[i - len(words) // 2]}}
        for i, word in enumerate(words)
    ]
