"""Files of text, as they are or packed with gzip; other kinds of files are refused by name."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GZIP = b"\x1f\x8b"
# What files of other kinds begin with.
UNREADABLE = {
    b"PAR1": "a Parquet file; write its rows as CSV or JSON lines",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it, or pack it with gzip",
    b"\xfd7zXZ": "packed with xz; unpack it, or pack it with gzip",
    b"BZh": "packed with bzip2; unpack it, or pack it with gzip",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xff\xfe": "text in UTF-16; write it in UTF-8",
    b"\xfe\xff": "text in UTF-16; write it in UTF-8",
}


@contextmanager
def open_text_file(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    """The bytes of a text, unpacked where it is gzip'd by its content or its name.

    Errors: `OSError`, which says what the file is where that is known.
    """
    with path.open("rb") as file:
        start = file.peek()
        for mark, kind in UNREADABLE.items():
            if start.startswith(mark):
                raise OSError(f"it is {kind}")
        if path.suffix.lower() == ".gz" or start.startswith(GZIP):
            with gzip.open(file) as unpacked:
                yield unpacked
        else:
            yield file
