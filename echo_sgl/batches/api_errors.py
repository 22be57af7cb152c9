"""Errors as OpenAI's clients read them: a status and `{"error": {...}}`."""

from __future__ import annotations

from typing import Any

from echo_sgl.errors import EchoError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(EchoError):
    """What a route answers instead of what was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def not_found(kind: str, given: str, param: str) -> ApiError:
    """404; the same whether it does not exist or is another tenant's."""
    shown = given[:80].encode(errors="replace").decode()
    return ApiError(404, f"no {kind} has the id {shown!r}", code="not_found", param=param)
