"""How much a tenant may have in the store, begin in a minute, and upload at a time."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import Connection

from echo_sgl.batches.http.api_errors import ApiError
from echo_sgl.batches.store import files
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.blobs import Draft
from echo_sgl.config import BatchesConfig

SUM_INTERVAL_S = 5.0
logger = logging.getLogger(__name__)


def check_storage(config: BatchesConfig, num_files: int, num_bytes: int) -> None:
    """Errors: `ApiError` 429 when the bound on files or bytes is reached."""
    if num_files >= config.max_files or num_bytes >= config.max_stored_bytes:
        raise ApiError(
            429,
            f"{num_files:,} files with {num_bytes:,} bytes are stored for this key; allowed "
            f"are {config.max_files:,} files and {config.max_stored_bytes:,} bytes. "
            "Delete some",
            code="storage_limit_reached",
        )


class FullTenants:
    """Finds tenants whose files and answers are at the bound: their batches wait, as if paused.

    What open batches have answered stands in their rows. Files are summed up when a batch comes or
    ends, and every `SUM_INTERVAL_S`.
    """

    def __init__(self, max_stored_bytes: int) -> None:
        self._max_bytes = max_stored_bytes
        self._file_bytes: Mapping[str, int] = {}
        self._numbers: set[int] = set()
        self._next_sum_s = 0.0
        self._full: set[str] = set()

    def look(self, connection: Connection, rows: Sequence[BatchRow], now_s: float) -> set[str]:
        """Those with batches in progress among the open ones; each is logged once."""
        numbers = {row.number for row in rows}
        if numbers != self._numbers or now_s >= self._next_sum_s:
            self._file_bytes = files.stored_bytes(connection, {row.tenant for row in rows})
            self._numbers, self._next_sum_s = numbers, now_s + SUM_INTERVAL_S
        stored = Counter(self._file_bytes)
        for row in rows:
            stored[row.tenant] += row.output_bytes + row.error_bytes
        running = {row.tenant for row in rows if row.status == "in_progress"}
        full = {tenant for tenant in running if stored[tenant] >= self._max_bytes}
        for tenant in full - self._full:
            logger.warning(
                "batches of the key %r wait: %d bytes are stored for it with what they have "
                "answered, allowed are %d (max_stored_bytes). They go on when it deletes files",
                tenant,
                stored[tenant],
                self._max_bytes,
            )
        self._full = full
        return full


class Rate:
    """Bounds what each tenant begins in any minute; `what` names it."""

    def __init__(self, max_per_minute: int, what: str) -> None:
        self._max = max_per_minute
        self._what = what
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._turn = threading.Lock()

    def admit(self, tenant: str, now_s: float) -> None:
        """Count one more.

        Errors: `ApiError` 429 with the seconds to wait.
        """
        with self._turn:
            times = self._times[tenant]
            while times and times[0] <= now_s - 60:
                times.popleft()
            if len(times) >= self._max:
                raise ApiError(
                    429,
                    f"more than {self._max} {self._what} in a minute; wait and send it again",
                    code="rate_limit_exceeded",
                    retry_after_s=int(times[0] + 61 - now_s),
                )
            times.append(now_s)


class UploadsUnderWay:
    """Drafts of each tenant in this server: no more than it may begin in a minute."""

    def __init__(self, config: BatchesConfig, new_draft: Callable[[], Draft]) -> None:
        self._config = config
        self._new_draft = new_draft
        self._drafts: defaultdict[str, set[Draft]] = defaultdict(set)
        self._turn = threading.Lock()

    def begin(self, tenant: str, num_files: int, num_bytes: int) -> Draft:
        """A new draft beside what is stored already.

        Errors: `ApiError` 429 when together they are too many.
        """
        with self._turn:
            drafts = self._drafts[tenant]
            if len(drafts) >= self._config.max_uploads_per_minute:
                raise ApiError(
                    429,
                    f"{len(drafts)} uploads of this key are under way; wait for one to end",
                    code="rate_limit_exceeded",
                    retry_after_s=60,
                )
            num_bytes += sum(draft.num_bytes for draft in drafts)
            check_storage(self._config, num_files + len(drafts), num_bytes)
            draft = self._new_draft()
            drafts.add(draft)
        return draft

    def end(self, tenant: str, draft: Draft) -> None:
        """Forget a draft, whether it became a file or not."""
        with self._turn:
            self._drafts[tenant].discard(draft)
        draft.discard()
