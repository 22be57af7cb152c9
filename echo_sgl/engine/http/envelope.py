"""Refusals of our own routes and middleware, in OpenAI's form."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse

_KINDS = {
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "server_error",
}


def refusal(status: HTTPStatus, message: str, param: str | None = None) -> JSONResponse:
    """`param`: the field, header or id that is to blame."""
    kind = _KINDS.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": int(status)}
    return JSONResponse({"error": error}, status_code=status)
