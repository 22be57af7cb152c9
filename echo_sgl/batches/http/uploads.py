"""Read an upload as it comes in: from the network to disk, with a bounded part of it in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from echo_sgl.batches.http.api_errors import ApiError
from echo_sgl.batches.store.blobs import Draft

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_FILENAME_CHARS = 255
MAX_BOUNDARY_BYTES = 70  # RFC 2046
# Who sends too much is listened to for a while: a connection that closes while the client still
# writes shows it a broken pipe instead of our answer.
DRAIN_FACTOR = 2
# A client that vanished never closes its connection, and would hold its place for good.
IDLE_S = 120.0
Run = Callable[..., Awaitable[object]]


@dataclass(slots=True)
class Upload:
    """What a form held: its plain fields, and the file's name; the content is in the draft."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class UploadReader:
    """Takes a multipart form apart; the part named `file` goes to the draft."""

    def __init__(self, content_type: str, draft: Draft, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise ApiError(
                400, "the upload must be multipart/form-data with the parts purpose and file"
            )
        self.upload = Upload()
        self._draft = draft
        self._max_bytes = max_bytes
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._name = ""
        self._value = bytearray()
        self._pieces: list[bytes] = []
        self._num_parts = 0
        self._is_file = False
        self._is_whole = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._take_header_name,
                "on_header_value": self._take_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def read(self, stream: AsyncIterator[bytes], run: Run) -> Upload:
        """Read to the end; `run` calls a function in a thread.

        Errors: `ApiError` 400 for a form that is not one, 408 for one that comes no further, 413
        for too large a file.
        """
        num_bytes, stream = 0, _until_idle(stream)
        async for chunk in stream:
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes + 64 * 1024:
                await self._refuse(stream, num_bytes)
            self._feed(chunk)
            if self._pieces:
                pieces, self._pieces = self._pieces, []
                await run(self._draft.write, b"".join(pieces))
        if self._draft.num_bytes > self._max_bytes:
            raise self._too_large()
        if not self._is_whole:
            raise ApiError(400, "the upload ended early: its last boundary is missing")
        if self.upload.filename is None:
            raise ApiError(400, "the part file is missing", param="file")
        return self.upload

    def _feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise ApiError(400, f"the upload is not multipart/form-data: {error}") from error

    async def _refuse(self, stream: AsyncIterator[bytes], num_bytes: int) -> None:
        async for chunk in stream:
            num_bytes += len(chunk)
            if num_bytes > DRAIN_FACTOR * self._max_bytes:
                break
        raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the file is larger than {self._max_bytes:,} bytes; split it",
            code="file_too_large",
            param="file",
        )

    def _begin(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS + 1:
            raise ApiError(400, f"the upload has more than {MAX_FIELDS} fields")
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.upload.filename is not None:
                raise ApiError(400, "the upload has more than one part file", param="file")
            self.upload.filename = clean_filename(options.get(b"filename", b""))

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise ApiError(400, f"a field is longer than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name[:64]] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._is_whole = True


async def _until_idle(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(IDLE_S):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            message = f"nothing more of the upload has come for {IDLE_S:.0f} s; send it again"
            raise ApiError(408, message, code="upload_timed_out") from error
        if chunk is None:
            return
        yield chunk


def clean_filename(given: bytes) -> str:
    """A name to show, never a path: without control characters, at most 255 characters."""
    text = given.decode(errors="replace")
    shown = "".join(char if char.isprintable() else "_" for char in text)
    return shown[:MAX_FILENAME_CHARS] or "upload.jsonl"
