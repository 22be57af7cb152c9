"""Whose request it is: an API key belongs to one tenant, who sees only what is its own.

A keys file has one tenant a line: a name, blanks, and the key or `sha256:` and the key's SHA-256
in hex. Lines that begin with # are skipped. One name may stand on several lines, which is how a
key is changed without an interruption. A file that changes is read again at the next request.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from echo_sgl.errors import EchoError

OPERATOR = "default"
MIN_KEY_CHARS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
logger = logging.getLogger(__name__)
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class KeysFileError(EchoError, ValueError):
    """The keys file cannot be used; the message never shows a key."""


class Tenants:
    """Finds the tenant of a bearer token. Without any key there is one tenant."""

    def __init__(self, api_key: str | None, digests: Mapping[str, str] | None = None) -> None:
        """`digests` are tenants' names by the SHA-256 of their key in lower-case hex."""
        self._operator = {_digest(api_key): OPERATOR} if api_key else {}
        self._names = dict(digests or {}) | self._operator

    def of_header(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization` header; None when its key is none of ours."""
        if not self._names:
            return OPERATOR
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        # Looking up a hash takes the same time for every wrong key.
        return self._names.get(_digest(key))


class FileTenants(Tenants):
    """The same from a keys file, which may change while the server runs."""

    def __init__(self, api_key: str, path: Path) -> None:
        """Errors: `KeysFileError` when the file cannot be used."""
        self._path = path
        self._seen = _version(path)
        super().__init__(api_key, read_keys_file(path))

    def of_header(self, authorization: str | None) -> str | None:
        version = _version(self._path)
        if version != self._seen:
            self._seen = version
            self._read_again()
        return super().of_header(authorization)

    def _read_again(self) -> None:
        """Take the file's new keys; of a file that cannot be used, say so and keep the old ones."""
        try:
            self._names = read_keys_file(self._path) | self._operator
        except KeysFileError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("keys were read again; the file has %d", len(self._names) - 1)


def read_keys_file(path: Path) -> dict[str, str]:
    """Tenants' names by the SHA-256 of their key.

    Errors: `KeysFileError` names the line and what is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KeysFileError(f"keys file {path} cannot be read: {error}") from error
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, digest = _parse(line, f"keys file {path}, line {number}")
        if names.setdefault(digest, name) != name:
            raise KeysFileError(f"keys file {path}, line {number}: {name}'s key is another's too")
    return names


def _parse(line: str, where: str) -> tuple[str, str]:
    name, _, key = line.strip().partition(" ")
    key = key.strip()
    if not _NAME.fullmatch(name) or name == OPERATOR:
        raise KeysFileError(
            f"{where}: the tenant's name must be letters, digits, '.', '_' or '-', at most 64, "
            f"and not {OPERATOR!r}, which is the holder of --api-key"
        )
    if match := _DIGEST.fullmatch(key):
        return name, match[1].lower()
    if len(key) < MIN_KEY_CHARS or " " in key:
        raise KeysFileError(
            f"{where}: after the name must stand a key of at least {MIN_KEY_CHARS} characters "
            "without blanks, or sha256: and 64 hex digits"
        )
    return name, _digest(key)


def _version(path: Path) -> tuple[int, ...]:
    """Changes whenever the file does; empty while it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
