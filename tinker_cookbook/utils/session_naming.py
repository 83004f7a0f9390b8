"""What a run's session is called in the service's console and lists. A name need not be the only one of its kind."""

import re


def resolve_session_display_name(*, session_name: str | None, wandb_name: str | None) -> str | None:
    """The name that was given, else that of the run on W&B, else none. An empty text is none."""
    return session_name or wandb_name or None


def default_cookbook_session_name(*parts: str | None, wandb_name: str | None = None) -> str:
    """The name of a recipe's session where the user gave none: `cookbook-<part>-<part>`.

    Args:
        parts: the recipe, then what tells its runs apart (data, environment, stage). None and empty ones are left out.
        wandb_name: a name that the user chose for W&B; it is the session's as it is.
    """
    if wandb_name:
        return wandb_name
    return "-".join(slug for part in ("cookbook", *parts) if (slug := slugify(part or "")))


def slugify(text: str) -> str:
    """In lower case, with one hyphen for whatever stands between letters a to z and digits, none at the ends."""
    return "-".join(re.findall("[a-z0-9]+", text.lower()))
