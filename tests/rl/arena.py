"""What the tests of rollouts share: a clock that jumps, envs that do as they are told, and a policy that notes its calls."""

import asyncio
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tinker

from tests.fakes import said
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, Metrics, StepResult, Trajectory

T = TypeVar("T")


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time passes only while nothing can be done, and then at once. Waiting for what never comes is an error."""

    def __init__(self) -> None:
        self.now, self.away = 0.0, 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class PatientLoop(JumpingLoop):
    """One whose time does not pass while a thread works for it."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = super().run_in_executor(executor, func, *args)
        self.away += 1

        def back(_: object) -> None:
            self.away -= 1

        future.add_done_callback(back)
        return future

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        self.away += 1
        await super().shutdown_default_executor(*timeout)


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None):
        events = super().select(None if timeout != 0 and self._loop.away else 0)
        if not events and timeout is None:
            raise AssertionError("the test hangs: every task waits and no timer is set")
        if not events and timeout:
            self._loop.now += timeout
        return events


def run(work: Awaitable[T], loop_factory: Callable[[], JumpingLoop] = JumpingLoop) -> T:
    """The result, on a clock that jumps."""

    async def main() -> T:
        return await work

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


async def forever() -> None:
    await asyncio.Event().wait()


_LIMIT: ContextVar[asyncio.Timeout | None] = ContextVar("_LIMIT", default=None)


@asynccontextmanager
async def limit_of_who_hangs(seconds: float | None, late: Callable[[], Exception]) -> AsyncIterator[None]:
    """In place of `time_limit`: time is up at once for a body that awaits `hang`, and for no other on any machine."""
    timer = asyncio.timeout(None)
    _LIMIT.set(timer)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise late() from error


async def hang() -> None:
    if timer := _LIMIT.get():
        timer.reschedule(asyncio.get_running_loop().time())
    await forever()


async def seconds(count: float) -> None:
    """Let time pass on the jumping clock."""
    loop, reached = asyncio.get_running_loop(), asyncio.Event()
    loop.call_later(count, reached.set)
    await reached.wait()


@dataclass
class Call:
    """One call of the policy."""

    prompt: list[int]
    stop: StopCondition
    options: dict[str, Any]


class Talker(TokenCompleter):
    """Says `replies` in order; an exception among them is raised, a coroutine function awaited first."""

    def __init__(
        self, *replies: TokensWithLogprobs | Exception | Callable[[], Awaitable[Any]], log: list[str] | None = None
    ):
        self.replies, self.calls, self.log = list(replies), list[Call](), log if log is not None else []

    async def __call__(self, model_input: tinker.ModelInput, stop: StopCondition, **options: Any) -> TokensWithLogprobs:
        self.log.append("sample")
        self.calls.append(Call(model_input.to_ints(), stop, options))
        reply = self.replies[len(self.calls) - 1]
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, TokensWithLogprobs):
            await reply()
            return said([9])
        return reply


@dataclass
class TalkEnv(Env):
    """A conversation of `turns` turns: each prompt is the last one, the reply, and token 99; each reward is 1.

    `metrics` are those of the last turn, `on_step` is awaited in each.
    """

    turns: int = 1
    metrics: Metrics = field(default_factory=dict)
    on_step: Callable[[int], Awaitable[None]] | None = None
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    log: list[str] = field(default_factory=list)
    turn: int = 0

    async def initial_observation(self):
        self.log.append("first")
        return tinker.ModelInput.from_ints(self.prompt), [7]

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.log.append(f"step {(extra or {}).get('stop_reason')}")
        if self.on_step is not None:
            await self.on_step(self.turn)
        self.turn += 1
        self.prompt = [*self.prompt, *action, 99]
        done = self.turn == self.turns
        metrics = self.metrics if done else {}
        return StepResult(1.0, done, tinker.ModelInput.from_ints(self.prompt), [7 + self.turn], metrics)


class ToldEnv(TalkEnv):
    """One that takes messages, a limit on tool calls and a policy for parse errors, each message being a token."""

    async def inject_messages(self, messages: list[Message]) -> tuple[tinker.ModelInput, StopCondition]:
        self.log.append("inject_messages")
        self.prompt = [*self.prompt, *(int(str(message["content"])) for message in messages)]
        return tinker.ModelInput.from_ints(self.prompt), [70]

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        self.log.append(f"max_tool_calls {max_tool_calls}")

    def set_tool_execution(self, tool_execution: str) -> None:
        self.log.append(tool_execution)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        self.log.append(f"max_consecutive {policy.max_consecutive}")


class Members(EnvGroupBuilder):
    """A group whose members are made by `make(call, member)`, where `call` counts calls of make_envs over all copies.

    `life` notes, over all copies, what happened: make 0, rewards, cleanup 0, ...
    """

    def __init__(self, size: int, make: Callable[[int, int], Env], coordinated: bool = False):
        self.size, self.make, self._coordinated = size, make, coordinated
        self.life: list[str] = []
        self.opened: int | None = None

    @property
    def coordinated(self) -> bool:
        return self._coordinated

    async def make_envs(self) -> Sequence[Env]:
        self.opened = sum(event.startswith("make") for event in self.life)
        self.life.append(f"make {self.opened}")
        return [self.make(self.opened, i) for i in range(self.size)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        self.life.append("rewards")
        return [(10.0, {"group": len(trajectory_group)}) for _ in trajectory_group]

    async def cleanup(self) -> None:
        self.life.append(f"cleanup {self.opened}")

    def logging_tags(self) -> list[str]:
        return ["numbers"]
