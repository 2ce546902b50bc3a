"""The routes that are not hot, as a FastAPI application, and the OpenAPI page of all."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from edge.core.errors import Code, EdgeError
from edge.core.types import Principal
from edge.driver import Driver
from edge.http.asgi import raw_headers, request_id
from edge.http.errors import error_headers, openai_error
from edge.http.models import Catalogue
from edge.http.openapi import describe
from edge.identity import Identities

_CODES = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED, 422: Code.UNPROCESSABLE}


def make_api(identities: Identities, catalogue: Catalogue, driver: Driver, version: str) -> FastAPI:
    """Every error has OpenAI's shape. `/live`, `/health`, `/ready` and the OpenAPI page ask for no key."""
    api = FastAPI(title="Kinroute", version=version, redoc_url=None)

    async def principal(request: Request) -> Principal:
        return (await identities.identify(raw_headers(request.scope))).principal

    known = [Depends(principal)]

    @api.get("/v1/models", dependencies=known)
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": catalogue.listing(max_context_length=driver.max_context_length)}

    @api.get("/v1/models/{name:path}", dependencies=known)
    async def get_model(name: str) -> dict[str, Any]:
        return catalogue.entry(name, max_context_length=driver.max_context_length)

    @api.get("/version", dependencies=known)
    async def get_version() -> dict[str, str]:
        return {"version": version}

    @api.get("/live")
    @api.get("/health", include_in_schema=False)
    @api.head("/live", include_in_schema=False)
    @api.head("/health", include_in_schema=False)
    async def live() -> Response:
        return Response("live", media_type="text/plain")

    @api.get("/ready")
    @api.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        if driver.model_ready:
            return Response("ready", media_type="text/plain")
        return Response("not ready", 503, media_type="text/plain", headers={"retry-after": "1"})

    _use_our_errors(api)
    _describe_hot_routes(api)
    return api


def _use_our_errors(api: FastAPI) -> None:
    @api.exception_handler(EdgeError)
    async def refused(request: Request, error: EdgeError) -> Response:
        return _error_response(request, error)

    @api.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        path, method = request.url.path[:200], request.method
        message = {404: f"There is no {path} here.", 405: f"{path} does not answer {method}."}.get(
            error.status_code, str(error.detail)
        )
        code = _CODES.get(error.status_code, Code.INVALID)
        response = _error_response(request, EdgeError(code, message))
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return _error_response(request, EdgeError(Code.UNPROCESSABLE, str(first["msg"]), param=param))


def _error_response(request: Request, error: EdgeError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error, request_id(request.scope))}
    return Response(openai_error(error), error.status, headers=headers)


def _describe_hot_routes(api: FastAPI) -> None:
    """FastAPI cannot see them, so its schema is told, once."""
    make_schema = api.openapi

    def openapi() -> dict[str, Any]:
        known = api.openapi_schema is not None
        page = make_schema()
        if not known:
            describe(page)
        return page

    api.openapi = openapi  # type: ignore[method-assign]
