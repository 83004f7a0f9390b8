"""Settings under which no reward ever differs: nothing foresees them, and the run says so after three steps."""

import asyncio
from pathlib import Path

import pytest

from recipes import debate_rs_grpo
from tinker_cookbook import cli_utils
from tinker_cookbook.exceptions import ZeroAdvantageError
from tinker_cookbook.utils.files import read_jsonl

SMALL = ("num_groups=2", "max_steps=6", "eval_every=0", "save_every=0", "lora_rank=2")
BY_VERDICT = "debate_train=judge"
SETTINGS = {
    "nobody wins": ("judge=scripted:TIE",),
    "the two orders never agree": ("judge=scripted:A", "judge.both_orders=true", BY_VERDICT),
    "of a single answer the judge always says the same": ("protocol=direct", "judge=scripted:B", BY_VERDICT),
    "a seat is compared with the same seat": ("judge=scripted:A", "advantage.baseline=role_mean", BY_VERDICT),
    "winners are compared, and each has won": ("debate_reward=win",),
    "winners are compared, and each is right": ("judge=scripted:truth", "max_tokens=20"),
    "no answer is the policy's own": ("protocol.answers=assigned", "protocol.rounds=1"),
    "each winner is alone": ("num_rollouts=4",),
}


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS)
def test_the_run_says_so_after_three_steps(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_LOCAL_HOME", str(tmp_path / "home"))
    given = {key.partition("=")[0] for key in keys}
    more = [key for key in ("num_rollouts=8", "max_tokens=6") if key.partition("=")[0] not in given]
    cli = cli_utils.parse(debate_rs_grpo.CLIConfig, [*SMALL, *more, *keys, f"log_path={tmp_path / 'run'}"])
    with pytest.raises(ZeroAdvantageError) as raised:
        asyncio.run(debate_rs_grpo.main(cli))
    assert "The last 3 steps trained nothing, so the run ends after step 2" in raised.value.__notes__[0]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["train/skipped_steps"] for row in rows] == [1, 1, 1]
