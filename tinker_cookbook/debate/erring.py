"""A judge that errs on purpose, at known rates, to study what judge errors cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.debate.lm_judge import Judge
from tinker_cookbook.debate.views import DebateView, Verdict, Winner
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.utils.seeds import derive_seed

FLIPPED = {Winner.A: Winner.B, Winner.B: Winner.A}


@dataclass(frozen=True)
class ErringJudge(Judge):
    """Turns some verdicts of a judge of single answers, or of single steps, into their opposite.

    Which ones depends only on the seed and the debate. Checks are independent: the same step of two answers may be judged
    differently. Verdicts other than A and B are unchanged.

    Args:
        false_accepts: probability that "wrong" (B) becomes "right" (A).
        false_rejects: probability that "right" (A) becomes "wrong" (B).
    """

    judge: Judge
    false_accepts: float
    false_rejects: float
    seed: int

    async def __call__(self, view: DebateView) -> Verdict:
        verdict = await self.judge(view)
        rate = {Winner.A: self.false_rejects, Winner.B: self.false_accepts}.get(verdict.winner, 0.0)
        if Random(derive_seed(self.seed, "erring judge", *view.key)).random() >= rate:
            return verdict
        shares = None if verdict.shares is None else verdict.shares[::-1]
        return replace(verdict, winner=FLIPPED[verdict.winner], shares=shares, reasoning="planted error")

    def of_policy(self, policy: TokenCompleter | None, renderer: Renderer) -> Judge:
        return replace(self, judge=self.judge.of_policy(policy, renderer))
