"""A taskset with tool servers, as one writes it for verifiers 0.4: of each task, or one for all."""
# pyright: reportMissingImports=false

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ToolsTaskset"]


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "sums"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class ToolsConfig(vf.TasksetConfig):
    shared: bool = False


class ToolsTaskConfig(vf.TaskConfig):
    shared: bool = False


class ToolsTask(vf.Task[vf.TaskData, vf.State, ToolsTaskConfig]):
    @classmethod
    def toolsets(cls, config: ToolsTaskConfig) -> list[vf.Toolset]:
        return [] if config.shared else [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == "12")


class ToolsTaskset(vf.Taskset[ToolsTask, ToolsConfig]):
    def load(self) -> Iterator[ToolsTask]:
        data = vf.TaskData(prompt="What is 7 + 5?", system_prompt="Add.")
        yield ToolsTask(data, ToolsTaskConfig(shared=self.config.shared))

    @classmethod
    def toolsets(cls, config: ToolsConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())] if config.shared else []


if __name__ == "__main__":
    Calculator.run()
