"""A fork of the zygote is what a Python started anew would be, to itself and to who asked."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_start.zygote import Forked
from tests.servers import ServerPool

pytestmark = pytest.mark.server

SPAWNING = """
import multiprocessing, os, sys, tempfile

def tell(queue):
    has_sglang = "sglang.srt.managers.scheduler" in sys.modules
    queue.put((os.getppid(), tempfile.gettempdir(), __name__, has_sglang))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    parent, *rest = queue.get()
    child.join()
    print(parent == os.getpid(), rest, child.exitcode, sys.argv[1:], flush=True)
    sys.exit(3)
"""


@pytest.fixture
def launch(server_for: ServerPool, tmp_path: Path):
    def launched(text: str, *args: str) -> tuple[Forked, Path]:
        script, output = tmp_path / "script.py", tmp_path / "output"
        script.write_text(text)
        with output.open("wb") as stdout:
            command, env = [sys.executable, str(script), *args], {"TMPDIR": str(tmp_path)}
            return server_for.zygote.launch(command, stdout=stdout, env=env), output

    return launched


def test_it_has_its_own_arguments_and_environment_and_its_children_are_its_own(
    launch, tmp_path: Path
) -> None:
    process, output = launch(SPAWNING, "--of", "its own")
    assert process.wait(60) == process.poll() == 3
    child = [str(tmp_path), "__mp_main__", True]
    assert output.read_text().splitlines()[-1] == f"True {child} 0 {['--of', 'its own']}"


def test_its_two_outputs_are_told_apart(server_for: ServerPool) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit('why')"
    ended = server_for.zygote.run([sys.executable, "-c", script], env={}, timeout_s=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "out\n", "err\nwhy\n")
    with pytest.raises(subprocess.TimeoutExpired):
        sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
        server_for.zygote.run(sleeping, env={}, timeout_s=0.1)


def test_whoever_asked_can_wait_for_it_and_end_it(launch) -> None:
    process, _ = launch("import time\ntime.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    process.kill()  # it is gone, and nobody else is hit


def test_an_error_is_printed_and_ends_it_with_code_1(launch) -> None:
    process, output = launch("raise ValueError('so it is')")
    assert process.wait(60) == 1
    assert "ValueError: so it is" in output.read_text()
