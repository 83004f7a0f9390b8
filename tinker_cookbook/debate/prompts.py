"""The wording of a debate: the prompts of debaters and judges.

Separate from the protocol, so that a task, a recipe or a replication of a paper can change the wording without
touching token handling. `debate.injection` replaces `{opponent}` by the token ids of the turns that a seat has not
heard. A task's wording (`Task.debate_prompts`) overrides the library's, and the user's overrides the task's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import chz

from tinker_cookbook.debate.views import DebateView, Role, Seat
from tinker_cookbook.exceptions import ConfigurationError

OPPONENT = "{opponent}"
OWN_ANSWER, OTHER_ANSWERS = "{answer}", "{others}"

CONFIDENCE_REQUEST = "Then put how sure you are, from 0 to 1, between <CONFIDENCE> and </CONFIDENCE>."

REBUTTAL = (
    "Your answer is FIXED now. Another agent answered the same question:\n\n"
    f"{OPPONENT}\n\n"
    "In one to three sentences, argue why your answer is right and what is wrong with theirs."
)

RESPONSE = (
    "Your answer is still FIXED. The other agent argued:\n\n"
    f"{OPPONENT}\n\n"
    "In one to three sentences, respond to their points and say what is wrong with theirs."
)

CLOSING = (
    "Your answer is still FIXED. The other agent argued:\n\n"
    f"{OPPONENT}\n\n"
    "In one to three sentences, respond to their points and make your final case."
)

SUPPORT = "Your answer is FIXED now. In one to three sentences, tell the judge why it is right."

CRITIQUE = f"Another agent answered:\n\n{OPPONENT}\n\nIn one to three sentences, tell the judge what is wrong with this answer."

DEFENCE = (
    "Your answer is FIXED. A critic wrote:\n\n"
    f"{OPPONENT}\n\n"
    "In one to three sentences, tell the judge why your answer is right all the same."
)

REJOINDER = (
    "The other agent defended the answer:\n\n"
    f"{OPPONENT}\n\n"
    "In one to three sentences, tell the judge what is wrong with the answer all the same."
)

ASSIGNED = (
    f"The answer that you argue for is: {OWN_ANSWER}\nThe other answers are: {OTHER_ANSWERS}\n"
    "In one to three sentences, tell the judge why yours is right."
)

HEARD = f"The other agents wrote:\n\n{OPPONENT}"

JUDGE_SYSTEM = (
    "You judge a debate between two agents. Decide which answer is correct, "
    "which arguments are stronger, and whether criticism was addressed. "
    "Reply with <VERDICT>A</VERDICT>, <VERDICT>B</VERDICT> or <VERDICT>TIE</VERDICT>, "
    "then your reason in one sentence between <REASONING> and </REASONING>."
)

CHECK_SYSTEM = "Check one step. Reply with <VERDICT>RIGHT</VERDICT> or <VERDICT>WRONG</VERDICT>."

_REASON = "then your reason in one sentence between <REASONING> and </REASONING>."
_OF_MANY = {
    "rebuttal": REBUTTAL.replace("Another agent answered", "Other agents answered"),
    "response": RESPONSE.replace("The other agent", "The other agents"),
    "closing": CLOSING.replace("The other agent", "The other agents"),
}
"""With more than two debaters."""
_PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {
    "support": (),
    "confidence": (),
    "assigned": (OWN_ANSWER, OTHER_ANSWERS),
}


@dataclass(frozen=True)
class Wording:
    """The final text of every request for a turn."""

    confidence: str = CONFIDENCE_REQUEST
    rebuttal: str = REBUTTAL
    response: str = RESPONSE
    closing: str = CLOSING
    support: str = SUPPORT
    critique: str = CRITIQUE
    defence: str = DEFENCE
    rejoinder: str = REJOINDER
    assigned: str = ASSIGNED
    heard: str = HEARD
    narrowing: str = ""
    """request for an examiner's later speeches, worded by tasks with steps; {first} and {last}: the range of remaining steps"""

    def opening(self, role: Role, answer: str | None, others: Sequence[str], hears: bool) -> str:
        """The text after the question in the first prompt of a seat that does not propose an answer."""
        if role == "critic":
            return self.critique
        text = self.assigned.replace(OWN_ANSWER, answer or "").replace(OTHER_ANSWERS, "; ".join(others))
        return f"{text}\n\n{self.heard}" if hears else text

    def request(self, role: Role, round: int, num_rounds: int, hears: bool) -> str:
        """The user turn that asks for a speech after an earlier turn of the seat.

        Args:
            round: round of speeches, from 1; with an assigned answer the first is the opening.
            hears: whether others have spoken since.
        """
        if role == "examiner" and round > 1:
            return self.narrowing
        if not hears:
            return self.support
        if role == "proposer":
            return self.defence
        if role == "critic":
            return self.rejoinder
        if round > 1:
            return self.closing if round == num_rounds else self.response
        return self.rebuttal


_TEXTS = tuple(text.name for text in fields(Wording) if text.name != "narrowing")


def _text(doc: str) -> str | None:
    return chz.field(default=None, doc=f"{doc}; None: the task's, else the library's")


@chz.chz(typecheck=True)
class DebatePrompts:
    """Wording of the turns. Raises ConfigurationError when a text does not have its placeholders exactly once."""

    confidence: str | None = _text("added to the request for an answer; empty: nothing is added")
    rebuttal: str | None = _text("first speech after the seat's answer; {opponent}: the other seats' turns")
    response: str | None = _text("speeches between the first and the last; {opponent}")
    closing: str | None = _text("last speech; {opponent}")
    support: str | None = _text("a speech after which no other seat has spoken")
    critique: str | None = _text("a critic's first speech; {opponent}: the answer")
    defence: str | None = _text("a proposer's speeches; {opponent}: the critic's")
    rejoinder: str | None = _text("a critic's later speeches; {opponent}: the proposer's")
    assigned: str | None = _text("first speech for an assigned answer; {answer}, {others}")
    heard: str | None = _text("added to it if others spoke first; {opponent}")

    @chz.validate
    def _placeholders(self) -> None:
        check_wording(self._given, "prompts")

    @property
    def _given(self) -> dict[str, str]:
        return {name: text for name in _TEXTS if (text := getattr(self, name)) is not None}

    def resolve(self, of_task: Mapping[str, str], seats: int = 2) -> Wording:
        """Fill gaps with the task's wording, then the library's. Raises ConfigurationError for an invalid one."""
        check_wording(of_task, "Task.debate_prompts")
        return Wording(**{**(_OF_MANY if seats > 2 else {}), **of_task, **self._given})


def check_wording(texts: Mapping[str, str], name: str) -> None:
    """Raises ConfigurationError for an unknown text, or one that does not have each placeholder exactly once."""
    if unknown := texts.keys() - set(_TEXTS):
        raise ConfigurationError(f"{name}.{min(unknown)} is unknown; use {', '.join(_TEXTS)}")
    for field, text in texts.items():
        wanted = _PLACEHOLDERS.get(field, (OPPONENT,))
        for placeholder in (OPPONENT, OWN_ANSWER, OTHER_ANSWERS):
            count, right = text.count(placeholder), int(placeholder in wanted)
            if count != right:
                how = "exactly once" if right else "nowhere"
                raise ConfigurationError(f"{name}.{field} must contain {placeholder} {how}, found {count} times")


def judge_system_prompt(view: DebateView) -> str:
    """The default system prompt for the judge of this debate. It favours no option."""
    if view.is_step:
        return CHECK_SYSTEM
    if len(view.seats) == 1:
        return (
            "You judge an answer. Decide whether it is correct. "
            "Reply with <VERDICT>A</VERDICT> if it is, <VERDICT>B</VERDICT> if it is not, "
            f"or <VERDICT>TIE</VERDICT> if you cannot tell, {_REASON}"
        )
    labels = ", ".join(f"<VERDICT>{option}</VERDICT>" for option in view.options)
    roles = {seat.role for seat in view.seats}
    if "critic" in roles:
        return (
            "One agent answered a question and another criticises the answer. Decide whether the answer is correct: if it is, "
            "the agent who gave it is right, else the critic. Consider which arguments are stronger. "
            f"Reply with the agent who is right, {labels} or <VERDICT>TIE</VERDICT>, {_REASON}"
        )
    if "consultant" in roles or roles == {"answer"}:
        return (
            "You choose between answers to a question. Decide which answer is correct. "
            f"Reply with {labels} or <VERDICT>TIE</VERDICT>, {_REASON}"
        )
    if len(view.seats) == 2:
        return JUDGE_SYSTEM
    return JUDGE_SYSTEM.replace("two agents", f"{len(view.seats)} agents").replace(
        "<VERDICT>A</VERDICT>, <VERDICT>B</VERDICT>", labels
    )


def judge_user_prompt(view: DebateView) -> str:
    """The judge's user turn: the question's context, the key if it has one, then each agent's rounds in order. For a
    step only its claim.
    """
    if view.is_step:
        return view.rounds_a[0]
    parts = [f"QUESTION\n{view.context}"]
    if view.reference is not None:
        parts.append(f"RIGHT ANSWER\n{view.reference}")
    for i, seat in enumerate(view.seats):
        name = f"AGENT {Seat(i).name}" + (" (critic)" if seat.role == "critic" else "")
        parts.append("\n".join([name, *(f"Round {n}: {text}" for n, text in enumerate(seat.rounds, start=1))]))
    return "\n\n".join(parts)
