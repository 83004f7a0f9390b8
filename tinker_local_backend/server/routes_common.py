"""What the routes share."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request
from pydantic import BaseModel

from tinker_local_backend.server.access import Tenant
from tinker_local_backend.server.service import Service

T = TypeVar("T")

REMEMBERED_KEYS = 4096


def digest(body: BaseModel, *without: str) -> bytes:
    """Of what a request asks for, so that one that is sent again is known. `without` names fields that a retry changes."""
    return digest_bytes(body.model_dump_json(exclude=set(without)).encode())


def digest_bytes(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# Coroutines, because FastAPI runs plain functions on threads.


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _tenant(request: Request) -> Tenant:
    return request.state.tenant


async def _idempotency_key(request: Request) -> str | None:
    return request.headers.get("x-idempotency-key")


ServiceOf = Annotated[Service, Depends(_service)]
TenantOf = Annotated[Tenant, Depends(_tenant)]
IdempotencyKey = Annotated[str | None, Depends(_idempotency_key)]


class Once:
    """Carries out a request once per idempotency key, however often it is sent."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[str, str], asyncio.Task[Any]] = OrderedDict()

    async def run(self, tenant: Tenant, key: str | None, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result or error of `make()`, or of the earlier call with this key. A failed call may be tried again."""
        if key is None:
            return await make()
        place = (tenant.name, key[:256])
        task = self._tasks.get(place)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[place] = asyncio.create_task(make())
            if len(self._tasks) > REMEMBERED_KEYS:
                self._tasks.popitem(last=False)
        return cast(T, await asyncio.shield(task))
