"""What the figures were measured on; no host name, no path."""

from __future__ import annotations

import os
import platform
import statistics
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from echo_sgl.cpu import activate
from eval.servers.server import CPU_ARGS

PROBES = 51


def on_cpu() -> bool:
    """True where the CPU platform would serve: there is no accelerator."""
    return activate() is not None


def device_args() -> tuple[str, ...]:
    """Server arguments for this machine: none where there is an accelerator."""
    return CPU_ARGS if on_cpu() else ()


def machine() -> str:
    """One line: CPU model, cores, accelerator if there is one."""
    line = f"{_cpu_model()}, {os.cpu_count()} cores"
    return line if on_cpu() else f"{line}, {_accelerator()}"


def probe_s() -> float:
    """How long the CPU takes for the same small work, now: a shared machine changes its speed."""
    # On one core: of many cores, one that is busy holds all of a matrix product up.
    values = np.random.default_rng(0).random(100_000)
    times_s = []
    for _ in range(PROBES):
        began_s = time.perf_counter()
        np.sort(values)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def provenance() -> dict[str, str]:
    """Machine, versions and date of a measurement."""
    return {
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "sglang": version("sglang"),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def peak_bytes() -> int:
    """The most memory that this process has held; `getrusage` also counts what its parent held."""
    status = Path("/proc/self/status").read_text()
    [num_kib] = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(num_kib) * 1024


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerator() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return "another accelerator"
