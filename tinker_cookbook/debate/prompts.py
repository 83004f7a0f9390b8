"""The words of a debate: what debaters and judges are told.

Kept apart from the protocol so that a task, a recipe or a paper's replication can swap the wording without touching
token handling. `{opponent}` marks where the opponent's last turn is inserted, as token ids, by `debate.injection`.
"""

import chz

OPPONENT = "{opponent}"

CONFIDENCE_REQUEST = "Then put how sure you are, from 0 to 1, between <CONFIDENCE> and </CONFIDENCE>."

REBUTTAL = (
    "Your answer is FIXED now. Another agent answered the same question:\n\n"
    f"{OPPONENT}\n\n"
    "In one to three sentences, argue why your answer is right and what is wrong with theirs."
)

CLOSING = (
    "Your answer is still FIXED. The other agent argued:\n\n"
    f"{OPPONENT}\n\n"
    "In one to three sentences, respond to their points and make your final case."
)

JUDGE_SYSTEM = (
    "You judge a debate between two agents. Decide which answer is correct, "
    "which arguments are stronger, and whether criticism was addressed. "
    "Reply with <VERDICT>A</VERDICT>, <VERDICT>B</VERDICT> or <VERDICT>TIE</VERDICT>, "
    "then your reason in one sentence between <REASONING> and </REASONING>."
)


@chz.chz(typecheck=True)
class DebatePrompts:
    """Wording of the rounds after the first.

    Raises ValueError when a round's text does not hold the placeholder `{opponent}` exactly once.
    """

    rebuttal: str = chz.field(default=REBUTTAL, doc="user turn of round 2; {opponent} is their round 1")
    closing: str = chz.field(default=CLOSING, doc="user turn of round 3; {opponent} is their round 2")

    @chz.validate
    def _one_placeholder(self) -> None:
        for field in ("rebuttal", "closing"):
            count = getattr(self, field).count(OPPONENT)
            if count != 1:
                raise ValueError(f"prompts.{field} must hold {OPPONENT} exactly once, found {count} times")


def judge_user_prompt(context: str, rounds_a: list[str], rounds_b: list[str]) -> str:
    """The judge's user turn: the question's context, then each agent's rounds in order."""
    parts = [f"QUESTION\n{context}"]
    for name, rounds in (("A", rounds_a), ("B", rounds_b)):
        parts.append("\n".join([f"AGENT {name}", *(f"Round {i}: {text}" for i, text in enumerate(rounds, start=1))]))
    return "\n\n".join(parts)
