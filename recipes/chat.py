"""Talk to a checkpoint, to the last checkpoint of a run, or to a base model, in the terminal.

    python -m recipes.chat                                       # the shipped tiny model
    python -m recipes.chat log_path=~/.local/share/tinker-cookbook/sl_basic/20260101_120000_conversations
    python -m recipes.chat model_path=tinker://<run>/sampler_weights/final temperature=0
    echo "What is 2 + 3?" | python -m recipes.chat seed=0        # lines from a pipe work too

Use the same system prompt as the run was trained with: with log_path= it is shown, and run_system=True uses it.
/help lists the commands: /reset, /system, /temperature, /max_tokens, /logprobs, /quit.
"""

import asyncio
import sys

import chz
from rich.console import Console

from recipes.policy import PolicyCLIConfig, open_policy, reply_tokens
from tinker_cookbook.chat import ChatSession, ChatSettings, converse
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.metadata import run_system_prompt

RECIPE = "chat"


@chz.chz(typecheck=True)
class CLIConfig(PolicyCLIConfig, temperature=0.7):
    """Keys of `python -m recipes.chat`."""

    system: str | None = chz.field(default=None, doc="system prompt")
    run_system: bool = chz.field(default=False, doc="take the system prompt that the run in log_path trained under")
    logprobs: bool = chz.field(default=False, doc="show the logprob of every token of the replies")


def main(cli: CLIConfig) -> None:
    ChatSettings(temperature=cli.temperature, max_tokens=reply_tokens(cli, ""))  # checked before anything loads
    system, trained_under = settle_system(cli)
    with asyncio.Runner() as runner:
        policy = runner.run(open_policy(cli))
        settings = ChatSettings(system, cli.temperature, reply_tokens(cli, policy.base_model), cli.logprobs, cli.seed)
        console = Console(soft_wrap=True)
        session = ChatSession(policy, settings, console)
        greeting = f"{policy.name} ({policy.renderer_name}); {session.describe()}; /help"
        console.print(greeting, markup=False, highlight=False)
        if trained_under is not None and trained_under != system:
            note = f"the run trained under the system prompt {trained_under!r}; run_system=True takes it"
            console.print(note, style="dim", markup=False, highlight=False)
        converse(session, read_line, runner)


def settle_system(cli: CLIConfig) -> tuple[str | None, str | None]:
    """(the initial system prompt, the one that the run in log_path was trained with).

    Raises ConfigurationError when the run's prompt is requested but missing, or another one is given too.
    """
    trained_under = run_system_prompt(cli.log_path) if cli.log_path is not None else None
    if not cli.run_system:
        return cli.system, trained_under
    if cli.system is not None:
        raise ConfigurationError("system and run_system are given: give one of them")
    if trained_under is None:
        where = f"log_path={cli.log_path!r} has none" if cli.log_path is not None else "no log_path is given"
        raise ConfigurationError(f"run_system=True takes the system prompt of a run, but {where}; set system= instead")
    return trained_under, trained_under


def read_line() -> str | None:
    """A line from the terminal or the pipe; None at the end."""
    try:
        return input("you> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
