"""Other judges on debates that were saved: who would have won? Nothing is sampled by the policy.

Each judge sees the same view as the run's own judge (debate_*.json, or a file of them). The table shows how often each
is right, and how often it agrees with the run's verdict; with both orders also how often a verdict depends on the
order.

    python -m recipes.debate_rejudge debates=RUN judges=key,confidence,scripted:longer
    python -m recipes.debate_rejudge debates=RUN judges=lm judge.weights.base_model=tiny_debate judge.both_orders=True
    python -m recipes.debate_rejudge debates=RUN judges=my_judges.py:judge without_speeches=True
"""

from collections.abc import Sequence

import chz

from recipes.common import default_model
from recipes.results import ResultKeys, show_table
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.judges import JUDGE_NAMES, JudgeConfig, Judged, check_judge, make_judge
from tinker_cookbook.debate.metrics import accuracy
from tinker_cookbook.debate.saved import SavedDebate, SavedDebates, load_debates
from tinker_cookbook.debate.views import Verdict, Winner
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.fields import docs
from tinker_cookbook.utils.files import write_jsonl
from tinker_cookbook.utils.intervals import clustered_mean
from tinker_cookbook.utils.misc_utils import gather_all
from tinker_cookbook.weights_config import WeightsConfig

RECIPE = "debate_rejudge"
COLUMNS = ("judge", "right", "right where one side is", "agrees with the run", "first seat wins", "tie", "invalid")
AS_SAVED = "the run's own"


@chz.chz(typecheck=True)
class CLIConfig(SavedDebates, Judged, ResultKeys):
    """Keys of `python -m recipes.debate_rejudge`."""

    DOCS = docs(judge="settings that all of them share: weights, temperature, both_orders, votes, ...")

    judges: tuple[str, ...] = chz.field(default=("key",), doc=f"which judges: {JUDGE_NAMES}, or custom ones")
    without_speeches: bool = chz.field(default=False, doc="show only the answers")
    max_debates: int | None = chz.field(default=None, doc="use only the first ones, this many; None: all")


def judge_configs(cli: CLIConfig) -> dict[str, JudgeConfig]:
    """Configs by name, checked. Raises ConfigurationError for one that is unknown or cannot be opened."""
    if not cli.judges or len(set(cli.judges)) < len(cli.judges):
        raise ConfigurationError(f"judges={','.join(cli.judges)}: name at least one, and none twice")
    judge = cli.judge.with_weights(WeightsConfig(base_model=default_model()))
    configs = {name: chz.replace(judge, name=name) for name in cli.judges}
    for config in configs.values():
        check_judge(config)
    return configs


async def rejudge(cli: CLIConfig, debates: Sequence[SavedDebate]) -> dict[str, list[Verdict]]:
    """The verdicts of each judge, in the order of the debates, preceded by the saved ones."""
    verdicts = {AS_SAVED: [Verdict(debate.verdict) for debate in debates]}
    for name, config in judge_configs(cli).items():
        judge = await make_judge(config)
        views = [debate.view.without_speeches() if cli.without_speeches else debate.view for debate in debates]
        verdicts[name] = await gather_all(judge(view) for view in views)
    return verdicts


def table_rows(debates: Sequence[SavedDebate], verdicts: dict[str, list[Verdict]]) -> list[list[str]]:
    """A row per judge; rates have intervals over questions."""

    def rate(values: Sequence[float | None]) -> str:
        by_item: dict[str, list[float]] = {}
        for debate, value in zip(debates, values, strict=True):
            if value is not None:
                by_item.setdefault(debate.instance_id, []).append(value)
        return str(clustered_mean(list(by_item.values()))) if by_item else ""

    rows = []
    for name, of_judge in verdicts.items():
        pairs = list(zip(debates, of_judge, strict=True))
        right = [_right(debate, verdict) for debate, verdict in pairs]
        rows.append(
            [
                name,
                rate(right),
                rate([None if debate.label is None else float(v.winner is debate.label) for debate, v in pairs]),
                rate([float(verdict.winner is debate.verdict) for debate, verdict in pairs]),
                rate([None if v.winner.seat is None else float(v.winner is Winner.A) for _, v in pairs]),
                rate([float(verdict.winner is Winner.TIE) for _, verdict in pairs]),
                rate([float(verdict.winner is Winner.INVALID) for _, verdict in pairs]),
            ]
        )
    return rows


def _right(debate: SavedDebate, verdict: Verdict) -> float | None:
    right = [seat.correct for seat in debate.view.both()]
    return None if None in right else accuracy(verdict, [bool(one) for one in right])


async def main(cli: CLIConfig) -> None:
    judge_configs(cli)
    debates = load_debates(cli.debates)[: cli.max_debates]
    verdicts = await rejudge(cli, debates)
    rows = table_rows(debates, verdicts)
    folder = cli.folder(RECIPE)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "instance_id": debate.instance_id,
            "label": None if debate.label is None else debate.label.value,
            "verdicts": {name: of_judge[i].winner.value for name, of_judge in verdicts.items()},
            "shares": {
                name: of_judge[i].shares for name, of_judge in verdicts.items() if of_judge[i].shares is not None
            },
        }
        for i, debate in enumerate(debates)
    ]
    write_jsonl(folder / "verdicts.jsonl", lines)
    show_table(folder / "rejudge.md", f"{len(debates)} debates, share [95 % interval]", COLUMNS, rows)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
