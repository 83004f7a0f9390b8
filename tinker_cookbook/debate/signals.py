"""Training signals without the truth, by name: an oversight protocol, what its judge checks, and how speeches are rewarded.

    debate               the opponent names the step that the judge checks
    consultancy          the author names it
    direct               a random step; direct_2, direct_3: two or three of them; direct_all: all
    self_consistency     no judge: an answer is accepted if most answers to the question agree with it
    truth                no judge: the task's own verdict, which the others only use for measurement

Other ways of disputing an answer, at one check of the judge (`debate.dispute`):

    bisection            the opponent narrows down in several speeches where the answer is wrong, and the judge checks that step
    prover_estimator     the opponent says how likely each step is right; the judge checks the one that it doubts most

Controls, each a debate with one component removed:

    format               an answer is accepted if it has the required form
    debate_random_step   the opponent speaks and is paid as in a debate, and the judge checks a random step
    debate_unpaid        the judge checks the step that the opponent names, and speeches earn nothing
    consultancy_assigned half of the speakers argue for their own answers, as in a consultancy, and half against another's, as in
                         a debate: no speaker chooses its side (assigned consultancy, Kenton et al. 2024)

And one with a component added:

    debate_rebuttal      the opponent hears the objection to its own answer and speaks once more; the last step that it
                         named counts
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_cookbook.debate.dispute import MOST_TURNS
from tinker_cookbook.debate.protocols import ProtocolName
from tinker_cookbook.exceptions import ConfigurationError


@dataclass(frozen=True)
class Signal:
    """How a protocol accepts answers."""

    protocol: ProtocolName
    checks: int | None = 1
    """steps of an answer that the judge checks, all of which must hold; None: every step"""
    named: bool = False
    """the speech names the step; else steps are drawn at random"""
    pays_speeches: bool = True
    rounds: int = 1
    """maximum number of speeches of a speaker, if the protocol has any; the last named step counts"""

    @property
    def has_judge(self) -> bool:
        """Whether steps are checked."""
        return self.checks != 0

    @property
    def needs_steps(self) -> bool:
        """Whether it requires a task with steps."""
        return self.protocol not in ("self_consistency", "truth")


SIGNALS: dict[str, Signal] = {
    "debate": Signal("debate", named=True),
    "consultancy": Signal("consultancy", named=True),
    "consultancy_assigned": Signal("consultancy_assigned", named=True),
    "direct": Signal("direct"),
    "direct_2": Signal("direct", checks=2),
    "direct_3": Signal("direct", checks=3),
    "direct_all": Signal("direct", checks=None),
    "self_consistency": Signal("self_consistency", checks=0),
    "truth": Signal("truth", checks=0),
    "bisection": Signal("bisection", named=True, rounds=MOST_TURNS),
    "prover_estimator": Signal("prover_estimator", named=True),
    "format": Signal("direct", checks=0),
    "debate_random_step": Signal("debate"),
    "debate_unpaid": Signal("debate", named=True, pays_speeches=False),
    "debate_rebuttal": Signal("debate", named=True, rounds=2),
}


def get_signal(name: str) -> Signal:
    """Raises ConfigurationError for an unknown name."""
    if name not in SIGNALS:
        raise ConfigurationError(f"protocol={name} is not an oversight signal; use {', '.join(SIGNALS)}")
    return SIGNALS[name]
