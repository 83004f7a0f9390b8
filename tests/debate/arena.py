"""What the debate tests share: renderers over the shipped tokenizer, and debates in which everybody says what they are told."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.fakes import ScriptedCompleter, said
from tests.waiting import HANG_SECONDS
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.debate.dialogue import Dialogue, TurnRequest
from tinker_cookbook.debate.env import DebateGroupBuilder, DebateProtocol, make_dialogue
from tinker_cookbook.debate.injection import TurnInjection
from tinker_cookbook.debate.judges import SCRIPTS, DebateView, Judge, ScriptedJudge, Verdict, Winner
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.transcript import Transcript
from tinker_cookbook.debate.views import Seat
from tinker_cookbook.env.shipped.questions.collatz import LABELS, next_number
from tinker_cookbook.env.task import TaskItem
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")
RENDERERS = ["qwen3_instruct", "role_colon"]
ITEM = TaskItem("sum-1", "What is 7 + 5?", "12")
RIGHT, WRONG = "<SOLUTION>12</SOLUTION>", "<SOLUTION>13</SOLUTION>"

TRAIL_START = 43


def trail(mistake_at: str = "") -> str:
    """The answer of collatz for TRAIL_START; at the named step 4 too much, and right again from there."""
    number, said = TRAIL_START, []
    for label in LABELS:
        number = next_number(number) + (4 if label == mistake_at else 0)
        said.append(f"{label}{number}")
    return f"{' '.join(said)} <SOLUTION>{number}</SOLUTION>"


TRAIL_ITEM = TaskItem("start-43", str(TRAIL_START), trail().rpartition("<SOLUTION>")[2].removesuffix("</SOLUTION>"))


def make_renderer(name: str) -> Renderer:
    return get_renderer(name, get_tokenizer(TINY), model_name=TINY)


def encode(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def decode(renderer: Renderer, tokens: Sequence[int]) -> str:
    text = renderer.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def stop_ids(renderer: Renderer) -> list[int]:
    """What a model that stops here emits."""
    stop = renderer.get_stop_sequences()[0]
    return [stop] if isinstance(stop, int) else encode(renderer, stop)


def reply_ids(renderer: Renderer, text: str, stopped: bool = True) -> list[int]:
    return encode(renderer, text) + (stop_ids(renderer) if stopped else [])


def speech(renderer: Renderer, text: str, stopped: bool = True) -> TokensWithLogprobs:
    return said(reply_ids(renderer, text, stopped), "stop" if stopped else "length")


@dataclass(frozen=True)
class JudgeByIndex(Judge):
    """Verdict i for debate i of the group."""

    winners: tuple[Winner, ...]

    async def __call__(self, view: DebateView) -> Verdict:
        return Verdict(self.winners[view.key[-1]], reasoning="told so")


@dataclass
class WatchingJudge(Judge):
    """Finds for A and keeps what it was shown."""

    views: list[DebateView]

    async def __call__(self, view: DebateView) -> Verdict:
        self.views.append(view)
        return Verdict(Winner.A)


def make_protocol(
    renderer: Renderer, task: str = "qa", judge: Judge | None = None, config: ProtocolConfig | None = None
) -> DebateProtocol:
    dialogue = make_dialogue(get_task(task), renderer, config)
    return DebateProtocol(dialogue, judge or ScriptedJudge(SCRIPTS["truth"]))


def first_prompt(dialogue: Dialogue, item: TaskItem = ITEM) -> list[int]:
    """Of a seat that answers for itself."""
    messages, heard = dialogue.opening(Transcript(dialogue.task, item, dialogue.protocol), Seat.A)
    assert not heard
    return dialogue.renderer.build_generation_prompt(messages).to_ints()


def requests(dialogue: Dialogue, seat: Seat = Seat.A) -> list[TurnRequest]:
    """What a seat is told between its turns, in order."""
    (found,) = dialogue.requests.values()
    return [request for (other, _), request in sorted(found.items()) if other is seat]


def injections(dialogue: Dialogue, seat: Seat = Seat.A) -> list[TurnInjection]:
    return [request.injection for request in requests(dialogue, seat) if request.injection is not None]


@dataclass
class Held:
    """A group of debates as it came out."""

    group: TrajectoryGroup
    heard: dict[int, list[list[int]]]
    """member -> its prompts in order"""
    protocol: DebateProtocol
    builder: DebateGroupBuilder


def hold(
    renderer: Renderer,
    members: Sequence[Sequence[TokensWithLogprobs]],
    judge: Judge,
    completer: Callable[[dict[int, Sequence[TokensWithLogprobs]]], ScriptedCompleter] = ScriptedCompleter,
    task: str = "qa",
) -> Held:
    """Debates among members 0-1, 2-3, ... each of whom says its three turns. A hang is a failure."""
    protocol = make_protocol(renderer, task, judge)
    builder = DebateGroupBuilder(protocol, ITEM, len(members) // 2, (4, 2))
    policy = completer(dict(enumerate(members)))

    async def bounded() -> TrajectoryGroup:
        async with asyncio.timeout(HANG_SECONDS):
            return await do_group_rollout(builder, policy)

    return Held(asyncio.run(bounded()), policy.heard, protocol, builder)


def three_turns(renderer: Renderer, proposal: str, name: str = "", stopped: bool = True) -> list[TokensWithLogprobs]:
    return [speech(renderer, text, stopped) for text in (proposal, f"{name} rebuts", f"{name} closes")]
