"""Shared code of APIs that are translated into chats and back: routes_messages.py and routes_responses.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from tinker_local_backend.server.budget import memory_of
from tinker_local_backend.server.errors import Refused, refused_body
from tinker_local_backend.server.openai_schemas import ChatBody
from tinker_local_backend.server.routes_common import Posted


async def as_chat(posted: Posted, path: str, fields: Callable[[], Mapping[str, Any]]) -> ChatBody:
    """The body of a chat from its fields, whose memory counts for the request. `fields` runs off the event loop if the request
    is large. Raises Refused for invalid fields."""

    def convert() -> tuple[ChatBody, int]:
        try:
            body = ChatBody.model_validate(fields())
        except ValidationError as error:
            raise refused_body(path, error) from None
        return body, memory_of(body)

    body, size = await posted.off_loop(posted.reservation.count, convert)
    posted.reservation.extend(size)
    return body


def refuse(where: str, why: str) -> Refused:
    """The refusal of a field."""
    return Refused(400, f"{where[:200]} {why}")


def event(data: Mapping[str, Any]) -> str:
    """A server-sent event with its type as its name."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"
