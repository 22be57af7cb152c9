"""OpenAI's Files and Batches as the command line uses them: any compatible server will do."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h11
import httpx
import orjson

from echo_sgl.batches.lines.job_file import JobFileError
from echo_sgl.batches.lines.journal import in_utf_8
from echo_sgl.cli.connection import open_blocking_client
from echo_sgl.cli.server_route import holds
from echo_sgl.errors import EchoError

TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 3600.0
ENDED = ("failed", "completed", "expired", "cancelled")
NOT_FOUND = 404
# A server that starts, a database that fails over, a proxy whose server is gone.
TOO_MANY = 429
_AWAY_STATUSES = (TOO_MANY, 502, 503, 504)
# A batch service that fails, not one that is missing.
_BROKEN_STATUSES = (500, 507)
_OF_A_BATCH = ("id", "status", "endpoint", "completion_window", "created_at")
_NO_SERVICE = (
    "{url} has no batch service. Start it with: echo-sgl serve --echo-state-dir DIR ..., or work "
    "through the file with: echo-sgl batch run"
)


class BatchServiceError(EchoError, RuntimeError):
    """The server refused, or cannot be reached; the message says what to do.

    `retry_after_s`: when it may do what it refuses now, None if it does not say so.
    """

    def __init__(
        self, message: str, status_code: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status_code, self.retry_after_s = status_code, retry_after_s


class NoServiceError(BatchServiceError):
    """The server does not know what was asked for."""


class AwayError(BatchServiceError):
    """The server cannot be asked now; later it may."""


class GoneError(BatchServiceError):
    """A file that the server had is there no more."""


class OutputError(EchoError, OSError):
    """Results cannot be fetched, or not be written where they should."""


class BatchClient:
    """Blocking calls to one server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._http = open_blocking_client(url, api_key, TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def has_service(self) -> bool:
        """Whether the server takes batches.

        Errors: `AwayError` when it cannot be told.
        """
        try:
            return self.list(1).get("object") == "list"
        except AwayError:
            raise
        except BatchServiceError as error:
            if error.status_code in _BROKEN_STATUSES:
                raise AwayError(str(error), error.status_code) from error
            return False

    def submit(
        self, jobs: Path, *, endpoint: str, window: str, metadata: dict[str, str]
    ) -> dict[str, Any]:
        """Upload a file and create a batch over it."""
        file_id = self.upload(jobs)
        try:
            return self.create(file_id, endpoint=endpoint, window=window, metadata=metadata)
        except BatchServiceError as error:
            if not isinstance(error, AwayError) or error.status_code == TOO_MANY:
                self.forget(file_id)
            raise

    def upload(self, jobs: Path) -> str:
        """The id of a new file. Errors: `JobFileError` when it grows or shrinks meanwhile."""
        with jobs.open("rb") as content:
            try:
                uploaded = self._call(
                    "POST",
                    "/v1/files",
                    ("id",),
                    data={"purpose": "batch"},
                    files={"file": (in_utf_8(jobs.name), content, "application/jsonl")},
                    timeout=UPLOAD_TIMEOUT_S,
                )
            except h11.LocalProtocolError as error:  # which httpx lets through as it is
                raise JobFileError(
                    f"job file {jobs} was changed while it was uploaded; no batch was made. Run "
                    "the command again when nobody writes to it"
                ) from error
        return str(uploaded["id"])

    def create(
        self, file_id: str, *, endpoint: str, window: str, metadata: dict[str, str]
    ) -> dict[str, Any]:
        """A new batch over an uploaded file."""
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": metadata or None,
        }
        return self._call("POST", "/v1/batches", ("id",), json=body)

    def forget(self, file_id: str) -> None:
        """Delete a file, if that can be: nobody else knows of it, and it would take up room."""
        with contextlib.suppress(BatchServiceError):
            self._call("DELETE", f"/v1/files/{file_id}")

    def list(self, limit: int, after: str | None = None) -> dict[str, Any]:
        params = {"limit": limit, **({"after": after} if after else {})}
        page = self._call("GET", "/v1/batches", ("data",), params=params)
        batches = page["data"]
        if not isinstance(batches, list) or not all(holds(one, _OF_A_BATCH) for one in batches):
            raise self._not_openai()
        return page

    def get(self, batch_id: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/batches/{batch_id}", _OF_A_BATCH)

    def act(self, batch_id: str, action: str) -> dict[str, Any]:
        """Cancel, or one of our own: retry, pause, resume."""
        try:
            return self._call("POST", f"/v1/batches/{batch_id}/{action}", ("id", "status"))
        except NoServiceError as error:
            if action == "cancel":
                raise
            raise BatchServiceError(
                f"{self.url} cannot {action} a batch: only echo-sgl's servers can pause, resume "
                "and retry",
                error.status_code,
            ) from error

    def find(self, key: str, value: str) -> dict[str, Any] | None:
        """The newest batch with that metadata, of all that the server knows."""
        after = None
        while True:
            page = self.list(100, after)
            for item in page["data"]:
                if (item.get("metadata") or {}).get(key) == value:
                    return dict(item)
            if not page.get("has_more") or not page["data"]:
                return None
            after = page["data"][-1]["id"]

    def download(self, file_id: str | None, path: Path) -> None:
        """Write a file's content, whole or not at all; without a file, an empty one.

        What is no file, as /dev/null, is written to as it is. Errors: `OutputError` when it cannot
        be written, `GoneError` when the server does not have the file any more.
        """
        try:
            if _is_special(path):
                with path.open("wb") as output:
                    self._copy_content(file_id, output.write)
                return
            with _draft_beside(path) as draft:
                with draft.open("wb") as output:
                    self._copy_content(file_id, output.write)
                    output.flush()
                    os.fsync(output.fileno())
                draft.replace(path)
        except OSError as error:
            raise _unwritable(path, error) from error

    def _copy_content(self, file_id: str | None, write: Callable[[bytes], object]) -> None:
        if file_id is None:
            return
        try:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._no_content(file_id, self._refused(answer))
                for piece in answer.iter_bytes():
                    write(piece)
        except httpx.TransportError as error:
            raise self._lost(error) from error

    def _no_content(self, file_id: str, refused: BatchServiceError) -> BatchServiceError:
        if refused.status_code != NOT_FOUND or isinstance(refused, NoServiceError):
            return refused
        return GoneError(
            f"{self.url} has {file_id} no more: the results have expired or were deleted, and only "
            "the job done anew brings them back",
            NOT_FOUND,
        )

    def _call(
        self, method: str, path: str, needs: Sequence[str] = (), **options: Any
    ) -> dict[str, Any]:
        """The JSON object that the server answers; it holds at least what it `needs`."""
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        if answer.status_code != 200:
            raise self._refused(answer)
        try:
            document: dict[str, Any] = answer.json()
        except ValueError as error:
            raise BatchServiceError(f"{self.url} does not answer in JSON; is --url right?") from (
                error
            )
        if not holds(document, needs):
            raise self._not_openai()
        return document

    def _not_openai(self) -> BatchServiceError:
        return BatchServiceError(
            f"{self.url} does not answer as OpenAI's batch service does; is --url right?"
        )

    def _refused(self, answer: httpx.Response) -> BatchServiceError:
        try:
            error = orjson.loads(answer.content)["error"]
            message = str(error["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            if answer.status_code in (NOT_FOUND, 405):
                return NoServiceError(_NO_SERVICE.format(url=self.url), answer.status_code)
            message = answer.text[:300] or answer.reason_phrase
        if answer.status_code == 401:
            message += ". Set the key with --api-key, ECHO_SGL_API_KEY or OPENAI_API_KEY"
        kind = AwayError if answer.status_code in _AWAY_STATUSES else BatchServiceError
        after = answer.headers.get("retry-after", "")
        return kind(
            f"the server refuses ({answer.status_code}): {message}",
            answer.status_code,
            float(after) if after.isdecimal() else None,
        )

    def _lost(self, error: httpx.TransportError) -> AwayError:
        return AwayError(
            f"no server answers at {self.url} ({type(error).__name__}). Is it running, and is "
            "--url right? Batches go on by themselves once it does"
        )


def check_writable(path: Path) -> None:
    """Try what `download` will do, and leave nothing behind but the folder.

    Errors: `OutputError` when it would fail.
    """
    try:
        if _is_special(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with _draft_beside(path) as draft:
            draft.open("ab").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


@contextlib.contextmanager
def _draft_beside(path: Path) -> Iterator[Path]:
    """Where a file is written before it takes its place, by nobody else; the folder is made.

    What did not take its place goes with the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path} cannot be written: {error.strerror}")


def wait_ended(
    client: BatchClient,
    batch_id: str,
    every_s: float,
    show: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Look at a batch until it has ended; a server that is away is waited for."""
    is_away = False
    while True:
        try:
            batch = client.get(batch_id)
        except AwayError as error:
            if not is_away:
                say(f"{error}; waiting for it")
            is_away = True
        else:
            is_away = False
            show(batch)
            if batch["status"] in ENDED:
                return batch
        time.sleep(every_s)
