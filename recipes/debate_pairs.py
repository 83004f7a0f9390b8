"""DPO from debates: writes the winners' answers against the losers' as preferences, which recipes.preference.train takes.

python -m recipes.debate_pairs debates=RUN output_path=pairs.jsonl
python -m recipes.preference.train dataset=pairs.jsonl
"""

from pathlib import Path

import chz

from recipes.results import OutputFile
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.debate.pairs import comparisons
from tinker_cookbook.debate.saved import SavedDebates, load_debates
from tinker_cookbook.env.single_turn import TaskSource
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.fields import REQUIRED, docs
from tinker_cookbook.utils.files import write_jsonl


@chz.chz(typecheck=True)
class CLIConfig(OutputFile, SavedDebates, TaskSource, output_path=REQUIRED):
    """Keys of `python -m recipes.debate_pairs`. Task and dataset are those of the run."""

    DOCS = docs(output_path="the file to write, a comparison in each line")


def main(cli: CLIConfig) -> None:
    task, train, test = cli.load()
    debates = load_debates(cli.debates)
    rows = comparisons(debates, task, [*train, *test])
    if not rows:
        raise ConfigurationError(
            f"debates={cli.debates!r}: none of {len(debates)} debates has a winner whose answer differs from the loser's"
        )
    path = Path(cli.output_path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, rows)
    print(f"{path}: {len(rows)} comparisons of {len(debates)} debates")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
