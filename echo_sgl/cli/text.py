"""Text of the command line that goes into requests."""

from __future__ import annotations

import re

from echo_sgl.errors import EchoError

# Those of OpenAI, of echo-sgl, and of others that put a path or base64 into them.
_BATCH_ID = re.compile(r"\w[\w.:=/+~-]*", re.ASCII)


class TextError(EchoError, ValueError):
    """Text that no request can carry."""


def utf_8(what: str, given: str) -> str:
    """The text as it was given. Errors: `TextError` when its bytes are not UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            f"{what} is {given!r}, whose bytes are not UTF-8, which is all that a request can "
            "carry. Write it in UTF-8"
        ) from error
    return given


def request_id(given: str) -> str:
    """The id as it was given. Errors: `TextError` when no request can have it."""
    if not given:
        raise TextError("ID is empty; name a request by the `rid` in its body")
    return utf_8("ID", given)


def batch_id(given: str | None) -> str | None:
    """The id as it was given, if at all. Errors: `TextError` when no batch can have it."""
    if given is not None and not _BATCH_ID.fullmatch(given):
        raise TextError(
            f"the id of the batch is {given!r}; allowed are letters, digits and _.:=/+~-. "
            "`echo-sgl batch list` shows the ids"
        )
    return given
