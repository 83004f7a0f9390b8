"""Which renderer made a training run's data: recorded in the run's user metadata, found again from its checkpoints."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinker_cookbook import model_info
from tinker_cookbook.exceptions import ConfigurationError

if TYPE_CHECKING:
    from tinker_cookbook.clients import ServiceClient

RENDERER_NAME_METADATA_KEY = "renderer_name"
"""Under this key a training run's user metadata names the renderer that made its data."""


def add_renderer_name_to_user_metadata(
    user_metadata: Mapping[str, str] | None, renderer_name: str | None
) -> dict[str, str]:
    """The metadata of a new training run with its renderer's name, so that its checkpoints can be sampled from as trained."""
    named = {} if renderer_name is None else {RENDERER_NAME_METADATA_KEY: renderer_name}
    return {**(user_metadata or {}), **named}


async def get_renderer_name_from_checkpoint_async(service_client: "ServiceClient", path: str) -> str | None:
    """The renderer that a checkpoint (tinker://...) was trained with; None when its run did not say."""
    training_run = await service_client.create_rest_client().get_training_run_by_tinker_path_async(path)
    return (training_run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)


async def resolve_renderer_name_from_checkpoint_or_default_async(
    service_client: "ServiceClient", model_name: str, renderer_name: str | None, load_checkpoint_path: str | None
) -> str:
    """The renderer asked for, else the checkpoint's own, else the one recommended for the model."""
    if renderer_name is not None:
        return renderer_name
    if load_checkpoint_path is not None:
        recorded = await get_renderer_name_from_checkpoint_async(service_client, load_checkpoint_path)
        if recorded is not None:
            return recorded
    return model_info.get_recommended_renderer_name(model_name)


async def check_renderer_name_for_checkpoint_async(
    service_client: "ServiceClient", path: str, renderer_name: str
) -> None:
    """Raises ConfigurationError when a checkpoint was trained with another renderer than `renderer_name`."""
    recorded = await get_renderer_name_from_checkpoint_async(service_client, path)
    if recorded not in (None, renderer_name):
        raise ConfigurationError(
            f"renderer_name={renderer_name!r}, but {path} was trained with {recorded!r}: set renderer_name={recorded}"
        )
