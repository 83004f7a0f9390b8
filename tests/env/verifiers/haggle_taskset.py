"""A taskset with an env of its own: two roles that talk, a referee that is not trained, and one run of a role more."""
# pyright: reportMissingImports=false

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["HaggleEnv", "HaggleTaskset"]


class HaggleTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class HaggleTaskset(vf.Taskset[HaggleTask, vf.TasksetConfig]):
    def load(self) -> Iterator[HaggleTask]:
        for thing in ("lamp", "chair", "book", "clock"):
            yield HaggleTask(vf.TaskData(prompt=f"Name a price for the {thing}."), self.config.task)


class HaggleConfig(vf.EnvConfig):
    seller: vf.AgentConfig = vf.AgentConfig(max_turns=3)
    buyer: vf.AgentConfig = vf.AgentConfig()
    referee: vf.AgentConfig = vf.AgentConfig()
    breaks: bool = False
    loses: bool = False
    """one run of a role more, which fails"""
    tolerates: bool = False
    """an episode counts in spite of it"""


class HaggleEnv(vf.Env[HaggleConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.referee.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        if self.config.breaks:
            raise RuntimeError("the shop is closed")
        asked = task.with_data(prompt=None)
        async with agents.seller.interaction(task) as seller, agents.buyer.interaction(asked) as buyer:
            offer = (await seller.turn()).last_reply
            for _ in range(2):
                answer = (await buyer.turn(f"The seller says: {offer}")).last_reply
                offer = (await seller.turn(f"The buyer says: {answer}")).last_reply
        deal = task.with_data(prompt=f"Is this fair? {offer}")
        await asyncio.gather(agents.referee.run(deal), agents.buyer.run(deal))
        if self.config.loses:
            await agents.buyer.run(asked)  # nobody opens it

    def complete(self, episode: vf.Episode) -> bool:
        return self.config.tolerates or super().complete(episode)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        for trace in episode.traces:
            name = trace.agent.name
            words = len(trace.last_reply.split())
            trace.record_reward("words", words if name == "seller" else -words)
