"""Routes for sampling, and the route that returns the results of all requests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from tinker_local_backend.server.budget import Draw
from tinker_local_backend.server.errors import Refused
from tinker_local_backend.server.routes_common import Context, DirectRoute, Posted, digest_bytes
from tinker_local_backend.server.samplers import CLIENTS_PER_SAMPLER
from tinker_local_backend.server.schemas import CreateSamplingSession, RetrieveFuture, Sample, SamplingSessionId


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/v1")

    @routes.post("/create_sampling_session")
    async def create_sampling_session(body: CreateSamplingSession, context: Context) -> Any:
        sampler = await context.service.samplers.create(
            context.tenant, body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}

    @routes.post("/join_sampling_session")
    async def join_sampling_session(body: SamplingSessionId, context: Context) -> Any:
        sampler = context.service.samplers.find(context.tenant, body.sampling_session_id)
        if sampler.clients >= CLIENTS_PER_SAMPLER:
            raise Refused(403, "this sampling session has no client numbers left; make a new one")
        sampler.clients += 1
        return {"client_counter": sampler.clients - 1}

    @routes.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str, context: Context) -> Any:
        sampler = context.service.samplers.find(context.tenant, sampler_id)
        return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}

    @routes.post("/cancel_future", status_code=204)
    async def cancel_future(body: RetrieveFuture, context: Context) -> None:
        request = context.service.requests.find(context.tenant, body.request_id)
        if request is not None:
            context.service.requests.cancel(request)

    return routes


async def asample(posted: Posted, body: Sample) -> Response:
    if body.sampling_session_id is None:
        raise Refused(422, "sampling_session_id is missing; create_sampling_session makes one")
    record = bool(body.record_stability_info)

    def encode() -> tuple[Draw, bytes]:
        fields = body.model_dump_json(exclude={"sampling_session_id", "seq_id", "record_stability_info"}).encode()
        return body.draw(fields), digest_bytes(fields) + bytes([record])

    draw, identity = await posted.off_loop(posted.reservation.count, encode)
    request = posted.service.samplers.sample(
        posted.tenant, body.sampling_session_id, body.seq_id, draw, identity, record=record
    )
    return JSONResponse({"request_id": request.request_id, "sample_sequence_ids": request.sequence_ids})


async def retrieve_future(posted: Posted, body: RetrieveFuture) -> Response:
    service = posted.service
    request = service.requests.find(posted.tenant, body.request_id)
    if request is not None:
        request.session.seen = time.monotonic()
        try:
            async with asyncio.timeout(service.config.poll_seconds):
                await request.done.wait()
        except TimeoutError:
            again = {"type": "try_again", "request_id": request.request_id, "queue_state": "active"}
            return JSONResponse(again, status_code=408)
    if request is None or request.reply is None:
        error = (
            f"there is no result of a request {body.request_id!r}: it was fetched some time ago, evicted by later ones, or "
            "the server was restarted since; make a new ServiceClient and continue from a saved checkpoint"
        )
        return JSONResponse({"error": error, "category": "user"})
    request.fetch()
    fields = request.reply.fields
    if "error" in fields:
        return JSONResponse({"error": fields["error"], "category": fields["category"]})
    if "json" in fields:
        return JSONResponse(fields["json"])
    return Response(request.reply.body, media_type="application/x-protobuf")


DIRECT = (
    DirectRoute("/api/v1/asample", Sample, asample),
    DirectRoute("/api/v1/retrieve_future", RetrieveFuture, retrieve_future),
)
