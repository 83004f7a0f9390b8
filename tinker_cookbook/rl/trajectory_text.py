"""Format rollouts for people, not for parsing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tinker_cookbook.renderers import media
from tinker_cookbook.renderers.datum_text import with_escapes
from tinker_cookbook.renderers.decoding import decode_tokens
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer

OBSERVATION, ACTION, REWARD = "yellow", "green", "cyan"


def format_trajectory(trajectory: Trajectory, tokenizer: Tokenizer, only_last_transition: bool = False) -> str:
    """The observation, action and reward of each turn, with terminal colours.

    Args:
        only_last_transition: show only the last turn of a long episode; its observation usually contains the earlier
            turns.
    """
    text = Text()
    first = max(0, len(trajectory.transitions) - 1) if only_last_transition else 0
    for number, turn in enumerate(trajectory.transitions[first:], start=first):
        text.append(f"--- turn {number}: observation, {turn.ob.length} tokens\n", style="dim")
        text.append(media.decode(media.elements(turn.ob), tokenizer) + "\n", style=OBSERVATION)
        text.append(
            f"--- turn {number}: action, {len(turn.ac.tokens)} tokens, stop: {turn.ac.stop_reason}\n", style="dim"
        )
        text.append(decode_tokens(tokenizer, turn.ac.tokens) + "\n", style=ACTION)
        text.append(f"--- turn {number}: reward {turn.reward:g}", style=REWARD)
        numbers = "".join(f", {name} {value:g}" for name, value in turn.metrics.items())
        text.append(f"{numbers}{', done' if turn.episode_done else ''}\n", style=REWARD)
    return with_escapes(text)


MOST_SHOWN = 300
"""Maximum characters of a text in `one_example`."""


def one_example(groups: Sequence[TrajectoryGroup], tokenizer: Tokenizer) -> str | None:
    """One question with a reply, the answer if known, and the reward, one per line.

    None: no member has a reply.
    """
    for group in groups:
        rewards = [f"{reward:.3g}" for reward in group.get_total_rewards()]
        for member in group.members():
            last = member.trajectory.transitions[-1]
            if not last.ac.tokens:
                continue
            question = member.info.get("question") or media.decode(media.elements(last.ob), tokenizer)[-MOST_SHOWN:]
            rows = {"question": question, "reply": decode_tokens(tokenizer, last.ac.tokens)}
            if (answer := member.info.get("ground_truth")) is not None:
                rows["answer"] = answer
            lines = [f"  {name}: {_in_one_line(str(text))}" for name, text in rows.items()]
            return "\n".join(
                ["For example:", *lines, f"  reward: {rewards[member.index]} (its group: {' '.join(rewards)})"]
            )
    return None


def _in_one_line(text: str) -> str:
    shown = text.replace("\n", "\\n")
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
