"""Limits of rollouts, the handling of replies that cannot be parsed, and the rewards of rollouts that hit a limit.

Only settings: `rollout_runner` and the envs enforce limits and parse errors; `rollouts` applies the rewards.
"""

from typing import Any, Literal, TypeAlias

import chz

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.rl.types import StopReason
from tinker_cookbook.utils.fields import FieldGroup

ToolExecution: TypeAlias = Literal["parallel", "sequential"]
"""How the tool calls of one reply run."""

ToolErrors: TypeAlias = Literal["answer", "end", "raise"]
"""The reaction to a tool call that cannot be parsed, or an exception inside a tool: a tool message with the error, the end of the
episode, or the end of the run."""

MAX_GROUPS_IN_FLIGHT = 1024
"""Groups that are sampled at a time, by default. Each keeps its environments, prompts and replies."""


def _positive_or_none(owner: Any, attribute: str) -> None:
    value = getattr(owner, attribute)
    if value is not None and value <= 0:
        field = attribute.removeprefix("X_")
        raise ConfigurationError(f"{field}={value}: must be positive, or None for no limit")


def not_negative(owner: Any, attribute: str) -> None:
    """A validator for fields that may be None."""
    value = getattr(owner, attribute)
    if value is not None and value < 0:
        raise ConfigurationError(f"{attribute.removeprefix('X_')}={value}: must be at least 0")


def _limit(doc: str) -> Any:
    return chz.field(default=None, doc=f"{doc}; None: no limit", validator=_positive_or_none)


@chz.chz(typecheck=True)
class RolloutLimits:
    """Limits of one rollout. A rollout that reaches one ends with the turns that it has; only a sampling call that
    takes too long is an error, because it leaves no turn to keep.
    """

    max_turns: int | None = _limit("turns of the policy")
    max_trajectory_tokens: int | None = _limit("tokens of a prompt and its reply, so of the whole conversation")
    max_sampled_tokens: int | None = _limit("tokens that the policy samples in all turns together")
    max_tool_calls: int | None = _limit("tool calls in all turns together; the env counts them")
    max_turn_tokens: int | None = _limit("tokens of one reply; the rollout continues after a reply that is cut off")
    rollout_timeout_seconds: float | None = _limit("seconds from the first observation to the end")
    sampling_turn_timeout_seconds: float | None = _limit("seconds of one sampling call; beyond it the rollout fails")


DEFAULT_RETRY_MESSAGE_TEMPLATE = (
    "Your last message has a formatting issue and could not be read: {details}\n"
    "Write it again in the required format, changing nothing else."
)

MAX_DETAILS = 16384
"""Longest error message to the model, in characters; an error may quote the whole reply."""


@chz.chz(typecheck=True)
class ParseErrorPolicy:
    """How an env handles a reply that cannot be parsed.

    A reply without its end (truncated, or malformed as a whole) ends the episode with `terminal_reward`, because
    nothing can follow it. A reply whose tool calls all fail to parse is answered with an error message, up to
    `max_consecutive` times in a row.
    """

    max_consecutive: int = chz.field(
        default=0, doc="how many such replies in a row are answered; 0: none", validator=not_negative
    )
    retry_message_template: str = chz.field(
        default=DEFAULT_RETRY_MESSAGE_TEMPLATE, doc="the answer; {details} is the problem"
    )
    penalty_per_error: float = chz.field(
        default=0.0,
        doc="subtracted from the reward of each such turn; at least 0",
        validator=not_negative,
    )
    terminal_reward: float = chz.field(default=0.0, doc="reward of the turn that ends the episode for this reason")
    mask_error_turns: bool = chz.field(default=False, doc="do not train on the tokens of such replies")

    @chz.validate
    def _check(self) -> None:
        template = self.retry_message_template
        try:
            message = self.retry_message(details="...")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigurationError(
                f"retry_message_template={template!r}: {{details}} is the only placeholder it may have "
                f"({type(error).__name__}: {error}); write braces as {{{{ and }}}}"
            ) from error
        if message == self.retry_message(details=""):
            raise ConfigurationError(f"retry_message_template={template!r}: must contain {{details}}, the problem")

    def retry_message(self, details: str) -> str:
        """The answer to a reply with this error; it quotes the first MAX_DETAILS characters."""
        return self.retry_message_template.format(details=details[:MAX_DETAILS])


DEFAULT_LIMIT_STOP_REASONS: tuple[str, ...] = (
    StopReason.MAX_TOKENS.value,
    StopReason.MAX_SAMPLED_TOKENS.value,
    StopReason.MAX_TURNS.value,
    StopReason.MAX_TOOL_CALLS.value,
    StopReason.ROLLOUT_TIMEOUT.value,
)
"""Stop reasons that mean a budget ran out, not that the episode was completed."""


@chz.chz(typecheck=True)
class TerminationRewardPolicy:
    """The reward of a rollout that hit a limit: it is graded as usual, then its total is lowered to at most 0.

    So hitting a limit never pays, and among rollouts that did, worse ones still get less.
    """

    zero_reward_on_limit: bool = chz.field(default=False, doc="lower the total reward of such a rollout to at most 0")
    limit_stop_reasons: tuple[str, ...] = chz.field(
        default=DEFAULT_LIMIT_STOP_REASONS, doc="the stop reasons that count as a limit"
    )
    skip_grading_on_timeout: bool = chz.field(
        default=False,
        doc="do not grade a group all of whose members timed out, where zero_reward_on_limit bounds them by 0 anyway",
    )
    grader_timeout_seconds: float | None = _limit("seconds that a grading may take")
    pass_all_messages_to_grader: bool = chz.field(
        default=False,
        doc="an env with this policy that grades messages (AgentToolMessageEnv) grades the whole conversation; "
        "otherwise only the messages after the initial ones",
    )

    def clamps(self, stop_reason: str | None) -> bool:
        """Whether a rollout with this stop reason gets at most 0."""
        return self.zero_reward_on_limit and stop_reason in self.limit_stop_reasons


@chz.chz(typecheck=True)
class Termination(FieldGroup):
    """How a rollout that hit a limit is rewarded."""

    termination: TerminationRewardPolicy | None = chz.field(
        default=None, doc="reward of a rollout that hit a limit; None: its grade"
    )
