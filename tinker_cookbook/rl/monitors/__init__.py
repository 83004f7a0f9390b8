"""Monitors scan finished rollouts for reward hacking, by rule or by a judge, and report counts in metrics.

A monitor is a function of a rollout that returns the reason why it is a hack, or None; or a pair of that and metrics. What it
finds changes no reward: it is counted as `monitor/<name>`, and its reason is written to the rollout's records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import chz

from tinker_cookbook.clients import ServiceClient
from tinker_cookbook.exceptions import ConfigurationError, DataValidationError
from tinker_cookbook.plugin_errors import plugin_errors
from tinker_cookbook.plugins import Kind, Registry, describe, parameter_problem
from tinker_cookbook.rl.monitors.judge import MonitorJudge, MonitorJudgeConfig
from tinker_cookbook.rl.monitors.special_cases import special_cases
from tinker_cookbook.rl.monitors.watched import WatchedRollout, WatchedTurn
from tinker_cookbook.rl.transcripts import shown_turns
from tinker_cookbook.rl.types import MONITOR_PREFIX, Member, TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer
from tinker_cookbook.utils.fields import FieldGroup
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.utils.narrowing import is_mapping, is_tuple
from tinker_cookbook.utils.reward_threads import call_reward

Finding: TypeAlias = "str | tuple[str | None, Mapping[str, float]] | None"
"""Why a rollout is a hack (None: it is not), and perhaps metrics."""
Monitor: TypeAlias = Callable[[WatchedRollout], "Finding | Awaitable[Finding]"]

JUDGE = "judge"
"""The monitor that asks a language model (`monitor_judge`)."""
INFO_KEY = "monitor"
"""Key of a member's info in the records: monitor -> reason, for each monitor that flagged it."""

MONITORS: Registry[Monitor] = Registry(
    Kind(
        key="monitors",
        wanted="def monitor(rollout: WatchedRollout) -> str | None, sync or async: why it is a hack, or None; or (that, metrics)",
        example='''
def begs(rollout):  # a tinker_cookbook.rl.monitors.WatchedRollout
    """Replies that ask for the reward."""
    return "it asks for points" if "full marks" in rollout.turns[-1].reply else None
''',
        problem=partial(parameter_problem, names=("rollout",)),
    ),
    {"special_cases": special_cases},
)


def register_monitor(name: str, monitor: Monitor) -> None:
    """Register a monitor under a name.

    Raises ConfigurationError for a name that is taken, and for a function that takes no rollout.
    """
    if name == JUDGE:
        raise ConfigurationError(f"monitors: the name {name!r} is taken; choose another")
    MONITORS.register(name, monitor)


@chz.chz(typecheck=True)
class MonitorKeys(FieldGroup):
    """The monitors of a run."""

    monitors: list[str | Callable[..., Any]] = chz.field(
        default_factory=list,
        doc=f"scan rollouts for reward hacking: special_cases (programs with the shown tests as constants), {JUDGE}; or custom: "
        "package.module:function, path/file.py:function; counted as env/all/monitor/<name>, rewards stay as they are",
    )
    monitor_judge: MonitorJudgeConfig = chz.field(
        default_factory=MonitorJudgeConfig, doc=f"with monitors={JUDGE}: the judge, an endpoint or weights"
    )

    def check_monitors(self, backend: str | None = None, base_url: str | None = None) -> None:
        """Raises ConfigurationError for an unknown monitor, two of one name, and a judge that cannot be asked."""
        names = [_name(given) for given in self.monitors]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigurationError(f"monitors: {', '.join(sorted(twice))} is given twice; a name is a metric")
        for given in self.monitors:
            if given != JUDGE:
                MONITORS.resolve(given, [JUDGE])
        if JUDGE in self.monitors:
            self.monitor_judge.check("monitor_judge", backend, base_url)
        elif self.monitor_judge != MonitorJudgeConfig():
            raise ConfigurationError(f"monitor_judge is set, but no monitor uses it; add {JUDGE} to monitors")

    async def open_monitors(self, service: ServiceClient | None = None) -> dict[str, Monitor]:
        """The monitors by name. `service` is the run's. Raises as `check_monitors`."""
        opened: dict[str, Monitor] = {}
        for given in self.monitors:
            if given == JUDGE:
                config = self.monitor_judge
                completer = await config.open_completer("monitor_judge", service)
                opened[JUDGE] = MonitorJudge(completer, config.system_prompt, config.max_retries)
            else:
                opened[_name(given)] = MONITORS.resolve(given, [JUDGE])
        return opened


def _name(given: str | Callable[..., Any]) -> str:
    """The name of a monitor in metrics: of package.module:function the part after the colon."""
    text = given if isinstance(given, str) else describe(given)
    return text.rpartition(":")[2].rpartition(".")[2]


_watching: ContextVar[Mapping[str, Monitor] | None] = ContextVar("monitors", default=None)


@contextmanager
def watched_by(monitors: Mapping[str, Monitor]) -> Generator[None]:
    """Within the body, these monitors scan the sampled groups."""
    token = _watching.set(monitors or None)
    try:
        yield
    finally:
        _watching.reset(token)


async def scan(group: TrajectoryGroup, tokenizer: Callable[[], Tokenizer]) -> None:
    """Run the monitors of `watched_by` on a group: metrics and reasons of each member are added to it.

    `tokenizer` gives the tokenizer; it is called only if there are monitors. Raises RewardError if a monitor fails, and
    DataValidationError if it returns anything but a finding.
    """
    monitors = _watching.get()
    if monitors is None:
        return
    members, words = group.members(), tokenizer()
    rollouts = [watch(member, group.tags, words) for member in members]
    found = await gather_all([_ask(name, one, rollout) for rollout in rollouts for name, one in monitors.items()])
    infos = [dict(member.info) for member in members]
    for i in range(len(members)):
        of_member = found[i * len(monitors) : (i + 1) * len(monitors)]
        reasons = {one.name: one.reason for one in of_member if one.reason is not None}
        flags = {f"{MONITOR_PREFIX}{one.name}": float(one.reason is not None) for one in of_member}
        more = {f"{MONITOR_PREFIX}{one.name}/{key}": value for one in of_member for key, value in one.metrics.items()}
        group.metrics_G[i] = {**group.metrics_G[i], **flags, **more}
        if reasons:
            infos[i][INFO_KEY] = reasons
    if any(infos):
        group.member_info_G = infos


def watch(member: Member, tags: Sequence[str], tokenizer: Tokenizer) -> WatchedRollout:
    """A member of a group as input of the monitors."""
    transitions = member.trajectory.transitions
    turns = [
        WatchedTurn(added, reply, dict(turn.metrics), dict(turn.logs))
        for (added, _, reply), turn in zip(shown_turns(member.trajectory, tokenizer), transitions, strict=True)
    ]
    stop = member.trajectory.stop_reason
    return WatchedRollout(turns, member.total_reward, dict(member.metrics), member.info, tuple(tags), stop)


@dataclass(frozen=True)
class _Found:
    name: str
    reason: str | None
    metrics: Mapping[str, float]


async def _ask(name: str, monitor: Monitor, rollout: WatchedRollout) -> _Found:
    with plugin_errors(f"monitor {name}", monitor, {"rollout": rollout}):
        said: Any = await call_reward(partial(monitor, rollout))
    reason: Any = said[0] if is_tuple(said) and len(said) == 2 else said
    metrics: Any = said[1] if is_tuple(said) and len(said) == 2 else {}
    if not (reason is None or (isinstance(reason, str) and reason)) or not is_mapping(metrics):
        raise DataValidationError(
            f"monitor {name} returned {said!r:.100}; expected the reason why it is a hack, None, or a pair of that and metrics"
        )
    return _Found(name, reason, {str(key): float(value) for key, value in metrics.items()})
