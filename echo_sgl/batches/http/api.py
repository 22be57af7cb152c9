"""OpenAI's Files and Batches as HTTP routes over a `BatchService`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect

from echo_sgl.batches.http.api_errors import ApiError, wrong_key
from echo_sgl.batches.http.documents import Batch, BatchList, DeletedFile, File, FileList, answers
from echo_sgl.batches.http.request_bodies import UPLOAD_SCHEMA, CreateBatch, creation_schema
from echo_sgl.batches.http.service import BatchService
from echo_sgl.batches.http.tenants import Tenants
from echo_sgl.batches.http.uploads import UploadReader

MAX_BODY_BYTES = 256 * 1024
logger = logging.getLogger(__name__)
T = TypeVar("T")
_BEARER = HTTPBearer(auto_error=False, description="An API key; a server may need none.")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class EnvelopeRoute(APIRoute):
    """A route whose errors all have OpenAI's form."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                return _error_response(error)
            except RequestValidationError as error:
                return _error_response(_invalid(error.errors()))
            except HTTPException as error:
                return _error_response(ApiError(error.status_code, str(error.detail)))
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)
            except (SQLAlchemyError, OSError):
                logger.exception("the job store failed")
                message = "the job store cannot be used now; the server's log says why"
                return _error_response(ApiError(503, message, code="store_unavailable"))
            except Exception:
                logger.exception("a request to the batch service failed")
                message = "an error of the server; its log says more"
                return _error_response(ApiError(500, message, code="internal_error"))

        return answer


def batch_router(service: BatchService, tenants: Tenants, threads: Executor) -> APIRouter:
    """All routes of the batch service."""

    async def run(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, lambda: function(*args, **kwargs))

    def tenant_of(request: Request, _: Annotated[Any, Depends(_BEARER)]) -> str:
        tenant = tenants.of_header(request.headers.get("authorization"))
        if tenant is None:
            raise wrong_key()
        return tenant

    router = APIRouter(prefix="/v1", route_class=EnvelopeRoute, tags=["batches"])
    _add_file_routes(router, service, Depends(tenant_of), run)
    _add_batch_routes(router, service, Depends(tenant_of), run)
    return router


def _add_file_routes(router: APIRouter, service: BatchService, tenant_of: Any, run: Any) -> None:
    @router.post("/files", openapi_extra=UPLOAD_SCHEMA, responses=answers(File, 408, 413, 429))
    async def upload_file(request: Request, tenant: str = tenant_of) -> Any:
        """Upload a job file, one request a line."""
        draft = await run(service.admit_upload, tenant)
        try:
            reader = UploadReader(
                request.headers.get("content-type", ""), draft, service.config.max_file_bytes
            )
            upload = await reader.read(request.stream(), run)
            return await run(service.add_file, tenant, draft, upload)
        except OSError as error:
            logger.exception("an upload could not be written")
            raise ApiError(503, "the server cannot store files now", code="storage") from error
        finally:
            await run(service.end_upload, tenant, draft)

    @router.get("/files", responses=answers(FileList, 404))
    async def list_files(
        tenant: str = tenant_of,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        """The files of this key."""
        return await run(
            service.list_files, tenant, purpose=purpose, after=after, limit=limit, order=order
        )

    @router.get("/files/{file_id}", responses=answers(File, 404))
    async def get_file(file_id: str, tenant: str = tenant_of) -> Any:
        """One file's object."""
        return await run(service.get_file, tenant, file_id)

    @router.get(
        "/files/{file_id}/content", response_class=StreamingResponse, responses=_CONTENT_ANSWERS
    )
    async def get_content(file_id: str, tenant: str = tenant_of) -> Response:
        """What a file holds."""
        num_bytes, pieces = await run(service.file_content, tenant, file_id)
        return StreamingResponse(
            _stream(pieces, run),
            media_type="application/octet-stream",
            headers={"content-length": str(num_bytes), "x-content-type-options": "nosniff"},
        )

    @router.delete("/files/{file_id}", responses=answers(DeletedFile, 404, 409))
    async def delete_file(file_id: str, tenant: str = tenant_of) -> Any:
        """Delete a file."""
        return await run(service.delete_file, tenant, file_id)


def _add_batch_routes(router: APIRouter, service: BatchService, tenant_of: Any, run: Any) -> None:
    @router.post(
        "/batches",
        openapi_extra=creation_schema(service.endpoints),
        responses=answers(Batch, 404, 413, 429),
    )
    async def create_batch(request: Request, tenant: str = tenant_of) -> Any:
        """Start a batch over an uploaded file."""
        body = _parse(CreateBatch, await _bounded_body(request))
        return await run(service.create_batch, tenant, **body.model_dump())

    @router.get("/batches", responses=answers(BatchList, 404))
    async def list_batches(
        tenant: str = tenant_of,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Any:
        """The batches of this key, newest first."""
        return await run(service.list_batches, tenant, after=after, limit=limit)

    @router.get("/batches/{batch_id}", responses=answers(Batch, 404))
    async def get_batch(batch_id: str, tenant: str = tenant_of) -> Any:
        """One batch: its state, counts and tokens."""
        return await run(service.get_batch, tenant, batch_id)

    @router.post("/batches/{batch_id}/cancel", responses=answers(Batch, 404, 409))
    async def cancel_batch(batch_id: str, tenant: str = tenant_of) -> Any:
        """End a batch; what is answered is kept."""
        return await run(service.cancel_batch, tenant, batch_id)

    @router.post("/batches/{batch_id}/retry", responses=answers(Batch, 404, 409))
    async def retry_batch(batch_id: str, tenant: str = tenant_of) -> Any:
        """Do the lines again that failed, expired or were cancelled."""
        return await run(service.retry_batch, tenant, batch_id)

    @router.post("/batches/{batch_id}/pause", responses=answers(Batch, 404, 409))
    async def pause_batch(batch_id: str, tenant: str = tenant_of) -> Any:
        """Send no more lines for now."""
        return await run(service.pause_batch, tenant, batch_id)

    @router.post("/batches/{batch_id}/resume", responses=answers(Batch, 404, 409))
    async def resume_batch(batch_id: str, tenant: str = tenant_of) -> Any:
        """Go on with a paused batch."""
        return await run(service.resume_batch, tenant, batch_id)


async def _stream(pieces: Iterator[bytes], run: Any) -> AsyncIterator[bytes]:
    while (piece := await run(next, pieces, b"")) != b"":
        yield piece


async def _bounded_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes")
    return body


def _parse(model: type[CreateBatch], body: bytes) -> CreateBatch:
    try:
        return model.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except ValidationError as error:
        raise _invalid(error.errors()) from error


def _invalid(errors: Any) -> ApiError:
    """400 for the first thing that is wrong; the given value is not repeated."""
    first = errors[0]
    names = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path")]
    param = ".".join(names)[:80] or None
    return ApiError(400, f"{param or 'the request'}: {first.get('msg', 'invalid')}", param=param)


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.as_json(), status_code=error.status, headers=error.headers)


_CONTENT_ANSWERS = {
    **answers(File, 404),
    200: {
        "description": "What the file holds.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
}
