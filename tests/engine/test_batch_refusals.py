"""A wrong key on our routes, with SGLang's own check of keys in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.responses import JSONResponse

from echo_sgl.engine.http.batch_routes import envelop_refusals

KEY = "the-operators-key"


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()

    @app.get("/v1/files")
    @app.get("/v1/models")
    @app.get("/echo/steps")
    async def answer() -> dict[str, str]:
        return {"is": "answered"}

    @app.get("/v1/batches")
    async def refuse() -> JSONResponse:
        return JSONResponse({"error": {"message": "ours"}}, 401, {"x-kept": "yes"})

    envelop_refusals(app)
    add_api_key_middleware(app, api_key=KEY, admin_api_key=None)
    return app


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-0", "/v1/batches", "/echo/steps"])
def test_a_wrong_key_is_refused_in_openais_form_on_our_paths(http: TestClient, path: str) -> None:
    answer = http.get(path, headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "Authorization: Bearer KEY" in error["message"]
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_other_answers_are_left_as_they_are(http: TestClient) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    assert http.get("/v1/models").json() == {"error": "Unauthorized"}
    assert http.get("/v1/files", headers=key).json() == {"is": "answered"}
    ours = http.get("/v1/batches", headers=key)
    assert (ours.status_code, ours.json()) == (401, {"error": {"message": "ours"}})
    assert ours.headers["x-kept"] == "yes"
    assert http.get("/v1/files/x", headers=key).status_code == 404


def test_openais_client_reads_the_reason(app: FastAPI) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            client = openai.AsyncOpenAI(
                api_key="wrong", base_url="http://server/v1", max_retries=0, http_client=http
            )
            with pytest.raises(openai.AuthenticationError, match="missing or wrong") as caught:
                await client.files.list()
            assert caught.value.code == "invalid_api_key"

    asyncio.run(main())
