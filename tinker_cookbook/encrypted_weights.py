"""Download training checkpoints of the hosted service through an encrypted export: the service only serves exported files.

The service encrypts the files (age, https://age-encryption.org) with a key made for one download. The export is
removed afterwards, and expires within an hour in any case.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import MissingPackageError, WeightsDownloadError
from tinker_cookbook.utils.extras import install_command

logger = logging.getLogger(__name__)

TTL_SECONDS = 3600
_SUFFIX = ".age"


async def fetch_encrypted(
    service: Any, rest: Any, model_path: str, folder: Path, fetch: Callable[[Mapping[str, str]], Mapping[str, Path]]
) -> None:
    """Write the files of a training checkpoint into a folder, decrypted. Opens a training session on its base model.

    Args:
        service, rest: clients of the hosted service.
        folder: must exist.
        fetch: downloads files, name -> address, and returns their paths.

    Raises:
        MissingPackageError: pyrage, which decrypts, is not installed.
        WeightsDownloadError: the checkpoint cannot be exported, or a file is not encrypted with our key.
    """
    try:
        pyrage = importlib.import_module("pyrage")
    except ImportError as error:
        raise MissingPackageError(
            f"{model_path}: downloading a training checkpoint needs pyrage; {install_command('download')}"
        ) from error
    identity = pyrage.x25519.Identity.generate()
    client = await service.create_training_client_from_state(model_path)
    options = {"ttl_seconds": TTL_SECONDS, "age_encryption_recipients": [str(identity.to_public())]}
    exported = (await client.save_weights_external("download", **options)).path
    try:
        urls = (await rest.get_external_weights_urls(exported)).urls
        if plain := sorted(name for name in urls if not name.endswith(_SUFFIX)):
            raise WeightsDownloadError(f"{model_path}: {plain[0]} was exported without encryption; try again")
        for name, file in fetch(urls).items():
            try:
                content = pyrage.decrypt(file.read_bytes(), [identity])
            except pyrage.DecryptError as error:
                raise WeightsDownloadError(f"{model_path}: {name} cannot be decrypted ({error}); try again") from error
            (folder / Path(name).name.removesuffix(_SUFFIX)).write_bytes(content)
    finally:
        try:
            await rest.delete_checkpoint_from_tinker_path(exported)
        except Exception:
            logger.warning(
                "%s could not be removed; it expires within %d seconds", exported, TTL_SECONDS, exc_info=True
            )
