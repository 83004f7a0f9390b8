"""How many prompts of how many differ from those of the reference package, for docs/renderers.md:

python -m tests.reference.numbers
"""

from collections import Counter

from tests.reference.compare import differences
from tests.reference.differences import reason
from tests.reference.observe import conversations_of
from tests.reference.subjects import FAMILIES


def row(family: str, renderer: str) -> str:
    """Prompts that differ, of how many, and why, as the cells of a table."""
    found = [name for name in differences(family, renderer) if name.startswith("prompt: ")]
    why = Counter(reason(renderer, name) for name in found)
    said = "; ".join(f"{number} x {text}" for text, number in why.most_common())
    return f"{len(found)} of {len(conversations_of(FAMILIES[family]))} | {said}"


def table() -> str:
    """A line for all renderers of a family that differ in the same way."""
    lines = ["| renderer | prompts that differ | why ours is so |", "|---|---|---|"]
    for family, what in FAMILIES.items():
        rows: dict[str, list[str]] = {}
        for renderer in what.renderers:
            rows.setdefault(row(family, renderer), []).append(f"`{renderer}`")
        lines += [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
