"""The fixed reference policy of DPO and KL penalties. Every checkpoint records its path; it is never created again."""

import logging
from typing import Any

import chz

from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs.session import Session
from tinker_cookbook.utils.fields import docs, fill
from tinker_cookbook.weights_config import Scorer, same_model

logger = logging.getLogger(__name__)

REFERENCE_KEY = "reference"
REFERENCE_NAME = "reference"


@chz.chz(typecheck=True)
class KLReferenceConfig(Scorer):
    """A named reference policy."""

    DOCS = docs(base_model="base model: a directory, a hub id, or tiny_chat (shipped); None: the one that is trained")


async def open_reference(session: Session, named: KLReferenceConfig | None = None) -> SamplingClient:
    """A sampling client of the reference policy, the same one across all resumes of a run.

    Without a name it is the policy that the run started from: the base model under a new adapter, or a copy of the
    loaded weights, saved once and kept. Every checkpoint's record names it.

    Raises:
        ConfigurationError: a resumed run has another reference than at its start, or cannot determine its own; also as
            in `WeightsConfig.open`.
    """
    if named is not None and named.base_model is None and named.load_checkpoint_path is not None:
        named = fill(KLReferenceConfig, named, base_model=session.config.model_name)
    asked = None if named is None else {"base_model": named.base_model, "path": named.load_checkpoint_path}
    reference = _recorded(session, asked)
    if reference is None:
        reference = asked or {"base_model": session.config.model_name, "path": await _starting_weights(session)}
    session.checkpoints.loop_state[REFERENCE_KEY] = reference
    base_model, path = reference["base_model"], reference["path"]
    logger.info("reference policy: %s", path or base_model)
    weights = named or KLReferenceConfig(base_model=str(base_model), load_checkpoint_path=path)
    return await weights.open(REFERENCE_NAME, session.service)


async def move_reference(session: Session, name: str) -> SamplingClient:
    """Make the current weights the reference, for runs that update it: they are saved as `name`, and recorded.

    The saved weights live as long as periodic checkpoints, the only ones that such a run resumes from.
    """
    saved = await session.training_client.save_weights_for_sampler(name, ttl_seconds=session.config.ttl_seconds)
    reference = {"base_model": session.config.model_name, "path": saved.path}
    session.checkpoints.loop_state[REFERENCE_KEY] = reference
    logger.info("reference policy: %s", saved.path)
    weights = KLReferenceConfig(base_model=session.config.model_name, load_checkpoint_path=saved.path)
    return await weights.open(REFERENCE_NAME, session.service)


def _recorded(session: Session, asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if session.record is None:
        return None
    recorded = session.record.get(REFERENCE_KEY)
    if recorded is None and asked is None and session.config.load_checkpoint_path is not None:
        raise ConfigurationError(
            f"the run in {session.run.log_path} started without a reference policy, and the weights it started from are "
            "not kept; name a reference, or start in another log_path"
        )
    if recorded is None or asked is None:
        return recorded
    if recorded["path"] != asked["path"] or not same_model(recorded["base_model"], asked["base_model"]):
        raise ConfigurationError(
            f"the run in {session.run.log_path} has the reference {recorded}, now {asked} is asked for; "
            "leave the reference as it was, or start in another log_path"
        )
    return recorded


async def _starting_weights(session: Session) -> str | None:
    if session.config.load_checkpoint_path is None:
        return None
    return (await session.training_client.save_weights_for_sampler(REFERENCE_NAME, ttl_seconds=None)).path
