"""The FastAPI application: routes, and how errors are answered."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import Request

from tinker_local_backend.errors import CheckpointError, LocalBackendError
from tinker_local_backend.server import (
    routes_hosted_only,
    routes_openai,
    routes_rest,
    routes_sampling,
    routes_service,
    routes_training,
)
from tinker_local_backend.server.access import Access
from tinker_local_backend.server.errors import error_body, speaks_openai
from tinker_local_backend.server.guard import Guard
from tinker_local_backend.server.service import Service
from tinker_local_backend.server.sessions import Refused


def make_app(service: Service, access: Access) -> FastAPI:
    app = FastAPI(title="tinker_local_backend", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    for routes in (routes_service, routes_training, routes_sampling, routes_rest, routes_hosted_only, routes_openai):
        app.include_router(routes.router())
    app.add_middleware(Guard, access=access, config=service.config, metrics=service.metrics)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(LocalBackendError, _impossible)
    app.add_exception_handler(Exception, _internal)
    return app


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return _answer(request, error.status, error.detail, headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Which field is wrong and why, without repeating what was sent."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(str(part) for part in e['loc'][1:])}: {e['msg']}" for e in error.errors()[:8]]
    return _answer(request, 400 if speaks_openai(request.url.path) else 422, "; ".join(problems)[:2000])


async def _impossible(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, 404 if isinstance(error, CheckpointError) else 400, str(error))


async def _internal(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours; the log has the details."""
    return _answer(request, 500, f"internal error ({type(error).__name__}); the server's log has the details")


def _answer(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(request.url.path, status, detail), status, headers)
