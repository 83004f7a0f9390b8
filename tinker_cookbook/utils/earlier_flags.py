"""Flags and keys of earlier scripts: which `key=value` they stand for, and what to type to a recipe that has other keys."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

RUN_FLAGS = {
    "--mode": "mode={}",
    "--env": "task={}",
    "--dataset": "dataset={}",
    "--num-rollouts": "num_rollouts={}",
    "-n": "num_rollouts={}",
    "--num-groups": "num_groups={}",
    "--steps": "max_steps={}",
    "-s": "max_steps={}",
    "--seed": "seed={}",
    "--name": "name={}",
    "--model": "model_name={}",
    "--mock-judge": "judge=mock",
    "--confidence-judge": "judge=confidence",
    "--debate-train": "debate_train={}",
    "--debate-grpo-reward": "debate_reward={}",
    "--reward-fn": "reward_fn={}",
    "--temperature": "temperature={}",
    "--max-tokens": "max_tokens={}",
    "--min-p": "min_p={}",
    "--accept-min-reward": "accept_min_reward={}",
    "--accept-require-parse": "accept_require_parse=true",
    "--no-proxy": "",
}
"""Flag of scripts/train.py -> key of a recipe; {} is its value. There is no proxy to leave out."""

EARLIER_KEYS = {
    "n_batches": "max_steps",
    "num_batches": "max_steps",
    "steps": "max_steps",
    "batch_size": "groups_per_batch",
    "num_groups": "groups_per_batch",
    "max_new_tokens": "max_tokens",
}
"""Key of an earlier config -> that of a recipe. It counts where a recipe has the second and not the first."""


class UnknownFlagError(ValueError):
    """A flag that is none, or one without its value."""


def to_keys(arguments: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """The `key=value` arguments that flags stand for; what is one already stays.

    Raises UnknownFlagError, which says which flags there are.
    """
    keys, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in flags:
            if word.startswith("-") or not equals:
                raise UnknownFlagError(
                    f"{word!r} is not known; there are {', '.join(flags)}, and the recipe's own key=value"
                )
            keys.append(word)
        elif "{}" not in flags[flag]:
            if equals:
                raise UnknownFlagError(f"{flag} takes no value, got {value!r}")
            keys += [flags[flag]] if flags[flag] else []
        elif not equals and (not rest or rest[0] in flags):
            raise UnknownFlagError(f"{flag} needs a value")
        else:
            keys.append(flags[flag].format(value if equals else rest.pop(0)))
    return keys


def what_to_type(keys: Collection[str], arguments: Sequence[str], prog: str) -> str | None:
    """The line to type in place of one that has flags or keys of earlier scripts; None: it has none of them.

    Args:
        keys: of the recipe; of those that are configs, the first part of their names.
        prog: the command, without its arguments.

    Returns:
        One line: the command, or which of the flags the recipe has no key for.
    """
    found = [word for word in arguments if _is_earlier(word, keys)]
    if not found:
        return None
    own = {flag: text for flag, text in RUN_FLAGS.items() if _name(text) in keys}
    written = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    spelt = {flag: f"{key}={{}}" for flag in written if _first(key := flag[2:].replace("-", "_")) in keys}
    try:
        typed = _in_keys(keys, to_keys(arguments, {**RUN_FLAGS, **spelt, **own}))
    except UnknownFlagError as error:
        return str(error)
    return f"{found[0]} is written otherwise here; type {prog} {shlex.join(typed)}"


def _is_earlier(word: str, keys: Collection[str]) -> bool:
    name, equals, _ = word.partition("=")
    if equals and _first(name.lstrip("-")) in keys:
        return False
    is_flag = name in RUN_FLAGS or (name.startswith("--") and _first(name[2:].replace("-", "_")) in keys)
    return is_flag or (bool(equals) and EARLIER_KEYS.get(name) in keys)


def _name(text: str) -> str:
    return text.partition("=")[0]


def _first(key: str) -> str:
    return key.partition(".")[0]


def _in_keys(keys: Collection[str], typed: Sequence[str]) -> list[str]:
    """The arguments with the recipe's keys. Where groups have a size, the rollouts are as many groups as are given, or one."""
    given = {name: value for name, _, value in (text.partition("=") for text in typed)}
    found = list[str]()
    for text in typed:
        name, _, value = text.partition("=")
        if _first(name) in keys:
            found.append(text)
        elif EARLIER_KEYS.get(name) in keys:
            found.append(f"{EARLIER_KEYS[name]}={value}")
        elif name == "num_rollouts" and {"group_size", "groups_per_batch"} <= {*keys}:
            groups = given.get("num_groups") or given.get("groups_per_batch") or "1"
            if not (value.isdecimal() and groups.isdecimal() and int(groups) and int(value) % int(groups) == 0):
                raise UnknownFlagError(f"{value} rollouts cannot be {groups} groups of one size; type group_size=")
            one = [] if given.keys() & {"num_groups", "groups_per_batch"} else ["groups_per_batch=1"]
            found += [*one, f"group_size={int(value) // int(groups)}"]
        else:
            raise UnknownFlagError(f"{text}: there is no key {name} here; leave it out, or see --help for the keys")
    return found
