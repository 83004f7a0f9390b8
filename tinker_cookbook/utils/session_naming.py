"""The name of a run's session in the service's console and lists. It need not be unique."""

import re


def resolve_session_display_name(*, session_name: str | None, wandb_name: str | None) -> str | None:
    """The given name, or else the run's name on W&B, or else None. An empty text counts as None."""
    return session_name or wandb_name or None


def default_cookbook_session_name(*parts: str | None, wandb_name: str | None = None) -> str:
    """The default name of a recipe's session: `cookbook-<part>-<part>`.

    Args:
        parts: the recipe, then what distinguishes its runs (data, environment, stage). None and empty ones are dropped.
        wandb_name: the user's name for W&B; if given, it is used unchanged.
    """
    if wandb_name:
        return wandb_name
    return "-".join(slug for part in ("cookbook", *parts) if (slug := slugify(part or "")))


def slugify(text: str) -> str:
    """Lower case, with one hyphen for each run of characters other than a to z and digits, none at the ends."""
    return "-".join(re.findall("[a-z0-9]+", text.lower()))
