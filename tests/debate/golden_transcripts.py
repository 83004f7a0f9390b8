"""What is said and heard under each protocol, with debaters who say their lines and a scripted judge, as text.

python -m tests.debate.golden_transcripts    # writes tests/debate/golden/ anew; look at the difference
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.debate.arena import ITEM, RIGHT, TRAIL_ITEM, WRONG, decode, make_renderer, speech, trail
from tests.fakes import ScriptedCompleter
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.debate.env import DebateGroupBuilder, DebateProtocol, make_dialogue
from tinker_cookbook.debate.judges import SCRIPTS, KeyJudge, ScriptedJudge
from tinker_cookbook.debate.oversight import OversightProtocol
from tinker_cookbook.debate.prompts import CHECK_SYSTEM, judge_system_prompt, judge_user_prompt
from tinker_cookbook.debate.protocols import OVERSIGHT, SPOKEN, ProtocolConfig, ProtocolName
from tinker_cookbook.debate.records import read_view
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.records import make_records
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.utils.files import write_text

FOLDER = Path(__file__).parent / "golden"
CONFIGS = {
    "debate": ProtocolConfig(),
    "debate_sequential": ProtocolConfig(order="sequential"),
    "debate_of_three": ProtocolConfig(seats=3, rounds=1),
    "debate_without_speeches": ProtocolConfig(rounds=0),
    "debate_assigned": ProtocolConfig(answers="assigned", rounds=3, quotes=True),
    "debate_assigned_sequential": ProtocolConfig(answers="assigned", order="sequential"),
    "proposer_critic": ProtocolConfig(name="proposer_critic", order="sequential"),
    "proposer_critic_simultaneous": ProtocolConfig(name="proposer_critic"),
    "consultancy": ProtocolConfig(name="consultancy", rounds=1),
    "consultancy_assigned": ProtocolConfig(name="consultancy", answers="assigned", rounds=1),
    "direct": ProtocolConfig(name="direct"),
    "key": ProtocolConfig(name="key"),
}

OVERSEEN: dict[str, ProtocolName] = {
    f"oversight_{name}": name for name in (*OVERSIGHT, "consultancy_assigned", "bisection", "prover_estimator")
}
"""Where the judge checks a step of an answer."""


def lines(seat: str, answers: bool, count: int) -> list[str]:
    """What a seat says. A is right, the others are wrong; every speech quotes the question, and one that is not in it."""
    answer = f"{RIGHT if seat == 'A' else WRONG} <CONFIDENCE>0.{9 - 'ABC'.index(seat)}</CONFIDENCE>"
    speeches = [f"{seat} speaks, {i}: <quote>What is 7</quote>, <quote>8</quote>." for i in range(1, count)]
    return [answer, *speeches] if answers else [*speeches, f"{seat} ends."]


def spoken(who: str, renderer: Renderer, heard: list[list[int]], said: Sequence[TokensWithLogprobs]) -> list[str]:
    """Every prompt and reply of one side."""
    shown: list[str] = []
    for i, (prompt, reply) in enumerate(zip(heard, said, strict=True), start=1):
        shown += [f"--- {who}, prompt {i}", decode(renderer, prompt), "--- reply", decode(renderer, reply.tokens)]
    return shown


async def transcript_text(name: str, renderer: Renderer) -> str:
    """Every prompt and reply in the order of the seats, what the judge reads, the verdict and the rewards."""
    config = CONFIGS[name]
    dialogue = make_dialogue(get_task("qa"), renderer, config)
    judge = ScriptedJudge(SCRIPTS["truth"])
    builder = DebateGroupBuilder(DebateProtocol(dialogue, judge, wrong_answers=["13", "14"]), ITEM, 1, (4, 2))
    envs = await builder.make_envs()
    turns: dict[int, Any] = {}
    for member, env in enumerate(envs):
        count = sum(env.seat in slot.speakers for slot in env.transcript.slots)
        answers = any(slot.kind == "answer" and env.seat in slot.speakers for slot in env.transcript.slots)
        turns[member] = [speech(renderer, text) for text in lines(env.seat.name, answers, count)]
    policy = ScriptedCompleter(turns)
    group = await do_group_rollout(builder, policy)
    (record,) = group.records
    shown: list[str] = [f"protocol: {record.content['protocol']}"]
    for member, env in enumerate(envs):
        shown += spoken(env.seat.name, renderer, policy.heard[member], turns[member])
    view = read_view(record.content["view"])
    shown += [
        "--- judge",
        judge_system_prompt(view),
        judge_user_prompt(view),
        f"--- verdict: {record.content['verdict']}",
    ]
    rewards = [[transition.reward for transition in trajectory.transitions] for trajectory in group.trajectories_G]
    return "\n".join([*shown, f"rewards: {rewards}", f"trained: {group.is_trained()}"]) + "\n"


def answers_and_speeches(name: ProtocolName) -> list[list[str]]:
    """A right answer and a wrong one, and as self-consistency counts them, that one again. A speech names a step."""
    right, wrong = trail(), trail("c")
    if name == "debate":
        return [[right, "c is wrong."], [wrong, "b is wrong."]]
    if name == "bisection":
        return [[right, "b is wrong.", "c is wrong.", "c is wrong."], [wrong, "k is wrong.", "nothing"]]
    if name == "prover_estimator":
        return [[right, "c 5%"], [wrong, "b 90% c 60%"]]
    if name == "consultancy_assigned":
        return [[right, "c is right."], [wrong, "b is right."], [right, "c is wrong."], [wrong, "b is wrong."]]
    return [[right, "c is right."], [wrong, "c is right."], [wrong, "b is right."]]


async def oversight_text(name: ProtocolName, renderer: Renderer) -> str:
    """As `transcript_text`, of answers that a scripted judge of a single step accepts or rejects."""
    protocol = OversightProtocol.make(name, get_task("collatz"), renderer, KeyJudge())
    said = [member if name in SPOKEN else member[:1] for member in answers_and_speeches(name)]
    turns = {i: [speech(renderer, text) for text in member] for i, member in enumerate(said)}
    policy = ScriptedCompleter(turns)
    debates = len(said) // protocol.config.num_speakers
    group = await do_group_rollout(DebateGroupBuilder(protocol, TRAIL_ITEM, debates, (4, 2)), policy)
    shown = [f"protocol: {name}"]
    for member, record in enumerate(make_records(group)):
        found = record.content
        shown += spoken(f"member {member}", renderer, policy.heard[member], turns[member])
        checked = found["checked_step"]
        asked = [CHECK_SYSTEM, checked["claim"]] if checked else ["no step was checked"]
        verdict = "accepted" if found["accepted"] else "rejected"
        shown += [
            "--- judge",
            *asked,
            f"--- verdict: {verdict}; the answer is {'right' if found['correct'] else 'wrong'}",
        ]
        shown.append(f"rewards: {[transition['reward'] for transition in found['transitions']]}")
    return "\n".join([*shown, f"trained: {group.is_trained()}"]) + "\n"


async def golden_text(name: str, renderer: Renderer) -> str:
    """What the file of this name holds."""
    if name in OVERSEEN:
        return await oversight_text(OVERSEEN[name], renderer)
    return await transcript_text(name, renderer)


def main() -> None:
    renderer = make_renderer("qwen3_instruct")
    for name in (*CONFIGS, *OVERSEEN):
        write_text(FOLDER / f"{name}.txt", asyncio.run(golden_text(name, renderer)))


if __name__ == "__main__":
    main()
