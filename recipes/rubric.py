"""Rewards from a rubric: a language model grades replies by several weighted criteria, or compares those of a group.

    python -m recipes.rubric grader.endpoint.base_url=https://api.openai.com/v1 grader.endpoint.model=gpt-4.1-mini
    python -m recipes.rubric mode=compare criteria=my_criteria.toml grader.weights.base_model=Qwen/Qwen3-8B
    python -m recipes.rubric task=summary grader.endpoint.base_url=http://127.0.0.1:8000/v1 grader.endpoint.model=judge

The criteria are a TOML file of tables [[criteria]] with name, wanted and weight. With mode=score the reward of a reply
is the mean of its grades, from 0 to 1; with mode=compare its mean share against the other replies to the question,
each pair asked in both orders. Repeated requests are cached, and grader.endpoint.cache_dir caches answers on disk.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import chz

from recipes.common import for_model
from recipes.rl_common import (
    TaskConfig,
    check_groups,
    questions_of,
    run_folder,
    train_and_show,
    train_config,
)
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env import Rubric
from tinker_cookbook.env.contract_dataset import loaded_environment
from tinker_cookbook.env.lm_rubric import Criterion, RubricGrader, RubricGraderConfig, check_criteria
from tinker_cookbook.env.task_data import load_items
from tinker_cookbook.env.tasks import get_task
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import get_text_content
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.runs.outcome import RunSummary

RECIPE = "rubric"

CRITERIA = (
    Criterion(name="right", wanted="the reply says what the reference says", weight=3.0),
    Criterion(name="brief", wanted="the reply says nothing else", weight=1.0),
)


@chz.chz(typecheck=True)
class CLIConfig(TaskConfig):
    """Keys of `python -m recipes.rubric`."""

    mode: Literal["score", "compare"] = chz.field(
        default="score", doc="score: grades of each reply by itself; compare: shares against the others of its group"
    )
    criteria: str | None = chz.field(
        default=None, doc="TOML file of [[criteria]]; default: right (3) and brief (1), against the reference"
    )
    grader: RubricGraderConfig = chz.field(default_factory=RubricGraderConfig, doc="who grades")


def read_criteria(path: str | None) -> Sequence[Criterion]:
    """The criteria of a file. Raises ConfigurationError, which names the file."""
    if path is None:
        return CRITERIA
    try:
        rows = tomllib.loads(Path(path).expanduser().read_text()).get("criteria", [])
        criteria = [Criterion(**row) for row in rows]
        check_criteria(criteria)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"criteria={path!r}: {error}; write [[criteria]] with name, wanted and weight"
        ) from error
    return criteria


class Graded:
    """The functions of a rubric; the grader is opened once per run."""

    def __init__(self, grader: RubricGraderConfig, criteria: Sequence[Criterion]):
        self._config, self._criteria = grader, criteria

    async def _grader(self, info: dict[str, Any]) -> RubricGrader:
        service = info["service_client"]
        return await info["run"].once("rubric grader", lambda: self._config.open("grader", self._criteria, service))

    async def grade(self, completion: str, answer: str, info: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """One reply's mean grade."""
        grader = await self._grader(info)
        reward, metrics = await grader.score(info["question"], completion, answer or "")
        return reward, metrics

    async def share(
        self, completions: list[str], answers: list[str], infos: list[dict[str, Any]]
    ) -> list[tuple[float, dict[str, float]]]:
        """Each reply's mean share against the others in the group."""
        grader = await self._grader(infos[0])
        return await grader.rank(infos[0]["question"], completions, answers[0] or "")


def make_dataset_builder(cli: CLIConfig) -> RLDatasetBuilder:
    """The graded questions of resolved keys. Raises ConfigurationError; sends no request yet."""
    cli.grader.check("grader", cli.backend, cli.base_url)
    graded = Graded(cli.grader, read_criteria(cli.criteria))
    task = get_task(cli.task, cli.reward_fn)
    train, test = load_items(task, cli.dataset or task.default_dataset, cli.test_dataset)

    def rows(items: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "prompt": [{"role": m["role"], "content": get_text_content(m)} for m in task.messages(item)],
                "answer": item.reference,
                "id": item.id,
                "info": {"question": item.question},
            }
            for item in items
        ]

    loaded = SimpleNamespace(
        dataset=rows(train),
        eval_dataset=rows(test[: cli.num_test]) or None,
        rubric=Rubric([graded.grade if cli.mode == "score" else graded.share]),
    )
    return questions_of(
        cli, loaded_environment(task.name, loaded), check_groups(cli.num_rollouts, cli.num_groups, multiple=1)
    )


async def main(cli: CLIConfig) -> RunSummary:
    cli = for_model(cli)
    builder = make_dataset_builder(cli)
    metric = "reward/grade" if cli.mode == "score" else "reward/share"
    return await train_and_show(train_config(cli, RECIPE, builder, run_folder(cli, cli.mode)), ["reward/total", metric])


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
