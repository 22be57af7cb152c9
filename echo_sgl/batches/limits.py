"""How much a tenant may have in the store, begin in a minute, and upload at a time."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from echo_sgl.batches.api_errors import ApiError
from echo_sgl.batches.store.blobs import Draft
from echo_sgl.config import BatchesConfig


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
