"""Check once whether the Hugging Face hub answers: without a network its client retries each of many files for half a minute."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

ANSWER_SECONDS = 5.0

logger = logging.getLogger(__name__)


@cache
def try_hub_once() -> None:
    """Check whether the hub answers, unless HF_HUB_OFFLINE is set. If it does not, continue as with HF_HUB_OFFLINE=1: read files
    from the cache, and refuse all others at once."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or (problem := _failure(constants.ENDPOINT)) is None:
        return
    logger.warning("%s does not answer (%s): only cached models and data are available", constants.ENDPOINT, problem)
    constants.HF_HUB_OFFLINE = True
    if (config := sys.modules.get("datasets.config")) is not None:  # it copied the flag on import
        vars(config)["HF_HUB_OFFLINE"] = True


def _failure(address: str) -> str | None:
    """Why the hub does not answer; None if it does."""
    from huggingface_hub import get_session

    session: Any = get_session()
    try:
        session.head(address, timeout=ANSWER_SECONDS)
    except Exception as error:  # its type depends on the HTTP package of this version of the client
        return str(error) or type(error).__name__
    return None
