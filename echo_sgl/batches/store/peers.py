"""Which servers are alive, as far as one can tell that could not always renew its own lease."""

from __future__ import annotations

import math

from sqlalchemy import Connection

from echo_sgl.batches.store import work


class Peers:
    """The servers of a database, as one of them sees them.

    While the database cannot be reached all leases run out, and the first server that is back
    would take every other one for dead. So whoever's own lease had run out goes by the time when
    it was last renewed, until the others have had as long as a lease to renew theirs.

    Units: Unix seconds of the clock that the servers share.
    """

    def __init__(self, server_id: str) -> None:
        self._id = server_id
        self._renewed_s = 0.0
        self._until_s = math.inf  # no lease yet: none that ran out
        self._known_s = 0.0
        self._sure_s = -math.inf

    def note_renewal(self, renewed_s: float, until_s: float) -> None:
        """This server's own lease is on disk; call it in one thread at a time."""
        if renewed_s >= self._until_s:
            self._known_s, self._sure_s = self.judged_at_s(renewed_s), until_s
        self._renewed_s, self._until_s = renewed_s, until_s

    def judged_at_s(self, now_s: float) -> float:
        """When leases must run for their servers to count as alive now."""
        if now_s >= self._until_s:
            now_s = self._renewed_s
        return self._known_s if now_s < self._sure_s else now_s

    def live(self, connection: Connection, now_s: float) -> set[str]:
        """Ids of the servers that are not known to be dead, with this one's."""
        return work.live_servers(connection, self.judged_at_s(now_s)) | {self._id}
