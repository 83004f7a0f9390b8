"""A judge that reads the probability of each verdict from a model and samples nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinker_cookbook.debate.lm_judge import TOO_LONG, Judge, judge_messages, soft_verdict
from tinker_cookbook.debate.views import DebateView, Verdict, Winner
from tinker_cookbook.decisions.policy import DecisionPolicy


def verdict_texts(labels: list[str]) -> list[str]:
    """The choices of a judge, as it would write them."""
    return [f"<VERDICT>{label}</VERDICT>" for label in labels]


@dataclass(frozen=True)
class DecisionJudge(Judge):
    """Decides by a `DecisionPolicy` over the verdicts that the protocol allows.

    `Verdict.shares` are the probabilities, with that of TIE divided evenly; the likeliest side wins, equally likely ones tie. A
    debate whose prompt is longer than `max_prompt_tokens` is INVALID.
    """

    policy: DecisionPolicy
    system_prompt: str | None = None
    max_prompt_tokens: int | None = None

    async def __call__(self, view: DebateView) -> Verdict:
        messages, renderer = judge_messages(view, self.system_prompt), self.policy.renderer
        limit = self.max_prompt_tokens
        if limit is not None and renderer.build_generation_prompt(messages).length > limit:
            return Verdict(Winner.INVALID, reasoning=TOO_LONG)
        shares = await self.policy.probabilities(messages, verdict_texts([*view.labels]))
        return soft_verdict([math.log(share) if share else -math.inf for share in shares], view.num_options)
