"""The FastAPI application: routes, and how errors are answered."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import Request

from tinker_local_backend.errors import LocalBackendError
from tinker_local_backend.server import (
    routes_hosted_only,
    routes_openai,
    routes_rest,
    routes_sampling,
    routes_service,
    routes_training,
)
from tinker_local_backend.server.access import Access
from tinker_local_backend.server.errors import refusal
from tinker_local_backend.server.guard import Guard
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused


def make_app(service: Service, access: Access) -> FastAPI:
    app = FastAPI(title="tinker_local_backend", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    for routes in (routes_service, routes_training, routes_sampling, routes_rest, routes_hosted_only, routes_openai):
        app.include_router(routes.router())
    direct = {
        route.path: route for routes in (routes_training, routes_sampling, routes_openai) for route in routes.DIRECT
    }
    app.add_middleware(Guard, service=service, access=access, direct=direct)
    for kind in (Refused, RequestValidationError, LocalBackendError, Exception):
        app.add_exception_handler(kind, _refused)
    return app


async def _refused(request: Request, error: Exception) -> JSONResponse:
    return refusal(request.url.path, error)
