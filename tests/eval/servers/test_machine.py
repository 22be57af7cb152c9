"""What is told of the machine and of the process that measures on it."""

from __future__ import annotations

import subprocess
import sys

HELD_BYTES = 500_000_000
TELL = "from eval.servers.machine import peak_bytes; print(peak_bytes())"
TELL_AFTER = f"held = b'x' * {HELD_BYTES}; {TELL}"
START_ONE_THAT_TELLS = (
    f"import subprocess, sys; held = b'x' * {HELD_BYTES}; "
    f"print(subprocess.check_output([sys.executable, '-c', {TELL!r}], text=True))"
)


def told(code: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", code], text=True))


def test_the_peak_of_a_process_is_its_own_and_not_that_of_who_started_it():
    assert told(TELL_AFTER) > HELD_BYTES
    assert told(START_ONE_THAT_TELLS) < HELD_BYTES
