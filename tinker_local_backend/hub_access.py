"""Whether the Hugging Face hub answers, asked once: without a network its client tries each of many files for half a minute."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

ANSWER_SECONDS = 5.0

logger = logging.getLogger(__name__)


@cache
def try_hub_once() -> None:
    """See whether the hub answers, unless HF_HUB_OFFLINE says that it is not to be asked. Where it does not, the process goes on
    as with HF_HUB_OFFLINE=1: what is in the cache is found, and all else refused at once."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or (problem := _why_silent(constants.ENDPOINT)) is None:
        return
    logger.warning("%s does not answer (%s): only models and data of its cache can be had", constants.ENDPOINT, problem)
    constants.HF_HUB_OFFLINE = True
    if (config := sys.modules.get("datasets.config")) is not None:  # has a copy, made when it was imported
        vars(config)["HF_HUB_OFFLINE"] = True


def _why_silent(address: str) -> str | None:
    from huggingface_hub import get_session

    session: Any = get_session()
    try:
        session.head(address, timeout=ANSWER_SECONDS)
    except Exception as error:  # of the HTTP package that this version of the client is built on
        return str(error) or type(error).__name__
    return None
