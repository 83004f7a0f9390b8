"""Routes that every training step and every sample ask for several times, without a framework between request and service.

FastAPI matches routes and resolves dependencies anew for each request, which takes longer than all the rest of these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.service import Service


@dataclass(frozen=True)
class DirectRoute:
    """A POST route. `call` takes the service, the tenant and the checked body; it raises what FastAPI's routes raise."""

    path: str
    body: type[BaseModel] | None
    """what the JSON must be; None: the route takes the bytes as they come"""
    call: Callable[[Service, Tenant, Any], Awaitable[Response]]

    async def answer(self, service: Service, tenant: Tenant, body: bytes) -> Response:
        """Raises ValidationError (pydantic), Refused or LocalBackendError for what is wrong with the request."""
        return await self.call(service, tenant, body if self.body is None else self.body.model_validate_json(body))
