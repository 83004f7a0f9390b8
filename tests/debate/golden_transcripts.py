"""What is said and heard under each protocol, with debaters who say their lines and a scripted judge, as text.

python -m tests.debate.golden_transcripts    # writes tests/debate/golden/ anew; look at the difference
"""

import asyncio
from pathlib import Path
from typing import Any

from tests.debate.arena import ITEM, RIGHT, WRONG, decode, make_renderer, speech
from tests.fakes import ScriptedCompleter
from tinker_cookbook.debate.env import DebateGroupBuilder, DebateProtocol, make_dialogue
from tinker_cookbook.debate.judges import SCRIPTS, ScriptedJudge
from tinker_cookbook.debate.prompts import judge_system_prompt, judge_user_prompt
from tinker_cookbook.debate.protocols import ProtocolConfig
from tinker_cookbook.debate.records import read_view
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tasks.registry import get_task
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


def lines(seat: str, answers: bool, count: int) -> list[str]:
    """What a seat says. A is right, the others are wrong; every speech quotes the question, and one that is not in it."""
    answer = f"{RIGHT if seat == 'A' else WRONG} <CONFIDENCE>0.{9 - 'ABC'.index(seat)}</CONFIDENCE>"
    speeches = [f"{seat} speaks, {i}: <quote>What is 7</quote>, <quote>8</quote>." for i in range(1, count)]
    return [answer, *speeches] if answers else [*speeches, f"{seat} ends."]


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
        for i, (prompt, said) in enumerate(zip(policy.heard[member], turns[member], strict=True), start=1):
            shown += [
                f"--- {env.seat.name}, prompt {i}",
                decode(renderer, prompt),
                "--- reply",
                decode(renderer, said.tokens),
            ]
    view = read_view(record.content["view"])
    shown += [
        "--- judge",
        judge_system_prompt(view),
        judge_user_prompt(view),
        f"--- verdict: {record.content['verdict']}",
    ]
    rewards = [[transition.reward for transition in trajectory.transitions] for trajectory in group.trajectories_G]
    return "\n".join([*shown, f"rewards: {rewards}", f"trained: {group.is_trained()}"]) + "\n"


def main() -> None:
    renderer = make_renderer("qwen3_instruct")
    for name in CONFIGS:
        write_text(FOLDER / f"{name}.txt", asyncio.run(transcript_text(name, renderer)))


if __name__ == "__main__":
    main()
