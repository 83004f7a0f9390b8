"""The address of a checkpoint's archive on a server. The SDK had a call for it before version 0.38, and servers still have
the route: `GET /api/v1/training_runs/<run>/checkpoints/<kind>/<name>/archive` answers with a redirect.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


async def archive_address(rest: Any, model_path: str) -> tuple[str | None, str]:
    """Ask the server of an SDK's RestClient for the address of a checkpoint's archive (.tar or .tar.gz).

    Returns:
        The address, and ""; or None, and the reason that the server gave for having none.

    Raises:
        tinker.APIConnectionError: the server does not answer.
    """
    import tinker

    # tinker.lib has no __init__.py, so tinker's py.typed does not count for it.
    from tinker.lib.client_connection_pool_type import (  # pyright: ignore[reportMissingTypeStubs]
        ClientConnectionPoolType,
    )

    holder = getattr(rest, "holder", None)
    if holder is None:
        return None, "this client has no connection to a server"
    parsed = tinker.types.ParsedCheckpointTinkerPath.from_tinker_path(model_path)
    route = f"/api/v1/training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}/archive"

    async def ask() -> tuple[str | None, str]:
        with holder.aclient(ClientConnectionPoolType.REST_SUPPORT_REDIRECT) as client:
            try:
                await client.get(route, cast_to=object, options={"follow_redirects": False})
            except tinker.APIStatusError as error:  # a redirect too
                address = error.response.headers.get("location") if error.status_code in (302, 303, 307) else None
                return address, "" if address else f"HTTP {error.status_code}: {error.message}"
        return None, "it answered without an address"

    address, why = await holder.run_coroutine_threadsafe(ask())
    if address is None:
        logger.info("%s: the server offers no archive (%s)", model_path, why)
    return address, why
