"""A judge that may run commands in a sandbox before its verdict.

The sandbox holds the debate as files (`files_of`): the judge may read them, run an answer that is a program, and test a claim.
Command output is evidence beyond what debaters say; the sandbox isolates the debaters' programs.
"""

from collections import Counter
from dataclasses import dataclass, replace

import chz

from tinker_cookbook.debate.lm_judge import TOO_LONG, Judge, LMJudge, judge_messages, parse_verdict
from tinker_cookbook.debate.views import DebateView, Verdict, Winner
from tinker_cookbook.env.task import parse_solution
from tinker_cookbook.renderers import Message
from tinker_cookbook.sandbox import Sandbox, SandboxKeys, SandboxLimits, SandboxSession
from tinker_cookbook.sandbox.session import shown_result
from tinker_cookbook.utils.code_blocks import last_code_block

ACTS = (
    " Before your verdict you may look for yourself: put bash between ```bash and ```, at most {actions} times, and you are "
    "shown what it prints. There are question.txt, and for each agent a folder such as A with answer.txt, solution.py (what "
    "stands between the tags of its answer) and speech1.txt, speech2.txt, ... Do not trust what these programs print about "
    "themselves."
)


@chz.chz(typecheck=True)
class ActsConfig(SandboxKeys):
    """What an acting judge may do."""

    max_actions: int = chz.field(default=3, doc="commands before its verdict, at most", validator=chz.validators.gt(0))


@dataclass(frozen=True)
class ActingJudge(Judge):
    """An LM judge that may run commands before its verdict. A reply with a command is no verdict, whatever else it says.

    Without a verdict after `max_actions` commands and one more reply it is INVALID. `raw_response` has all replies and results.
    """

    asked: LMJudge
    sandbox: Sandbox
    limits: SandboxLimits
    max_actions: int

    async def __call__(self, view: DebateView) -> Verdict:
        system, question = judge_messages(view, self.asked.system_prompt)
        system = Message(role="system", content=f"{system['content']}{ACTS.format(actions=self.max_actions)}")
        messages, usage, exchange = [system, question], Counter[str](), list[str]()
        session = SandboxSession(self.sandbox, self.limits, files_of(view))
        verdict = Verdict(Winner.INVALID)
        for action in range(self.max_actions + 1):
            if self.asked.is_too_long(messages):
                verdict = Verdict(Winner.INVALID, reasoning=TOO_LONG)
                break
            text, call, spent = await self.asked.ask(messages, (*view.key, action), view.labels)
            usage.update(spent)
            exchange.append(text)
            command = last_code_block(text)
            if command is None or action == self.max_actions:
                winner = None if command is not None else parse_verdict(text, view.labels)
                verdict = Verdict(winner or Winner.INVALID, call=call)
                break
            shown = shown_result(await session.run(["bash", "-c", command]), self.limits)
            exchange.append(shown)
            messages += [Message(role="assistant", content=text), Message(role="user", content=shown)]
        return replace(verdict, raw_response="\n\n".join(exchange), usage=dict(usage))


def files_of(view: DebateView) -> dict[str, str]:
    """The judge's view as files: contents by path."""
    files = {"question.txt": view.context}
    for name, seat in zip("ABCDEFGH", view.seats, strict=False):
        answer, *speeches = ["", *seat.rounds] if seat.role == "critic" or not seat.rounds else seat.rounds
        if answer:
            files[f"{name}/answer.txt"] = answer
            solution = parse_solution(answer)
            if solution is not None:
                files[f"{name}/solution.py"] = last_code_block(solution) or solution
        files |= {f"{name}/speech{number}.txt": speech for number, speech in enumerate(speeches, 1)}
    return files
