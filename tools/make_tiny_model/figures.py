"""Measures whether a tiny model stops, keeps to its tags and knows its sums, by sampling from it at temperature 1.

    python -m tools.make_tiny_model.figures model=example_data/tiny_chat

Prompts are those of the recipes: the shipped questions and articles, debates of the model with itself, and the model as their
judge. Computed in float32, whatever the dtype of the weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chz
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinker_cookbook.backends import check_backend
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.env.qa import QA_SYSTEM
from tinker_cookbook.env.shipped.questions.summary import SUMMARY_SYSTEM
from tinker_cookbook.utils.files import read_jsonl
from tools.make_tiny_model import chat
from tools.make_tiny_model.arithmetic import QA_CONFIDENCE_SYSTEM
from tools.make_tiny_model.debates import JUDGE_CONTEXT_CHARS, SUMMARY_CONFIDENCE_SYSTEM, Debate, Seat

SOLUTION = re.compile(r"<SOLUTION>(.*?)</SOLUTION>", re.DOTALL)
CONFIDENCE = re.compile(r"<CONFIDENCE>(?:0(?:\.\d+)?|1(?:\.0+)?)</CONFIDENCE>")
VERDICT = re.compile(r"<VERDICT>(A|B|TIE)</VERDICT>")
MAX_NEW_TOKENS = 96
BATCH = 128

Turns = list[tuple[str, str]]


class Sampler:
    """The model with its tokenizer, and a count of its replies that ended with the stop token."""

    def __init__(self, folder: str | Path, longest: int = MAX_NEW_TOKENS) -> None:
        self.longest = longest
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.stop = self.tokenizer.eos_token_id
        self.turns = 0
        self.ended = 0

    def __call__(self, prompts: list[Turns], greedy: bool = False) -> list[tuple[str, bool]]:
        """One reply to each prompt, in order: its text without the stop token, and whether it ended."""
        order = sorted(range(len(prompts)), key=lambda i: sum(len(content) for _, content in prompts[i]))
        replies: dict[int, tuple[str, bool]] = {}
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            for i, reply in zip(chosen, self._batch([prompts[i] for i in chosen], greedy), strict=True):
                replies[i] = reply
        return [replies[i] for i in range(len(prompts))]

    def _batch(self, prompts: list[Turns], greedy: bool) -> list[tuple[str, bool]]:
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in turns],
                tokenize=False,
                add_generation_prompt=True,
            )
            for turns in prompts
        ]
        inputs = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        how: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=self.longest,
                eos_token_id=self.stop,
                pad_token_id=self.tokenizer.pad_token_id,
                temperature=None if greedy else 1.0,
                **how,
            )
        replies = []
        for row in out[:, inputs["input_ids"].shape[1] :].tolist():
            ended = self.stop in row
            tokens = row[: row.index(self.stop)] if ended else row
            replies.append((self.tokenizer.decode(tokens), ended))
        if not greedy:
            self.turns += len(replies)
            self.ended += sum(ended for _, ended in replies)
        return replies


def mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else float("nan")


def solution(reply: str) -> str | None:
    match = SOLUTION.search(reply)
    return match.group(1).strip() if match else None


def measure(model_dir: str | Path, seed: int = 0, samples: int = 4) -> dict[str, float]:
    """Figures of a model folder, each a rate from 0 to 1.

    `samples` is the number of replies to each held-out question and article; at least 2, since debates pair them.
    The global random state is left as it was.
    """
    if samples < 2:
        raise ValueError(f"samples must be 2 or more, got {samples}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _measure(Sampler(model_dir), samples)


def _measure(sampler: Sampler, samples: int) -> dict[str, float]:
    train, test = (read_jsonl(EXAMPLE_DATA / "qa" / f"arithmetic_{part}.jsonl") for part in ("train", "test"))
    figures: dict[str, float] = {}
    tags: list[bool] = []

    def asked(items: list[dict], greedy: bool = False) -> float:
        replies = sampler([[("system", QA_SYSTEM), ("user", item["question"])] for item in items], greedy)
        tags.extend(solution(text) is not None for text, _ in replies if not greedy)
        return mean([solution(text) == item["answer"] for (text, _), item in zip(replies, items, strict=True)])

    figures["arithmetic_accuracy_train"] = asked(train * 2)
    figures["arithmetic_accuracy_test"] = asked(test * samples)
    figures["arithmetic_greedy_accuracy_train"] = asked(train, greedy=True)
    figures["arithmetic_greedy_accuracy_test"] = asked(test, greedy=True)
    figures["tag_rate"] = mean(tags)

    articles = read_jsonl(EXAMPLE_DATA / "summary" / "articles_test.jsonl")
    figures |= _summaries(sampler, articles * samples)

    sums = [(QA_CONFIDENCE_SYSTEM, item["question"], item["question"]) for item in test * samples]
    news = [(SUMMARY_CONFIDENCE_SYSTEM, a["article"], a["article"][:JUDGE_CONTEXT_CHARS]) for a in articles * samples]
    debates, openings = _debates(sampler, sums + news)
    figures["confidence_rate"] = mean([bool(CONFIDENCE.search(text)) for text in openings])
    speeches = [text for debate in debates for seat in (debate.a, debate.b) for text in seat.rounds[1:]]
    figures["debate_speech_rate"] = mean([bool(text) for text in speeches])
    figures |= _verdicts(sampler, debates, {item["question"]: item["answer"] for item in test})

    sampler([[("user", question)] for question in (*chat.FACTS, *chat.GREETINGS, *chat.FAREWELLS)])
    return {"stop_rate": sampler.ended / sampler.turns} | figures


def _summaries(sampler: Sampler, articles: list[dict]) -> dict[str, float]:
    replies = sampler([[("system", SUMMARY_SYSTEM), ("user", a["article"])] for a in articles])
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = [
        scorer.score(a["highlights"], solution(text) or "")["rougeL"].fmeasure
        for (text, _), a in zip(replies, articles, strict=True)
    ]
    return {
        "summary_rouge_l": mean(scores),
        "summary_tag_rate": mean([bool(solution(text)) for text, _ in replies]),
    }


def _debates(sampler: Sampler, cases: list[tuple[str, str, str]]) -> tuple[list[Debate], list[str]]:
    """The model against itself, with two answers to each (system, question, context). A cut-off speech counts as empty.

    Returns the debates and all opening answers.
    """
    asked = [[("system", system), ("user", question)] for system, question, _ in cases]
    first = [text for text, _ in sampler(asked)]
    second = [text for text, _ in sampler(asked)]
    debates = [
        Debate(system, question, context, Seat(solution(a), 0, [a, "", ""]), Seat(solution(b), 0, [b, "", ""]))
        for (system, question, context), a, b in zip(cases, first, second, strict=True)
    ]
    for closing in (False, True):
        # The turns up to the speech to be written; later rounds are still empty.
        upto = 6 if closing else 4
        views = [view for debate in debates for view in (debate.seen_by_a(), debate.swapped().seen_by_a())]
        speeches = iter(sampler([view[:upto] for view in views]))
        for debate in debates:
            for seat in (debate.a, debate.b):
                text, ended = next(speeches)
                seat.rounds[1 + closing] = text if ended else ""
    return debates, first + second


def _verdicts(sampler: Sampler, debates: list[Debate], answers: Mapping[str, str]) -> dict[str, float]:
    """Every debate judged twice, with the seats swapped the second time."""
    shown = debates + [debate.swapped() for debate in debates]
    replies = sampler([debate.seen_by_judge() for debate in shown])
    verdicts = [VERDICT.search(text) for text, _ in replies]
    right, first_seat = [], []
    for debate, match in zip(shown, verdicts, strict=True):
        truth = answers.get(debate.question)
        if truth is None or match is None or (debate.a.answer == truth) == (debate.b.answer == truth):
            continue
        right.append(match.group(1) == ("A" if debate.a.answer == truth else "B"))
        if match.group(1) != "TIE":
            first_seat.append(match.group(1) == "A")
    return {
        "verdict_rate": mean([match is not None for match in verdicts]),
        "judge_accuracy": mean(right),
        "judge_first_seat_rate": mean(first_seat),
    }


def table(figures: Mapping[str, float]) -> str:
    """The figures as a Markdown table."""
    width = max(len(name) for name in figures)
    rows = [f"| {name:<{width}} | {value:6.3f} |" for name, value in figures.items()]
    return "\n".join([f"| {'figure':<{width}} |  value |", f"|{'-' * (width + 2)}|-------:|", *rows])


@chz.chz(typecheck=True)
class CLIConfig:
    """Which folder to measure."""

    model: str = chz.field(default="example_data/tiny_chat", doc="model folder")
    seed: int = chz.field(default=0, doc="seed of the sampling")
    samples: int = chz.field(default=4, doc="replies to each held-out question and article, 2 or more")


def main(config: CLIConfig) -> None:
    check_backend("local", config.model, field="model")
    print(table(measure(config.model, config.seed, config.samples)))


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
