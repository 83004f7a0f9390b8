"""Games of several roles: the policy plays against itself, its past, other weights or a script, and learns its roles.

    python -m recipes.multi_agent
    python -m recipes.multi_agent game=shared_sum game.highest=9
    python -m recipes.multi_agent game=proposer_solver
    python -m recipes.multi_agent opponent=past opponent_share=0.5 save_every=4
    python -m recipes.multi_agent game=my_game.py:Pennies opponent=start model_name=Qwen/Qwen3-4B-Instruct-2507

`game` is kuhn_poker (competitive), shared_sum (cooperative), proposer_solver (a policy that sets its own tasks) or a
class that follows `tinker_cookbook.env.games.Game`.
Each role is compared with the same role in the other games of its deal (advantage.baseline=role_mean). The shipped
model first learns the form of moves, from games of the script `random`.
"""

import random
from collections.abc import Sequence
from typing import Any

import chz

from recipes.common import for_model
from recipes.rl_common import dataset_of, train_and_show, train_config
from recipes.warm_up import BATCH_SIZE, GENTLE_RATES, TINY_STEPS, WarmUpConfig, warm_up_on, warm_up_steps
from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.env.games import Match
from tinker_cookbook.env.multi_agent import MultiAgent, RoleEnv, check_game, multi_agent_env
from tinker_cookbook.env.opponents import PAST, OpponentKeys
from tinker_cookbook.env.shipped.games.kuhn_poker import KuhnPoker
from tinker_cookbook.env.shipped.games.proposer_solver import ProposerSolver
from tinker_cookbook.env.shipped.games.shared_sum import SharedSum
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.plugins import Kind, Registry
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.advantages import AdvantageConfig
from tinker_cookbook.runs.outcome import RunSummary
from tinker_cookbook.utils.seeds import derive_seed

ADVANTAGE = AdvantageConfig(baseline="role_mean")
RECIPE = "multi_agent"


def _problem(part: Any) -> str | None:
    if not isinstance(part, type):
        return "is not a class"
    try:
        check_game(part)
    except ConfigurationError as error:
        return str(error)
    return None


GAMES: Registry[type] = Registry(
    Kind(
        key="game",
        wanted="a class with `roles`, to_move(), observe(role), act(role, text) and rewards(), whose constructor takes `rng`",
        example="""
class Pennies:
    roles = ("even", "odd")
    def __init__(self, rng): self.moves = {}
    def to_move(self): return () if self.moves else self.roles
    def observe(self, role): return "Heads or tails?"
    def act(self, role, text): self.moves[role] = text
    def rewards(self):
        same = len(set(self.moves.values())) == 1
        return {"even": 1.0 if same else -1.0, "odd": -1.0 if same else 1.0}
""",
        problem=_problem,
    ),
    {"kuhn_poker": KuhnPoker, "proposer_solver": ProposerSolver, "shared_sum": SharedSum},
)


@chz.chz(typecheck=True)
class CLIConfig(OpponentKeys, WarmUpConfig, rates=GENTLE_RATES, max_steps=16, num_test=200):
    """Keys of `python -m recipes.multi_agent`."""

    game: str | type = chz.field(
        default="kuhn_poker",
        doc=f"{', '.join(GAMES.names())}; or a custom one: package.module:Class, path/file.py:Class",
    )
    game_args: dict[str, Any] = chz.field(default_factory=dict, doc="arguments of the game, as game.name=value")
    test_opponent: str | None = chz.field(
        default=None,
        doc="the opponent in evaluations; default: the game's (kuhn_poker: random, shared_sum: self)",
    )
    trained_roles: str | None = chz.field(default=None, doc="roles to train, separated by commas; default: all of them")


def make_env(cli: CLIConfig) -> MultiAgent:
    """The games of resolved keys, checked."""
    game = GAMES.resolve(cli.game)
    lag = cli.async_config.max_steps_off_policy if cli.async_config is not None else 0
    if cli.opponent == PAST and cli.async_periodic_saves:
        raise ConfigurationError("opponent=past meets checkpoints, which async_periodic_saves may delay; leave it out")
    return multi_agent_env(
        game,
        game_args=cli.game_args,
        test_opponent=cli.test_opponent,
        trained_roles=cli.trained_roles,
        **{key: getattr(cli, key) for key in chz.chz_fields(OpponentKeys)},
        past_every=cli.save_every,
        past_lag=lag,
    )


async def scripted_game(game: Any, rng: random.Random) -> list[Message]:
    """The messages of one random role of a scripted game, up to its last move."""
    match, script = Match(game), game.scripts["random"]
    envs = {role: RoleEnv(match, role) for role in game.roles}
    begun: set[str] = set()
    shown = rng.choice(game.roles)
    while not match.is_over:
        for role in tuple(game.to_move()):
            if role not in begun:
                begun.add(role)
                await envs[role].initial_observation()
            else:
                envs[role].messages.append({"role": "user", "content": game.observe(role)})
            move = script(game, role, rng)
            envs[role].messages.append({"role": "assistant", "content": move})
            match.submit(role, move)
    return envs[shown].messages


async def conversations(cli: CLIConfig, env: MultiAgent, steps: int) -> list[Sequence[Message]]:
    """The conversations of the supervised stage. Raises ConfigurationError for a game without the script `random`."""
    if "random" not in getattr(env.game, "scripts", {}):
        raise ConfigurationError(
            f"warm_up_steps={steps}: {env.game.__name__} has no script `random` to learn the form of moves from; add one to "
            "its `scripts`, or set warm_up_steps=0"
        )
    played = []
    for i in range(steps * BATCH_SIZE):
        rng = random.Random(derive_seed(cli.seed, "warm-up", i))
        messages = await scripted_game(env.game(rng=rng, **env.game_args), rng)
        if messages:
            played.append(messages)
    return played


async def main(cli: CLIConfig) -> RunSummary:
    cli = for_model(cli)
    env = make_env(cli)
    builder, name = dataset_of(cli, env), env.game.__name__
    steps = warm_up_steps(cli, TINY_STEPS if "random" in getattr(env.game, "scripts", {}) else 0)
    written = await conversations(cli, env, steps) if steps else []
    folder = [name, cli.opponent, f"{cli.groups_per_batch}x{cli.group_size}"]
    config = await warm_up_on(cli, train_config(cli, RECIPE, builder, folder, advantage=ADVANTAGE), written)
    metrics = [f"{role}/{key}" for role in env.roles for key in ("reward", "forfeit")]
    return await train_and_show(config, metrics)


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
