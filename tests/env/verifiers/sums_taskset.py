"""A taskset as one writes it for verifiers 0.4: it knows nothing of this library."""
# pyright: reportMissingImports=false

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip(" .") == self.data.answer)

    @vf.reward(weight=0.2)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / (1.0 + len(trace.last_reply))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    highest: int = 3
    split: str = "train"


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for a in range(self.config.highest + 1):
            for b in range(self.config.highest + 1):
                if (a == b) == (self.config.split == "test"):
                    data = SumData(prompt=f"What is {a} + {b}?", answer=str(a + b))
                    yield SumTask(data, self.config.task)
