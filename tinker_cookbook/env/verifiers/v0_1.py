"""The classes that single-turn environments for verifiers 0.1 use: SingleTurnEnv, Rubric and parsers, without the
package.

Names, arguments, prompts and parsing follow verifiers 0.1.3. Nothing here plays or scores an episode: the objects
follow the `load_environment` contract, which does. `stand_in` provides them as the module `verifiers` to environments
that import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from tinker_cookbook.exceptions import ConfigurationError

Messages: TypeAlias = str | list[dict[str, Any]]
State: TypeAlias = dict[str, Any]
Info: TypeAlias = dict[str, Any]

_RUN_DECIDES = {
    "client": "the run's model replies",
    "model": "the run's model replies; give it as model.base_model",
    "sampling_args": "sampling is that of the run; give temperature and max_new_tokens in [trainer]",
    "oai_tools": "an environment of one turn has no tools here; install verifiers for ToolEnv",
}
"""Arguments of 0.1 that have no effect here, and their replacements."""


class Parser:
    """Parses a reply: `extract_fn` of its text."""

    def __init__(self, extract_fn: Callable[[str], Any] = lambda text: text, **attributes: Any):
        self.extract_fn = extract_fn
        vars(self).update(attributes)

    def parse(self, text: str) -> Any:
        """The parsed text."""
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages) -> Any:
        """The answer in a text, or in the last of several messages."""
        return self.parse(completion if isinstance(completion, str) else completion[-1]["content"])

    def get_assistant_messages(self, completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _of_role(completion, "assistant")

    def get_system_messages(self, completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _of_role(completion, "system")

    def get_user_messages(self, completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _of_role(completion, "user")

    def get_tool_messages(self, completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _of_role(completion, "tool")

    def format_score(self, text: str) -> float:
        """How well one message follows the format, from 0 to 1."""
        return 1.0

    def get_format_reward_func(self) -> Callable[..., float]:
        """A function for a rubric: the mean of `format_score` over the messages of the assistant."""

        def format_reward_func(completion: list[dict[str, Any]]) -> float:
            scores = [self.format_score(message["content"]) for message in self.get_assistant_messages(completion)]
            return sum(scores) / len(scores) if scores else 0.0

        return format_reward_func


def _of_role(messages: Iterable[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["role"] == role]


class ThinkParser(Parser):
    """Reads what follows the last </think>; a reply without it is empty."""

    def parse(self, text: str) -> Any:
        _, closed, rest = text.rpartition("</think>")
        return self.extract_fn(rest.strip() if closed else "")

    def format_score(self, text: str) -> float:
        once = text.count("<think>") == 1 and text.count("</think>") == 1
        return float(once and text.strip().startswith("<think>") and not text.endswith("</think>"))


class XMLParser(Parser):
    """Reads fields between tags, <name>...</name>.

    fields: names, or tuples of synonyms for one field; the first is used for writing.
    answer_field: the field that `parse_answer` reads.
    """

    def __init__(self, fields: Sequence[str | tuple[str, ...]], answer_field: str = "answer"):
        super().__init__()
        self._names: list[tuple[str, ...]] = [(one,) if isinstance(one, str) else tuple(one) for one in fields]
        self.answer_field = answer_field
        if not self._names or not all(self._names):
            raise ValueError(f"fields={fields!r}: give at least one name, and no empty tuple")
        first = self.get_fields()
        if twice := {name for name in first if first.count(name) > 1}:
            raise ValueError(f"fields: the name {min(twice)} comes twice")

    def get_fields(self) -> list[str]:
        """The names to write."""
        return [names[0] for names in self._names]

    def parse(self, text: str, strip: bool = True, last: bool = False) -> Any:
        """An object with each name as an attribute: the text between its first tags (`last`: its last tags), or None."""
        fields: dict[str, str | None] = {}
        for name in (name for names in self._names for name in names):
            inside = re.findall(rf"<{name}>\s*(.*?)\s*</{name}>", text, re.DOTALL)
            fields[name] = inside[-1 if last else 0] if inside else None
        return SimpleNamespace(**{name: value.strip() if strip and value else value for name, value in fields.items()})

    def parse_answer(self, completion: Messages) -> str | None:
        """The answer field: the last one in a text, or the first one in the last assistant message that has it."""
        if isinstance(completion, str):
            return getattr(self.parse(completion, last=True), self.answer_field, None)
        parsed = [self.parse(message["content"]) for message in self.get_assistant_messages(completion)]
        answers = [getattr(one, self.answer_field, None) for one in parsed]
        return next((answer for answer in reversed(answers) if answer is not None), None)

    def get_format_str(self) -> str:
        """The format, for use in a prompt."""
        tags = [names[0] if len(names) == 1 else f"[ {' | '.join(names)} ]" for names in self._names]
        return "\n".join(f"<{tag}>\n...\n</{tag}>" for tag in tags)

    def format(self, **values: Any) -> str:
        """Values in their tags. Raises ValueError for a field without one."""
        parts = []
        for names in self._names:
            value = next((values[name] for name in names if values.get(name) is not None), None)
            if value is None:
                raise ValueError(f"there is no value for the field {names[0]}; give one of {', '.join(names)}")
            parts.append(f"<{names[0]}>\n{value}\n</{names[0]}>")
        return "\n".join(parts)

    def format_score(self, text: str) -> float:
        """0.4 for the share of fields whose tags are present if one is complete, 0.2 each for beginning with a tag of
        the first field and ending with one of the last, and 0.2.
        """
        read, bare = vars(self.parse(text)), text.strip()
        there = [any(f"<{name}>" in text or f"</{name}>" in text for name in names) for names in self._names]
        is_whole = any(value is not None for value in read.values())
        begins = any(bare.startswith(f"<{name}>") for name in self._names[0])
        ends = any(bare.endswith(f"</{name}>") for name in self._names[-1])
        return 0.4 * is_whole * sum(there) / len(there) + 0.2 + 0.2 * begins + 0.2 * ends


class Rubric:
    """Reward functions with weights; functions may take `parser` by this name.

    Attributes:
        funcs, weights: also as reward_funcs and reward_weights.
        class_objects: other values that functions may take by name.
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any]] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        **attributes: Any,
    ):
        self.funcs = self.reward_funcs = list(funcs or ())
        self.weights = self.reward_weights = list(weights or [1.0] * len(self.funcs))
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        vars(self).update(attributes)

    def add_reward_func(self, func: Callable[..., Any], weight: float = 1.0) -> None:
        """Add a function."""
        self.funcs.append(func)
        self.weights.append(weight)

    def get_reward_funcs(self) -> list[Callable[..., Any]]:
        return self.funcs

    def get_reward_weights(self) -> list[float]:
        return self.weights

    def get_reward_func_names(self) -> list[str]:
        return [function.__name__ for function in self.funcs]


class Environment:
    """Questions with a rubric. A row has `question`, or `prompt`: the whole conversation.

    Raises ConfigurationError: no dataset, an unsupported argument, `system_prompt` or `few_shot` together with rows
    that have `prompt`, where 0.1 ignores them.
    """

    def __init__(
        self,
        dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        few_shot: Sequence[Mapping[str, Any]] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        message_type: str = "chat",
        **attributes: Any,
    ):
        if message_type != "chat":
            raise ConfigurationError(f"message_type={message_type!r}: only chat can be played; leave it out")
        for name in attributes.keys() & _RUN_DECIDES.keys():
            if attributes[name] is not None:
                raise ConfigurationError(f"{type(self).__name__}({name}=...): {_RUN_DECIDES[name]}")
        if dataset is None:
            raise ConfigurationError(f"{type(self).__name__}(dataset=None): there is nothing to train on; give dataset")
        self.dataset = list(dataset)
        self.eval_dataset = None if eval_dataset is None else list(eval_dataset)
        self.system_prompt, self.few_shot, self.message_type = system_prompt, few_shot, message_type
        self.parser, self.rubric = parser or Parser(), rubric or Rubric()
        vars(self).update(attributes)
        whole = any(row.get("prompt") is not None for row in [*self.dataset, *(self.eval_dataset or ())])
        if whole and (system_prompt or few_shot):
            raise ConfigurationError(
                f"{type(self).__name__}: rows with `prompt` are whole conversations, which verifiers 0.1 shows without "
                "system_prompt and few_shot; drop those two, or give rows with `question`"
            )

    def get_dataset(self) -> list[Mapping[str, Any]]:
        return self.dataset

    def get_eval_dataset(self) -> list[Mapping[str, Any]]:
        return self.dataset if self.eval_dataset is None else self.eval_dataset

    def get_reward_funcs(self) -> list[Callable[..., Any]]:
        return self.rubric.get_reward_funcs()

    def get_reward_weights(self) -> list[float]:
        return self.rubric.get_reward_weights()


class SingleTurnEnv(Environment):
    """One question, one reply."""
