"""Which labelled debates a judge is trained on: the keys of both recipes."""

import chz

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.exceptions import ConfigurationError

SHIPPED = "collatz"


@chz.chz(typecheck=True)
class JudgeKeys:
    """Keys of every recipe that trains a judge."""

    debates: str = chz.field(
        default=SHIPPED,
        doc=f"{SHIPPED} (shipped: debates of tiny_debate), the folder of a run with debate_*.json, or a .jsonl file of "
        "recipes.debate_judge.create_data",
    )
    test_share: float = chz.field(default=0.25, doc="of the questions, held out with all debates about them")
    system_prompt: str | None = chz.field(default=None, doc="what the judge is told; None: what the protocol needs")

    @chz.validate
    def _share(self) -> None:
        if not 0 < self.test_share < 1:
            raise ConfigurationError(f"test_share={self.test_share}: must be between 0 and 1")


def debates_path(keys: JudgeKeys) -> str:
    """Where the debates are that the key names."""
    return str(EXAMPLE_DATA / "debates" / f"{SHIPPED}.jsonl") if keys.debates == SHIPPED else keys.debates
