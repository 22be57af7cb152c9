"""Requests that ended, for `echo-sgl record`: when they came, how long they were, what they shared.

Of a prompt only hashes of its blocks are kept, under a key that this process drew; each
recording gets them hashed again under its own id. So prompts cannot be guessed from them, and
two recordings cannot be laid side by side.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echo_sgl.engine.cache.node_path import namespace_of
from echo_sgl.engine.requests.terms import terms_of

BLOCK_TOKENS = 64
CAPACITY = 20_000
MAX_BLOCKS_KEPT = 1_000_000
LISTEN_S = 120.0
# `echo-sgl record` gives up after 300 s without an answer: so long may it come back for them.
KEEP_S = 600.0
COLUMNS = ("at_s", "prompt_tokens", "cached_tokens", "output_tokens", "class", "blocks")


@dataclass(frozen=True, slots=True)
class _Ended:
    number: int
    at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    task: str
    blocks: tuple[int, ...]


class RecordingLog:
    """The last requests that ended, while somebody records.

    Requests are only counted unless somebody asked within the last `LISTEN_S` seconds, so that a
    server that nobody records pays nothing, and what was kept goes `KEEP_S` later. Bounded in
    requests and in blocks; the oldest go first.
    Units: seconds on the step clock.
    """

    def __init__(self) -> None:
        self._key, self._log = secrets.token_bytes(32), secrets.token_hex(8)
        self._ended: deque[_Ended] = deque()
        self._num_blocks = self._num_ended = 0
        self._listens_until_s = float("-inf")

    def note_end(self, req: Any, now_s: float) -> None:
        """A request ended; what never gave a token is left out."""
        if not req.output_ids:
            return
        number, self._num_ended = self._num_ended, self._num_ended + 1
        if now_s > self._listens_until_s:
            if now_s > self._listens_until_s + KEEP_S:
                self._ended.clear()
                self._num_blocks = 0
            return
        terms = terms_of(req, now_s)
        ended = _Ended(
            number=number,
            at_s=terms.arrival_s,
            prompt_tokens=len(req.origin_input_ids),
            cached_tokens=int(getattr(req, "cached_tokens", 0)),
            output_tokens=len(req.output_ids),
            task=str(terms.task),
            blocks=self._hashed(namespace_of(req), req.origin_input_ids),
        )
        self._ended.append(ended)
        self._num_blocks += len(ended.blocks)
        while len(self._ended) > CAPACITY or self._num_blocks > MAX_BLOCKS_KEPT:
            self._num_blocks -= len(self._ended.popleft().blocks)

    def since(self, recording: str, number: int | None, now_s: float) -> dict[str, Any]:
        """What ended from the `number`th request on, and the number to ask for next.

        Whoever begins (None) gets nothing: what is kept was noted for somebody else's recording.
        `num_lost`: requests in between that are not kept. `log`: another one in each process;
        a number from one log means nothing in another.
        """
        self._listens_until_s = now_s + LISTEN_S
        if number is None:
            number = self._num_ended
        found = [one for one in self._ended if one.number >= number]
        key = hashlib.blake2b(recording.encode(), key=self._key).digest()
        rows = [
            [
                one.at_s,
                one.prompt_tokens,
                one.cached_tokens,
                one.output_tokens,
                one.task,
                [_salted(block, key) for block in one.blocks],
            ]
            for one in found
        ]
        return {
            "log": self._log,
            "now_s": now_s,
            "block_tokens": BLOCK_TOKENS,
            "columns": list(COLUMNS),
            "rows": rows,
            "next": self._num_ended,
            "num_lost": max(0, self._num_ended - number - len(found)),
        }

    def _hashed(self, namespace: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """One id per block, each over all that comes before it, too."""
        digest, ids = namespace.encode(), []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            part = array("q", tokens[start : start + BLOCK_TOKENS]).tobytes()
            digest = hashlib.blake2b(digest + part, key=self._key, digest_size=16).digest()
            ids.append(int.from_bytes(digest, "big"))
        return tuple(ids)


def _salted(block: int, key: bytes) -> int:
    digest = hashlib.blake2b(block.to_bytes(16, "big"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
