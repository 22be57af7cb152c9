"""What the routes do, apart from HTTP: every rule on files and batches stands here once.

All methods block on the database; callers run them in a thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection

from echo_sgl.batches.dispatch.progress import Progress
from echo_sgl.batches.http.api_errors import ApiError, not_found
from echo_sgl.batches.http.limits import Rate, UploadsUnderWay, check_storage
from echo_sgl.batches.http.objects import HOUR_S, batch_object, file_object, page_object
from echo_sgl.batches.http.uploads import Upload
from echo_sgl.batches.store import batch_rows, bounds, files, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.blobs import Draft
from echo_sgl.batches.store.files import FileRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.config import BatchesConfig

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
DAY_S = 86_400
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_WINDOW = re.compile(r"([1-9]\d?)h")


class BatchService:
    """Files and batches of all tenants."""

    def __init__(self, store: JobStore, config: BatchesConfig, progress: Progress) -> None:
        self.store = store
        self.config = config
        self._progress = progress
        self._uploads = Rate(config.max_uploads_per_minute, "uploads")
        self._creations = Rate(config.max_uploads_per_minute, "new batches")
        self._under_way = UploadsUnderWay(config, store.new_draft)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs that a batch may name."""
        return self._progress.endpoints

    def admit_upload(self, tenant: str) -> Draft:
        """Start an upload, to be ended by `end_upload`.

        Errors: `ApiError` 429 when the tenant's files, bytes or uploads are at their bound.
        """
        self._uploads.admit(tenant, time.monotonic())
        with self.store.database.read() as connection:
            num_files, num_bytes = files.count_files(connection, tenant)
        return self._under_way.begin(tenant, num_files, num_bytes)

    def end_upload(self, tenant: str, draft: Draft) -> None:
        """Forget an upload, whether it became a file or not."""
        self._under_way.end(tenant, draft)

    def add_file(self, tenant: str, draft: Draft, upload: Upload) -> dict[str, Any]:
        """Make a whole upload a file."""
        purpose = upload.fields.get("purpose")
        if purpose != "batch":
            raise ApiError(400, f"purpose is {purpose!r}; it must be 'batch'", param="purpose")
        now_s = self.store.clock()
        lifetime_s = _expiry_s(
            upload.fields.get("expires_after[anchor]"),
            upload.fields.get("expires_after[seconds]"),
            "expires_after",
        )
        file_id = files.new_file_id()
        values = {
            "id": file_id,
            "tenant": tenant,
            "purpose": purpose,
            "filename": upload.filename,
            "num_bytes": draft.num_bytes,
            "num_lines": draft.num_lines + 1,
            "created_at_s": now_s,
            "expires_at_s": now_s + (lifetime_s or self.config.file_days * DAY_S),
            "source": "blob",
        }

        def register(connection: Connection) -> None:
            bounds.lock_tenant(connection, tenant)
            check_storage(self.config, *files.count_files(connection, tenant))
            files.insert_file(connection, **values)

        self.store.blobs.keep(draft, file_id, register)
        return self.get_file(tenant, file_id)

    def list_files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, order: str
    ) -> dict[str, Any]:
        if purpose not in (None, *files.PURPOSES):
            return page_object([], has_more=False)
        with self.store.database.read() as connection:
            found = files.list_files(
                connection,
                tenant,
                self.store.clock(),
                purpose=purpose,
                after=self._number(connection, tenant, after) if after else None,
                limit=limit + 1,
                ascending=order == "asc",
            )
        return page_object([file_object(row) for row in found[:limit]], has_more=len(found) > limit)

    def get_file(self, tenant: str, file_id: str) -> dict[str, Any]:
        with self.store.database.read() as connection:
            return file_object(self._file(connection, tenant, file_id))

    def file_content(self, tenant: str, file_id: str) -> tuple[int, Iterator[bytes]]:
        """Size in bytes, and the content piece by piece."""
        with self.store.database.read() as connection:
            file = self._file(connection, tenant, file_id)
        if file.source == "blob":
            return file.num_bytes, self.store.blobs.stream(file.id)
        return file.num_bytes, files.record_slices(self.store.database, file)

    def delete_file(self, tenant: str, file_id: str) -> dict[str, Any]:
        """Nobody sees the file any more; results take a while to go, and do that elsewhere."""
        with self.store.database.write() as connection:
            file = self._file(connection, tenant, file_id)
            if user := files.open_batch_of(connection, file.id):
                raise ApiError(
                    409, f"{user} still reads this file; cancel it first, or wait for its end"
                )
            files.delete_file(connection, file, self.store.clock())
        if file.source == "blob":
            self.store.blobs.delete(file.id)
        else:
            self._progress.wake_deleter()
        return {"id": file_id, "object": "file", "deleted": True}

    def create_batch(
        self,
        tenant: str,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: Mapping[str, str] | None,
        output_expires_after: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """A new batch, to be validated.

        Errors: `ApiError` 400 or 404 for what is wrong, 429 when too many are open.
        """
        self._creations.admit(tenant, time.monotonic())
        self._check_endpoint(endpoint)
        window_s = _window_s(completion_window)
        _check_metadata(metadata)
        expiry = output_expires_after or {}
        output_expires_s = _expiry_s(
            expiry.get("anchor"), expiry.get("seconds"), "output_expires_after"
        )
        now_s = self.store.clock()
        with self.store.database.write() as connection:
            bounds.lock_tenant(connection, tenant)
            bounds.forget_batches(connection, tenant, now_s - self.config.file_days * DAY_S)
            file = self._file(connection, tenant, input_file_id, param="input_file_id")
            if file.purpose != "batch":
                raise ApiError(
                    400,
                    f"{file.id} has the purpose {file.purpose!r}; a batch needs 'batch'",
                    param="input_file_id",
                )
            self._check_room(connection, tenant)
            self._check_feasible(connection, file.num_lines, window_s)
            batch = batch_rows.insert_batch(
                connection,
                tenant=tenant,
                endpoint=endpoint,
                input_file_id=file.id,
                completion_window_s=window_s,
                output_expires_s=output_expires_s,
                request_metadata=dict(metadata) if metadata else None,
                created_at_s=now_s,
                expires_at_s=now_s + window_s,
            )
        self._progress.wake()
        return batch_object(batch)

    def list_batches(self, tenant: str, *, after: str | None, limit: int) -> dict[str, Any]:
        with self.store.database.read() as connection:
            last = self._batch(connection, tenant, after, "after") if after else None
            found = batch_rows.list_batches(connection, tenant, after=last, limit=limit + 1)
        shown = [batch_object(row) for row in found[:limit]]
        return page_object(shown, has_more=len(found) > limit)

    def get_batch(self, tenant: str, batch_id: str) -> dict[str, Any]:
        with self.store.database.read() as connection:
            return batch_object(self._batch(connection, tenant, batch_id))

    def cancel_batch(self, tenant: str, batch_id: str) -> dict[str, Any]:
        def cancel(connection: Connection, batch: BatchRow) -> None:
            if batch.status not in ("validating", "in_progress", "cancelling"):
                raise _wrong_state(batch, "cancelled", "validating or in_progress")
            batch_rows.cancel_batch(connection, batch.number, self.store.clock())

        return self._change(tenant, batch_id, cancel)

    def pause_batch(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Send no more lines of a batch; those in the engine go on. Its window goes on too."""

        def pause(connection: Connection, batch: BatchRow) -> None:
            if batch.status not in ("validating", "in_progress"):
                raise _wrong_state(batch, "paused", "validating or in_progress")
            if batch.paused_at_s is None:
                batch_rows.set_paused(connection, batch.number, self.store.clock())

        return self._change(tenant, batch_id, pause)

    def resume_batch(self, tenant: str, batch_id: str) -> dict[str, Any]:
        def resume(connection: Connection, batch: BatchRow) -> None:
            if batch.status not in ("validating", "in_progress"):
                raise _wrong_state(batch, "resumed", "validating or in_progress")
            batch_rows.set_paused(connection, batch.number, None)

        return self._change(tenant, batch_id, resume)

    def retry_batch(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Do the failed, expired or cancelled lines of a batch that ended again."""

        def retry(connection: Connection, batch: BatchRow) -> None:
            if batch.status not in batch_rows.RETRYABLE:
                raise _wrong_state(batch, "retried", ", ".join(batch_rows.RETRYABLE))
            if not batch.total:
                raise ApiError(
                    409,
                    f"{batch.id} ended before its file was checked, so there is no line to retry; "
                    "create a new batch",
                )
            if not batch.failed:
                raise ApiError(409, f"all lines of {batch.id} are answered; nothing to retry")
            for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                if file_id and not self._find(connection, tenant, file_id):
                    raise ApiError(409, f"{file_id} of this batch is gone; it cannot be retried")
            self._check_room(connection, tenant)
            batch_rows.reopen_batch(connection, batch, self.store.clock())

        return self._change(tenant, batch_id, retry)

    def _change(
        self, tenant: str, batch_id: str, change: Callable[[Connection, BatchRow], None]
    ) -> dict[str, Any]:
        with self.store.database.write() as connection:
            bounds.lock_tenant(connection, tenant)
            batch = self._batch(connection, tenant, batch_id, to_change=True)
            change(connection, batch)
            changed = batch_object(batch_rows.lock_batch(connection, batch.number))
        self._progress.wake()
        return changed

    def _find(self, connection: Connection, tenant: str, file_id: str) -> FileRow | None:
        return files.find_file(connection, file_id, tenant, self.store.clock())

    def _file(
        self, connection: Connection, tenant: str, file_id: str, param: str = "file_id"
    ) -> FileRow:
        found = self._find(connection, tenant, file_id) if _ID.fullmatch(file_id) else None
        if found is None:
            raise not_found("file", file_id, param)
        return found

    def _number(self, connection: Connection, tenant: str, after: str) -> int:
        """Where a list goes on, also after a file that its reader has deleted."""
        found = files.find_number(connection, after, tenant) if _ID.fullmatch(after) else None
        if found is None:
            raise not_found("file", after, "after")
        return found

    def _batch(
        self,
        connection: Connection,
        tenant: str,
        batch_id: str,
        param: str = "batch_id",
        *,
        to_change: bool = False,
    ) -> BatchRow:
        found = None
        if _ID.fullmatch(batch_id):
            found = batch_rows.find_batch(connection, batch_id, tenant, to_change=to_change)
        if found is None:
            raise not_found("batch", batch_id, param)
        return found

    def _check_endpoint(self, endpoint: str) -> None:
        allowed = self._progress.endpoints
        if endpoint not in allowed:
            raise ApiError(
                400,
                f"endpoint is {endpoint[:80]!r}; this server's model allows {', '.join(allowed)}",
                param="endpoint",
            )

    def _check_room(self, connection: Connection, tenant: str) -> None:
        num_open = batch_rows.count_open(connection, tenant)
        if num_open >= self.config.max_open_batches:
            raise ApiError(
                429,
                f"{num_open} batches of this key are open; allowed are "
                f"{self.config.max_open_batches}. Wait for one to end, or cancel one",
                code="too_many_open_batches",
                retry_after_s=60,
            )
        _, num_bytes = files.count_files(connection, tenant)
        check_storage(self.config, 0, num_bytes)

    def _check_feasible(self, connection: Connection, num_lines: int, window_s: int) -> None:
        rate_each = self._progress.lines_per_s
        if self.config.infeasible != "refuse" or not rate_each:
            return
        # Other servers share what waits, and are taken to be as fast as this one.
        num_servers = max(1, len(work.live_servers(connection, self.store.clock())))
        rate = num_servers * rate_each
        num_waiting = batch_rows.num_waiting_lines(connection)
        needed_s = (num_waiting + num_lines) / rate
        if needed_s > window_s:
            raise ApiError(
                400,
                f"completion_window is {window_s // HOUR_S}h = {window_s:,} s, but {num_waiting:,} "
                f"lines wait and up to {num_lines:,} come with this file: at the measured "
                f"{rate:,.2f} lines/s (servers: {num_servers}) that takes {needed_s:,.0f} s. Name "
                "a longer window, split the file, or come back later",
                code="window_infeasible",
                param="completion_window",
            )


def _wrong_state(batch: BatchRow, what: str, allowed: str) -> ApiError:
    return ApiError(
        409,
        f"{batch.id} is {batch.status}; only a batch that is {allowed} can be {what}",
        code="wrong_state",
    )


def _window_s(given: str) -> int:
    match = _WINDOW.fullmatch(given)
    hours = int(match[1]) if match else 0
    if not 1 <= hours <= 24:
        raise ApiError(
            400,
            f"completion_window is {given[:80]!r}; allowed are 1h to 24h, in whole hours",
            param="completion_window",
        )
    return hours * HOUR_S


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    pairs = metadata or {}
    too_long = any(
        len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS
        for key, value in pairs.items()
    )
    if len(pairs) > MAX_METADATA_PAIRS or too_long:
        raise ApiError(
            400,
            f"metadata may have {MAX_METADATA_PAIRS} pairs, keys of {MAX_METADATA_KEY_CHARS} and "
            f"values of {MAX_METADATA_VALUE_CHARS} characters",
            param="metadata",
        )


def _expiry_s(anchor: Any, seconds: Any, param: str) -> int | None:
    if anchor is None and seconds is None:
        return None
    is_number = str(seconds).isascii() and str(seconds).isdigit() and len(str(seconds)) < 10
    if anchor != "created_at" or not is_number or not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        raise ApiError(
            400,
            f"{param} must have the anchor 'created_at' and {MIN_EXPIRY_S} to {MAX_EXPIRY_S} "
            "seconds",
            param=param,
        )
    return int(seconds)
