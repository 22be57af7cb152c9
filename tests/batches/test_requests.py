"""What the routes refuse, bound, list and keep apart, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import orjson
import pytest

from echo_sgl.batches.http import uploads
from echo_sgl.batches.http.tenants import Tenants
from tests.batches.client import Stub, job, line
from tests.cli.stubs import StubServer


def test_the_routes_are_described_in_the_openapi_document(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        paths = (await stub.http().get("/openapi.json")).json()["paths"]
        body = paths["/v1/batches"]["post"]["requestBody"]["content"]["application/json"]
        assert set(body["schema"]["required"]) == {
            "input_file_id",
            "endpoint",
            "completion_window",
        }
        assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]

    live_sqlite(life)


def test_lists_are_paged_newest_first(live) -> None:
    async def life(stub: Stub) -> None:
        created = [(await stub.create(job(["hello"]))).id for _ in range(5)]
        listed = [batch.id async for batch in stub.client.batches.list(limit=2)]
        assert listed == created[::-1]
        page = await stub.client.batches.list(limit=2, after=listed[1])
        assert [batch.id for batch in page.data] == listed[2:4]
        assert page.has_more is True
        inputs = [file.id async for file in stub.client.files.list(purpose="batch", limit=2)]
        assert len(inputs) == 5
        oldest = await stub.client.files.list(purpose="batch", order="asc", limit=1)
        assert oldest.data[0].id == inputs[-1]
        for bad in (0, 101):
            with pytest.raises(openai.BadRequestError, match="limit"):
                await stub.client.batches.list(limit=bad)
        with pytest.raises(openai.NotFoundError):
            await stub.client.batches.list(after="batch_" + "0" * 32)

    live(life)


def test_files_are_uploaded_listed_read_and_deleted(live) -> None:
    async def life(stub: Stub) -> None:
        data = bytes(range(256)) * 10_000
        file_id = await stub.upload(data, "../../etc/passwd")
        file = await stub.client.files.retrieve(file_id)
        assert (file.bytes, file.filename, file.purpose) == (len(data), "../../etc/passwd", "batch")
        assert (await stub.client.files.content(file_id)).content == data
        deleted = await stub.client.files.delete(file_id)
        assert deleted.deleted
        for call in (
            stub.client.files.retrieve,
            stub.client.files.content,
            stub.client.files.delete,
        ):
            with pytest.raises(openai.NotFoundError):
                await call(file_id)

    live(life)


def test_a_client_that_vanishes_while_it_uploads_gives_its_place_back(
    live_sqlite: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(uploads, "IDLE_S", 0.2)
    head = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n{"custom_id'

    async def vanishing() -> AsyncIterator[bytes]:
        yield head
        await asyncio.Event().wait()

    async def life(stub: Stub) -> None:
        answer = await stub.http().post(
            "/v1/files",
            content=vanishing(),
            headers={"content-type": "multipart/form-data; boundary=b"},
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "upload_timed_out")
        assert list((tmp_path / "state" / "files").iterdir()) == []

    live_sqlite(life)


def test_a_file_that_a_batch_reads_cannot_be_deleted(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["slow"]))
        with pytest.raises(openai.ConflictError, match=batch.id):
            await stub.client.files.delete(batch.input_file_id)
        await stub.client.batches.cancel(batch.id)
        await stub.ended(batch.id)
        assert (await stub.client.files.delete(batch.input_file_id)).deleted

    live_sqlite(life)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "25h"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "24h\n"}, "completion_window"),
        ({"metadata": {f"k{index}": "v" for index in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": []}, "metadata"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": None}, "endpoint"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_parameter(live_sqlite, changes, param) -> None:
    async def life(stub: Stub) -> None:
        body = {
            "input_file_id": await stub.upload(job(["hello"])),
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        answer = await stub.http().post("/v1/batches", json=body | changes)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"]

    live_sqlite(life)


@pytest.mark.parametrize("file_id", ["file-0", "../secret", "file-" + "0" * 32, "x" * 5000, "\0"])
def test_an_unknown_file_is_a_404(live_sqlite, file_id) -> None:
    async def life(stub: Stub) -> None:
        with pytest.raises(openai.NotFoundError):
            await stub.client.batches.create(
                input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
            )

    live_sqlite(life)


def test_bounds_on_size_files_batches_and_uploads_are_kept(live_sqlite) -> None:
    async def too_large(stub: Stub) -> None:
        with pytest.raises(openai.APIStatusError, match="larger than 1,000 bytes") as caught:
            await stub.upload(b"x" * 1001)
        assert caught.value.status_code == 413
        assert await stub.upload(b"x" * 1000)

    live_sqlite(too_large, max_file_bytes=1000)

    async def too_many_files(stub: Stub) -> None:
        await stub.upload(b"x")
        with pytest.raises(openai.RateLimitError, match="allowed are 2 files"):
            await stub.upload(b"x")

    live_sqlite(too_many_files, max_files=2)

    async def too_many_batches(stub: Stub) -> None:
        await stub.create(job(["slow"]))
        with pytest.raises(openai.RateLimitError, match="allowed are 1"):
            await stub.create(job(["slow"]))

    live_sqlite(too_many_batches, max_open_batches=1)

    async def too_often(stub: Stub) -> None:
        await stub.upload(b"x")
        with pytest.raises(openai.RateLimitError, match="1 uploads in a minute") as caught:
            await stub.upload(b"x")
        assert 0 < int(caught.value.response.headers["retry-after"]) <= 61

    live_sqlite(too_often, max_uploads_per_minute=1)


def test_a_key_sees_its_own_files_and_batches_only(live) -> None:
    tenants = Tenants("operator-key", {_digest("key-of-ann"): "ann", _digest("key-of-bob"): "bob"})

    async def life(stub: Stub) -> None:
        ann, bob = stub.client_with("key-of-ann"), stub.client_with("key-of-bob")
        operator = stub.client_with("operator-key")
        file = await ann.files.create(file=("a.jsonl", job(["hello"])), purpose="batch")
        batch = await ann.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="1h"
        )
        for other in (bob, operator):
            assert [item async for item in other.files.list()] == []
            assert [item async for item in other.batches.list()] == []
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(file.id)
            for call in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(batch.id)
            with pytest.raises(openai.NotFoundError):
                await other.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="1h"
                )
        stub.client = ann
        assert (await stub.ended(batch.id)).completion_window == "1h"
        for key in ("wrong", "ann", ""):
            answer = await stub.http().get(
                "/v1/batches", headers={"Authorization": f"Bearer {key}"} if key else {}
            )
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"

    live(life, tenants=tenants)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_an_infeasible_window_is_refused_with_the_arithmetic_if_the_config_asks(
    live_sqlite,
) -> None:
    async def life(stub: Stub) -> None:
        batch = await stub.create(job(["hello"] * 60))
        await stub.ended(batch.id)
        with pytest.raises(openai.BadRequestError, match=r"measured .* lines/s") as caught:
            await stub.create(b"\n" * 1_000_000, window="1h")
        assert caught.value.code == "window_infeasible"
        assert (await stub.create(job(["hello"]))).status == "validating"

    live_sqlite(life, infeasible="refuse", delay_s=0.05, window_lines=2)


def test_bodies_that_are_no_json_or_too_long_are_refused(live_sqlite) -> None:
    async def life(stub: Stub) -> None:
        http = stub.http()
        bodies = [b"", b"{", b"[" * 200_000, b"null", b"[]", b'"x"', b"\xff", b'{"a":"\\ud800"}']
        for body in bodies:
            answer = await http.post("/v1/batches", content=body)
            assert answer.status_code == 400, body[:20]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = await http.post("/v1/batches", content=b" " * 300_000)
        assert answer.status_code == 413
        assert orjson.loads(answer.content)["error"]["message"]

    live_sqlite(life)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_whoever_pages_through_files_may_delete_them_on_the_way(live, order) -> None:
    async def life(stub: Stub) -> None:
        uploaded = [await stub.upload(line("a")) for _ in range(5)]
        seen = []
        async for file in stub.client.files.list(limit=2, order=order):
            await stub.client.files.delete(file.id)
            seen.append(file.id)
        assert sorted(seen) == sorted(uploaded)

    live(life)


@pytest.mark.parametrize(("path", "kind"), [("/v1/files", "file-"), ("/v1/batches", "batch_")])
def test_a_page_after_what_never_was_says_which_parameter_is_wrong(live_sqlite, path, kind) -> None:
    async def life(stub: Stub) -> None:
        answer = await stub.http().get(path, params={"after": kind + "0" * 32})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "after")

    live_sqlite(life)


NUL = "%00"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/v1/files?purpose={NUL}", 200),
        ("/v1/files?purpose=fine-tune", 200),
        (f"/v1/files?after={NUL}", 404),
        (f"/v1/files/{NUL}", 404),
        (f"/v1/files/{NUL}/content", 404),
        (f"/v1/batches?after={NUL}", 404),
        (f"/v1/batches/{NUL}", 404),
    ],
)
def test_text_that_a_database_refuses_is_no_error_of_the_server(live, path, status) -> None:
    async def life(stub: Stub) -> None:
        await stub.upload(b"{}")
        answer = await stub.http().get(path)
        assert answer.status_code == status
        assert status != 200 or answer.json()["data"] == []

    live(life)


def test_nul_characters_in_what_a_client_names_are_kept_or_refused(live) -> None:
    async def life(stub: Stub) -> None:
        file_id = await stub.upload(line("a\0b"), "na\0me")
        batch = await stub.client.batches.create(
            input_file_id=file_id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"key\0": "value\0"},
        )
        assert batch.metadata == {"key\0": "value\0"}
        ended = await stub.ended(batch.id)
        assert ended.status in ("failed", "completed")
        assert ended.metadata == {"key\0": "value\0"}

    live(life)


@pytest.fixture
def small_stub(tmp_path: Path) -> Iterator[StubServer]:
    """A server on a socket, which takes one upload in a minute."""
    (tmp_path / "echo.toml").write_text("[batches]\nmax_uploads_per_minute = 1\n")
    options = ("--state-dir", str(tmp_path / "state"), "--config", str(tmp_path / "echo.toml"))
    server = StubServer(tmp_path, *options, "--api-key", "the-operators-key")
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}])
def test_who_sends_a_large_file_in_vain_gets_the_reason_over_a_socket(
    small_stub: StubServer, headers: dict[str, str]
) -> None:
    def send(key: str, content: bytes) -> None:
        options = {"max_retries": 0, "default_headers": headers}
        with openai.OpenAI(api_key=key, base_url=f"{small_stub.url}/v1", **options) as client:
            client.files.create(file=("jobs.jsonl", content), purpose="batch")

    send("the-operators-key", b"{}")
    with pytest.raises(openai.RateLimitError, match="1 uploads in a minute"):
        send("the-operators-key", b"x" * 50_000_000)
    with pytest.raises(openai.AuthenticationError):
        send("a-wrong-key", b"x" * 50_000_000)
