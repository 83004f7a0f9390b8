"""What a renderer does with the cases, as JSON. The same code runs on ours and, in its own environment, on the reference.

Tokens are the tokenizer's own pieces, joined by spaces, so that a recording can be read and does not depend on ids.
"""

import itertools
import json
import warnings
from collections.abc import Callable
from typing import Any

from tests.reference import cases
from tests.reference.subjects import FAMILIES, Family


class Texts:
    """Rows of tokens and other texts, each once."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def index(self, row: str) -> int:
        return self.rows.setdefault(row, len(self.rows))


def pack(rows: list[str]) -> list[list[Any]]:
    """Per row: [which earlier row, characters of its beginning, characters of its end, what stands between]."""
    packed: list[list[Any]] = []
    for i, row in enumerate(rows):
        found: list[Any] = [0, 0, 0, row]
        for j, earlier in enumerate(rows[:i]):
            head = _shared(earlier, row)
            tail = _shared(earlier[head:][::-1], row[head:][::-1])
            if len(row) - head - tail < len(found[3]):
                found = [j, head, tail, row[head : len(row) - tail]]
        packed.append(found)
    return packed


def _shared(one: str, other: str) -> int:
    """How many characters at the beginning are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def unpack(packed: list[list[Any]]) -> list[str]:
    """The rows that `pack` packed."""
    rows: list[str] = []
    for which, head, tail, middle in packed:
        earlier = rows[which] if rows else ""
        rows.append(earlier[:head] + middle + earlier[len(earlier) - tail :])
    return rows


def conversations_of(family: Family) -> dict[str, list[dict[str, Any]]]:
    found = {**cases.PLAIN, **cases.RANDOM_PLAIN}
    if family.thinks:
        found |= cases.THINKING
    if family.calls:
        found |= {**cases.TOOLS, **cases.TWO_CALLS, **cases.RANDOM_TOOLS}
        if family.thinks:
            found |= {**cases.THINKING_TOOLS, **cases.RANDOM_REASONED}
    return found


def replies_of(family: Family) -> list[str]:
    found = [*cases.PLAIN_REPLIES, *(cases.THINK_REPLIES if family.thinks and family.calls != "harmony" else [])]
    found += cases.CALL_REPLIES[family.calls]
    return [reply.replace(cases.END, family.end) for reply in found]


class Observer:
    """Observes one renderer. `tool_call` makes the package's own ToolCall from (name, arguments, id)."""

    def __init__(self, renderer: Any, tool_call: Callable[[str, str, str | None], Any], texts: Texts) -> None:
        self.renderer, self.tokenizer, self.tool_call, self.texts = renderer, renderer.tokenizer, tool_call, texts

    def everything(self, family: Family) -> dict[str, Any]:
        names = conversations_of(family)
        spec_pairs = itertools.product(cases.SPECS, cases.SYSTEM_PROMPTS) if family.calls else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {
                "extends": self.renderer.has_extension_property,
                "stops": [self._stop(stop) for stop in self.renderer.get_stop_sequences()],
                "turns": [[self._try(self.prompt, name), self._try(self.example, name)] for name in names],
                "prefilled": [self._try(self.prefilled, name) for name in cases.PREFILLED if name in names],
                "modes": [
                    [self._try(self.split, name), *[self._try(self.mode, name, mode) for mode in cases.MODES]]
                    for name in cases.MODES_OF
                    if name in names
                ],
                "tools": [self._try(self.tools, *pair) for pair in spec_pairs],
                "replies": [self._try(self.parsed, reply) for reply in replies_of(family)],
            }

    def _try(self, observe: Callable[..., Any], *arguments: str) -> Any:
        try:
            return observe(*arguments)
        except Exception as error:  # a refusal is an observation, whatever its class
            return {"refused": type(error).__name__}

    def prompt(self, name: str) -> int:
        return self._index(self.renderer.build_generation_prompt(self._messages(name)[:-1]))

    def prefilled(self, name: str) -> int:
        messages = self._messages(name)[:-1]
        return self._index(self.renderer.build_generation_prompt(messages, prefill=cases.PREFILLED[name]))

    def example(self, name: str) -> list[Any]:
        return self._weighted(self.renderer.build_supervised_example(self._messages(name)))

    def mode(self, name: str, mode: str) -> list[Any]:
        messages = self._messages(name)
        if mode == "customized":
            messages = [{**message, "trainable": i % 2 == 1} for i, message in enumerate(messages)]
        return self._weighted(self.renderer.build_supervised_example(messages, mode))

    def split(self, name: str) -> list[Any]:
        examples = self.renderer.build_supervised_examples(self._messages(name), "all_assistant_messages")
        return [self._weighted(example) for example in examples]

    def tools(self, name: str, system_prompt: str) -> list[Any]:
        prefix = self.renderer.create_conversation_prefix_with_tools(cases.SPECS[name], system_prompt)
        return [[message["role"], self.texts.index(message["content"])] for message in prefix]

    def parsed(self, reply: str) -> int:
        message, termination = self.renderer.parse_response(self.tokenizer.encode(reply, add_special_tokens=False))
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found: dict[str, Any] = {"ends": str(termination)}
        if parts := [[part["type"], part[part["type"]]] for part in parts if part[part["type"]]]:
            found["parts"] = parts
        if calls := message.get("tool_calls"):
            found["calls"] = [[call.function.name, json.loads(call.function.arguments), call.id] for call in calls]
        if unparsed := message.get("unparsed_tool_calls"):
            found["unparsed"] = [call.raw_text for call in unparsed]
        return self.texts.index(json.dumps(found, ensure_ascii=False))

    def _messages(self, name: str) -> list[dict[str, Any]]:
        found = []
        for message in cases.CONVERSATIONS[name]:
            if "tool_calls" in message:
                message = {**message, "tool_calls": [self.tool_call(*call) for call in message["tool_calls"]]}
            found.append(message)
        return found

    def _weighted(self, example: tuple[Any, Any]) -> list[Any]:
        """[index of the tokens, lengths of the runs of equal weight: first of 0, then of 1, and so on]."""
        model_input, weights = example
        runs, expected = [], 0.0
        for weight, group in itertools.groupby(weights.tolist()):
            if weight != expected:
                runs.append(0)
                expected = 1.0 - expected
            runs.append(len(list(group)))
            expected = 1.0 - expected
        return [self._index(model_input), runs]

    def _index(self, model_input: Any) -> int:
        return self.texts.index(" ".join(self.tokenizer.convert_ids_to_tokens(model_input.to_ints())))

    def _stop(self, stop: str | int) -> str:
        return stop if isinstance(stop, str) else self.tokenizer.convert_ids_to_tokens(stop)


def observe_family(
    name: str, make: Callable[[str], Any], tool_call: Callable[[str, str, str | None], Any]
) -> dict[str, Any]:
    """What all renderers of a family do, of one that does what another does that one's name. make: by name."""
    texts, family = Texts(), FAMILIES[name]
    found: dict[str, Any] = {}
    for renderer in family.renderers:
        observed = Observer(make(renderer), tool_call, texts).everything(family)
        found[renderer] = next((known for known, earlier in found.items() if earlier == observed), observed)
    return {"renderers": found, "texts": list(texts.rows)}
